// Kernels with one fault each, and kernels without any, for test_emulator.py.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <pybind11/numpy.h>

#include "cuda/launch.cuh"

namespace {

using namespace torchweld;

constexpr int kThreads = 128;

// Reverses 128 elements through shared memory.
template <bool Barrier>
__global__ void reverse(const float* x, float* y) {
  __shared__ float shared[kThreads];
  const int i = threadIdx.x;
  shared[i] = x[i];
  if (Barrier) __syncthreads();
  y[i] = shared[kThreads - 1 - i];  // a missing barrier is reported at this line
}

__global__ void one_past_the_end(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i <= n) y[i] = x[i < n ? i : 0];  // an access out of bounds is reported at this line
}

__global__ void skip_the_last(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n - 1) y[i] = x[i];
}

__global__ void barrier_for_some(const float* x, float* y) {
  if (threadIdx.x < 40) __syncthreads();
  y[threadIdx.x] = x[threadIdx.x];
}

__global__ void read_unwritten_shared(const float*, float* y) {
  y[threadIdx.x] = ((float*)dynamic_shared())[threadIdx.x];
}

__global__ void order_of_warps(const float*, float* y) {
  __shared__ int next;
  if (threadIdx.x == 0) next = 0;
  __syncthreads();
  if (threadIdx.x % 32 == 0) y[atomicAdd(&next, 1)] = threadIdx.x / 32;
}

// Writes 8 results per lane, covering every warp operation.
__global__ void warp_operations(const float* x, float* y) {
  const int i = threadIdx.x, n = blockDim.x;
  const unsigned all = 0xffffffffu;
  const float v = x[i];
  y[i] = __shfl_xor_sync(all, v, 5);
  y[n + i] = __shfl_down_sync(all, v, 3);
  y[2 * n + i] = __shfl_up_sync(all, v, 2);
  y[3 * n + i] = __shfl_sync(all, v, 7);
  y[4 * n + i] = __popc(__ballot_sync(all, v > 0));
  y[5 * n + i] = __any_sync(all, v > 1) + 2 * __all_sync(all, v > -1);
  y[6 * n + i] = __syncthreads_count(v > 0) + 1000 * __syncthreads_or(v > 1);
  y[7 * n + i] = __shfl_xor_sync(all, v, 4, 8);
}

__global__ void round_trip(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = __bfloat16_as_ushort(__float2bfloat16_rn(x[i]));
  y[n + i] = __half_as_ushort(__float2half_rn(x[i]));
  y[2 * n + i] = __half2float(__float2half_rn(x[i]));
  y[3 * n + i] = __bfloat162float(__float2bfloat16_rn(x[i]));
}

// Each thread copies its elements to shared memory in three groups, and waits for the first.
__global__ void copy_behind(const float* x, float* y, int n) {
  float* shared = (float*)dynamic_shared() + threadIdx.x * 12;
  for (int group = 0; group < 3; ++group) {
    copy_async(shared + group * 4, x + threadIdx.x * 12 + group * 4);
    end_of_copies();
  }
  for (int left = 2; left >= 0; --left) {
    wait_for_copies(left);
    for (int i = 0; i < 12; ++i) y[(2 - left) * n + threadIdx.x * 12 + i] = shared[i];
  }
}

// Every block of a cluster hands its elements to the next one.
template <bool First, bool Barrier>
__global__ void pass_on(const float* x, float* y, int blocks) {
  float* shared = (float*)dynamic_shared() + threadIdx.x;
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (First) {
    arrive_at_cluster();
    wait_for_cluster();
  }
  store_to_block(shared, (blockIdx.x + 1) % blocks, x[i]);
  if (Barrier) {
    arrive_at_cluster();
    wait_for_cluster();
  }
  y[i] = *shared;  // an element of another block, which nobody waited for
  arrive_at_cluster();
  wait_for_cluster();
}

__global__ void cluster_barrier_for_some(const float*, float*, int) {
  if (blockIdx.x == 0) return;
  arrive_at_cluster();
  wait_for_cluster();
}

using Array = pybind11::array_t<float, pybind11::array::c_style>;

void raise(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// A function of numpy arrays x and y that launches `kernel` on one block.
template <class Kernel>
auto on_one_block(Kernel kernel) {
  return [kernel](const Array& x, Array& y) {
    const int threads = (int)x.size();
    raise(
        launch(kernel, {1, threads, threads * sizeof(float)}, nullptr, x.data(), y.mutable_data()));
  };
}
template <class Kernel>
auto on_elements(Kernel kernel) {
  return [kernel](const Array& x, Array& y) {
    const int n = (int)x.size();
    raise(
        launch(kernel, {dim3(n / kThreads + 1), kThreads}, nullptr, x.data(), y.mutable_data(), n));
  };
}

// A function of numpy arrays that launches `kernel` on clusters of `blocks` blocks of a warp.
template <class Kernel>
auto on_clusters(Kernel kernel) {
  return [kernel](const Array& x, Array& y, int blocks) {
    const Launch how{dim3((unsigned)x.size() / 32), 32, 32 * sizeof(float), (unsigned)blocks};
    raise(launch(kernel, how, nullptr, x.data(), y.mutable_data(), blocks));
  };
}

}  // namespace

PYBIND11_MODULE(torchweld_planted, m) {
  m.def("reverse", on_one_block(reverse<true>));
  m.def("missing_barrier", on_one_block(reverse<false>));
  m.def("one_past_the_end", on_elements(one_past_the_end));
  m.def("skip_the_last", on_elements(skip_the_last));
  m.def("barrier_for_some", on_one_block(barrier_for_some));
  m.def("read_unwritten_shared", on_one_block(read_unwritten_shared));
  m.def("order_of_warps", on_one_block(order_of_warps));
  m.def("warp_operations", on_one_block(warp_operations));
  m.def("round_trip", on_elements(round_trip));
  m.def("pass_on", on_clusters(pass_on<true, true>));
  m.def("pass_on_too_early", on_clusters(pass_on<false, true>));
  m.def("missing_cluster_barrier", on_clusters(pass_on<true, false>));
  m.def("cluster_barrier_for_some", on_clusters(cluster_barrier_for_some));
  m.def("copy_behind", [](const Array& x, Array& y) {
    const int n = (int)x.size();
    raise(launch(copy_behind, {1, n / 12, n * sizeof(float)}, nullptr, x.data(), y.mutable_data(),
                 n));
  });
}
