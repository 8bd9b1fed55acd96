// How a binding reaches its kernels. The same code serves both devices:
//
//   TW_KERNEL(layer_norm_forward, NormForward);        a kernel of csrc/cpu or csrc/cuda
//   TW_FUNCTION(int64_t, norm_chunks, int64_t, int64_t);   a plain function next to it
//   launch(layer_norm_forward, args, like, items, elements_per_item);
//   TW_IMPLEMENT(m) { m.impl(TW_OVERLOAD("layer_norm"), TW_BOX(&layer_norm)); }
//
// Each binding is compiled once for each library. A CPU kernel processes a range of items and comes
// from the shared object of the instruction set in use. A CUDA kernel is a launcher linked into
// this library.
#pragma once

#include <utility>

#include "bind/tensor.h"

namespace torchweld {

using Boxed = void (*)(StableIValue*, uint64_t, uint64_t);

#if !defined(TW_CUDA)
// Keeps a kernel for torchweld_find_kernel.
void keep_kernel(const char* overload, Boxed kernel);
#endif

// A binding that first checks that its tensors have memory.
template <auto function>
struct Checked;
template <class Result, class... Args, Result (*function)(Args...)>
struct Checked<function> {
  static Result call(Args... args) {
    (check_memory(args), ...);
    return function(std::forward<Args>(args)...);
  }
};

// Registers kernels with torch.
struct Implementations {
  torch::stable::detail::StableLibrary& library;
  void impl(const char* overload, Boxed kernel) const {
    library.impl(overload, kernel);
#if !defined(TW_CUDA)
    keep_kernel(overload, kernel);
#endif
  }
};

}  // namespace torchweld

#define TW_BOX(function) TORCH_BOX(&torchweld::Checked<function>::call)
#define TW_IMPLEMENT(m)                                      \
  static void implement(const torchweld::Implementations&);  \
  STABLE_TORCH_LIBRARY_IMPL(torchweld, TW_DEVICE, library) { \
    implement(torchweld::Implementations{library});          \
  }                                                          \
  static void implement(const torchweld::Implementations& m)

#if defined(TW_CUDA)

#include <cuda_runtime.h>

#define TW_FUNCTION(Result, name, ...) extern "C" Result name(__VA_ARGS__)
#define TW_KERNEL(name, Args) TW_FUNCTION(cudaError_t, name, const torchweld::Args&, cudaStream_t)
#define TW_OVERLOAD(op) op ".cuda"

#if defined(TW_EMULATED)  // tests/emulator runs the CUDA kernels on CPU tensors
#define TW_DEVICE CPU
#else
#define TW_DEVICE CUDA
#endif

// torch's headers declare this function only if torch itself was built with CUDA.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                             void** ret_stream);

namespace torchweld {

class DeviceGuard {
 public:
#if defined(TW_EMULATED)
  explicit DeviceGuard(const Tensor&) { ++emulator::emulator_device_guards; }
  ~DeviceGuard() { --emulator::emulator_device_guards; }
  cudaStream_t stream() const { return nullptr; }
#else
  explicit DeviceGuard(const Tensor& like) : index_(like.get_device_index()), guard_(index_) {}
  cudaStream_t stream() const {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index_, &stream));
    return static_cast<cudaStream_t>(stream);
  }

 private:
  torch::stable::accelerator::DeviceIndex index_;
  torch::stable::accelerator::DeviceGuard guard_;
#endif
};

template <class Args>
void launch(cudaError_t (*kernel)(const Args&, cudaStream_t), const Args& args, const Tensor& like,
            int64_t items, int64_t /*elements_per_item*/) {
  if (items == 0) return;
  const DeviceGuard device(like);
  const cudaError_t error = kernel(args, device.stream());
  STD_TORCH_CHECK(error == cudaSuccess, "CUDA: ", cudaGetErrorString(error));
}

}  // namespace torchweld

#else

#include <atomic>

#define TW_FUNCTION(Result, name, ...) \
  const torchweld::Symbol<Result(__VA_ARGS__)> name { #name }
#define TW_KERNEL(name, Args) TW_FUNCTION(void, name, const torchweld::Args&, int64_t, int64_t)
#define TW_OVERLOAD(op) op ".cpu"
#define TW_DEVICE CPU

namespace torchweld {

// Does nothing: the CPU is one device.
struct DeviceGuard {
  explicit DeviceGuard(const Tensor&) {}
};

// The address of kernel `name` for the instruction set in use, or for the baseline.
void* cpu_symbol(const char* name, bool baseline);

template <class Signature>
class Symbol;
template <class Result, class... Args>
class Symbol<Result(Args...)> {
 public:
  explicit constexpr Symbol(const char* name) : name_(name) {}
  Result operator()(Args... args) const { return get(false)(args...); }
  Result (*get(bool baseline) const)(Args...) {
    // Resolved at first use. Threads that race resolve the same address.
    void*& address = addresses_[baseline];
    if (!address) address = cpu_symbol(name_, baseline);
    return reinterpret_cast<Result (*)(Args...)>(address);
  }

 private:
  const char* name_;
  mutable void* addresses_[2] = {};
};

// Smaller tasks are not worth another thread.
constexpr int64_t kElementsPerTask = 16384;

// Launches items of unequal work. Threads split the work by amount, and item(amount) is the first
// item that begins at or after that amount.
template <class Args, class Item>
void launch_amounts(const Symbol<void(const Args&, int64_t, int64_t)>& kernel, const Args& args,
                    int64_t amounts, int64_t grain, Item&& item) {
  const auto run = kernel.get(/*baseline=*/args.dtype == DType::f64);
  torch::stable::parallel_for(
      0, amounts, grain, [&](int64_t begin, int64_t end) { run(args, item(begin), item(end)); });
}

template <class Args>
void launch(const Symbol<void(const Args&, int64_t, int64_t)>& kernel, const Args& args,
            const Tensor& /*like*/, int64_t items, int64_t elements_per_item) {
  const int64_t grain = kElementsPerTask / (elements_per_item + 1) + 1;
  launch_amounts(kernel, args, items, grain, [](int64_t item) { return item; });
}

// Launches items of unequal work, longest first. Each thread takes the next item when it has
// finished one.
template <class Args>
void launch_queue(const Symbol<void(const Args&, int64_t, int64_t)>& kernel, const Args& args,
                  int64_t items, int64_t elements) {
  const auto run = kernel.get(/*baseline=*/args.dtype == DType::f64);
  const int64_t grain = elements < kElementsPerTask ? items + 1 : 1;
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, items, grain, [&](int64_t, int64_t) {
    for (int64_t item = next++; item < items; item = next++) run(args, item, item + 1);
  });
}

}  // namespace torchweld

#endif
