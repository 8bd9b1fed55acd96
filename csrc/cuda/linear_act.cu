// linear_act as one GEMM of cuBLASLt's, whose epilogue adds the bias, activates, and stores the sum
// before the activation where there is a gradient. It has gelu by tanh; there is none by erf and
// none for silu, and its relu makes 0 of NaN.
//
// With M rows, K inputs and N outputs it does 2 M N K operations; at 16 bits it reads 2 (M K + N K)
// bytes and writes 2 M N of y and, where there is a gradient, as many of z. torch's GEMM and a pass
// of bias_act move 2 M N more, or 4 M N more. Its floor is the bare GEMM with that one more tensor
// to write: triton_kernels/linear_act.py has the times on an H200, by which the unfused form is at
// 1.08x the GEMM at (8192, 4096) x 16384 and this one should be below 1.06x, with the library's own
// main loop and an epilogue that overlaps it.
//
// The backward is torch's two GEMMs and bias_act's pass, which has both gradients of the sum. To be
// tried on a GPU: DGELU_BGRAD in the GEMM behind it in an mlp.
#include "cuda/linear_act.h"

#include <map>
#include <mutex>
#include <tuple>

#include "core/dispatch.h"
#include "cuda/cublaslt.h"

namespace torchweld {
namespace {

// What cuBLASLt asks of the rows of z, in elements; its fast kernels ask the same of x and weight.
constexpr int64_t kMultiple = 8;
// Of addresses, in bytes.
constexpr uint32_t kAlignment = 16;
constexpr int64_t kMostRows = (int64_t{1} << 31) - 1;
// As torch has it on Hopper.
constexpr uint64_t kMostWorkspaceBytes = 32 << 20;

bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % kAlignment == 0; }

bool is_served(const LinearAct& a) {
  return a.rows > 0 && a.rows <= kMostRows && a.columns > 0 && a.columns % kMultiple == 0 &&
         a.inner > 0 && a.inner % kMultiple == 0 && is_aligned(a.x) && is_aligned(a.weight) &&
         is_aligned(a.bias) && a.dtype != DType::f64 && lt::functions().all();
}

// cuBLASLt counts columns first: to it y is weight^T, transposed, times x.
class Gemm {
 public:
  lt::Desc* desc = nullptr;
  lt::Layout *weight = nullptr, *x = nullptr, *y = nullptr;
  lt::Status status = lt::Status::success;

  explicit Gemm(const LinearAct& a) {
    const lt::DataType type = a.dtype == DType::f32    ? lt::DataType::f32
                              : a.dtype == DType::bf16 ? lt::DataType::bf16
                                                       : lt::DataType::f16;
    then([&] {
      return lt_.MatmulDescCreate(&desc, a.tf32 ? lt::Compute::tf32 : lt::Compute::f32,
                                  lt::DataType::f32);
    });
    set(lt::DescAttribute::transpose_a, lt::Transpose::yes);
    set(lt::DescAttribute::epilogue,
        uint32_t{lt::kGelu} | (a.bias ? lt::kBias : 0u) | (a.z ? lt::kAux : 0u));
    if (a.bias) set(lt::DescAttribute::bias, a.bias);
    if (a.z) {
      set(lt::DescAttribute::aux, a.z);
      set(lt::DescAttribute::aux_ld, a.columns);
    }
    const auto layout = [&](lt::Layout*& made, int64_t rows, int64_t columns) {
      then([&] { return lt_.MatrixLayoutCreate(&made, type, rows, columns, rows); });
    };
    layout(weight, a.inner, a.columns);
    layout(x, a.inner, a.rows);
    layout(y, a.columns, a.rows);
  }
  ~Gemm() {
    for (lt::Layout* made : {weight, x, y}) {
      if (made) lt_.MatrixLayoutDestroy(made);
    }
    if (desc) lt_.MatmulDescDestroy(desc);
  }
  Gemm(const Gemm&) = delete;

  // The first failure stays.
  template <class Step>
  void then(const Step& step) {
    if (status == lt::Status::success) status = step();
  }

 private:
  template <class T>
  void set(lt::DescAttribute attribute, const T& value) {
    then([&] { return lt_.MatmulDescSetAttribute(desc, attribute, &value, sizeof value); });
  }

  const lt::Functions& lt_ = lt::functions();
};

// The algorithm for a problem of these sizes, wherever its tensors are.
struct Plan {
  lt::Handle* handle = nullptr;
  lt::Heuristic found = {};
  lt::Status status = lt::Status::success;
};

Plan first_of_the_heuristic(lt::Handle* handle, LinearAct a) {
  // It looks at these addresses for no more than their alignment: others come with the same plan.
  void* const somewhere = reinterpret_cast<void*>(uintptr_t{kAlignment});
  if (a.bias) a.bias = somewhere;
  if (a.z) a.z = somewhere;
  const lt::Functions& lt = lt::functions();
  Gemm gemm(a);
  lt::Preference* preference = nullptr;
  gemm.then([&] { return lt.MatmulPreferenceCreate(&preference); });
  const auto prefer = [&](lt::Choice choice, const auto& value) {
    gemm.then(
        [&] { return lt.MatmulPreferenceSetAttribute(preference, choice, &value, sizeof value); });
  };
  prefer(lt::Choice::workspace_bytes, kMostWorkspaceBytes);
  prefer(lt::Choice::reductions, lt::kReduceInFloat32);
  for (const lt::Choice of : {lt::Choice::alignment_a, lt::Choice::alignment_b,
                              lt::Choice::alignment_c, lt::Choice::alignment_d}) {
    prefer(of, kAlignment);
  }
  Plan plan;
  int count = 0;
  gemm.then([&] {
    return lt.MatmulAlgoGetHeuristic(handle, gemm.desc, gemm.weight, gemm.x, gemm.y, gemm.y,
                                     preference, 1, &plan.found, &count);
  });
  gemm.then([&] { return count == 0 ? lt::Status::not_supported : plan.found.state; });
  if (preference) lt.MatmulPreferenceDestroy(preference);
  plan.handle = handle;
  plan.status = gemm.status;
  return plan;
}

// The plan for these sizes on the current device, found once.
Plan plan_of(const LinearAct& a) {
  using Key = std::tuple<int, int64_t, int64_t, int64_t, DType, bool, bool, bool>;
  struct Known {
    std::mutex mutex;
    std::map<int, lt::Handle*> handles;
    std::map<Key, Plan> plans;
  };
  // Never destroyed: at exit CUDA may be gone before.
  static Known& known = *new Known;
  constexpr size_t kMost = 4096;
  int device = 0;
  cudaGetDevice(&device);
  const Key key{device, a.rows, a.columns, a.inner, a.dtype, a.tf32, !!a.bias, !!a.z};
  const std::lock_guard<std::mutex> lock(known.mutex);
  if (const auto at = known.plans.find(key); at != known.plans.end()) return at->second;
  lt::Handle*& handle = known.handles[device];
  if (!handle) {
    const lt::Status status = lt::functions().Create(&handle);
    if (status != lt::Status::success) return {nullptr, {}, status};
  }
  if (known.plans.size() == kMost) known.plans.clear();
  return known.plans[key] = first_of_the_heuristic(handle, a);
}

}  // namespace

// The workspace that linear_act_forward wants for these.
TW_EXPORT int linear_act_plan(const LinearAct& a, int64_t* workspace_bytes) {
  if (!is_served(a)) return kNotServed;
  const Plan plan = plan_of(a);
  *workspace_bytes = static_cast<int64_t>(plan.found.workspace_bytes);
  return plan.status == lt::Status::not_supported ? kNotServed : static_cast<int>(plan.status);
}

TW_EXPORT int linear_act_forward(const LinearAct& a, void* workspace, cudaStream_t stream) {
  const Plan plan = plan_of(a);
  const float one = 1, zero = 0;
  Gemm gemm(a);
  gemm.then([&] {
    return lt::functions().Matmul(plan.handle, gemm.desc, &one, a.weight, gemm.weight, a.x, gemm.x,
                                  &zero, a.y, gemm.y, a.y, gemm.y, &plan.found.algorithm, workspace,
                                  plan.found.workspace_bytes, stream);
  });
  return static_cast<int>(gemm.status);
}

}  // namespace torchweld
