// LayerNorm and RMSNorm in CUDA. Nothing here has been measured yet. This header argues for the
// design, and bench/evidence will hold the figures.
//
// 1. The floor. Forward reads x and writes y, 2 tensors of rows x width. Backward reads grad_y and
//    x and writes grad_x, 3 tensors. At bf16 32768 x 4096 these are 0.54 and 0.81 GB, 125 and 187
//    us at the 4.3 TB/s that a copy reaches on an H200. Statistics are 8 bytes a row, parameters
//    stay in L2.
//
// 2. Rows in registers. A row is read once: between the statistics and the result its elements stay
//    in the registers of its threads, as the bits that memory has. Latency of about 1 us times
//    bandwidth asks for some 32 KB in flight on each multiprocessor: 4 loads of 16 bytes a thread
//    are 128 KB at 2048 threads and 64 KB at 1024 threads. A thread holds 1, 4 or 16 such loads
//    (V):
//      - V = 1, a part of a warp for each row, up to 256 (16-bit) or 128 (fp32) elements: narrow
//        rows share a block, without a barrier;
//      - V = 4, up to 1024 threads, 32768 or 16384 elements;
//      - V = 16, 512 threads, twice that. One block fills a multiprocessor, so nothing would load
//        while the block reduces and stores. The block therefore first brings its next row into L2
//        (132 rows of 128 KB are 17 of 50 MB), and DRAM stays busy.
//
// 3. Backward owns columns. A block walks down its chunk of rows. A thread keeps the same 16
//    columns (8 and 4 where V = 1) all the way, and holds their parameter gradients in 32
//    registers: partial sums are written once a chunk. 264 chunks at width 4096 are 8.7 MB written
//    and read, 2% of the floor. 2 blocks of 256 threads load 2 x 256 x 64 (16-bit) or 128 (fp32)
//    bytes a row: 32 or 64 KB a multiprocessor. In 16 bits there are registers for the next row
//    too, which loads while the current row is reduced.
//
// 4. Backward of wide rows. Several blocks share a row past 4096 columns, each with its slice of
//    columns. A whole row in one block would leave no registers for the parameter gradients, and
//    keeping those in memory would move 16 bytes an element for the 6 that count (bf16). The blocks
//    pass each other two sums through L2, in words that carry the row's number, so that no flag and
//    no fence is needed. They are launched together (cooperative). At 65536 columns 16 blocks share
//    a row. 2 blocks on each multiprocessor and a row loaded ahead cover an exchange of about 2 us,
//    since a row's 3 x 8 KB a block take 2 x 0.75 us at full bandwidth. The margin is thin, and is
//    the first thing to measure.
//
// 5. Anything else (a width that is not a multiple of 16 bytes, a pointer off by an element, a
//    width past what fits) goes element by element, several times over each row, with L2 behind it.
//    This path aims at correct results first.
#include "core/norm.h"

#include <cuda_runtime.h>

#include "core/dispatch.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"

TW_EXPORT int64_t norm_workspace_bytes(int64_t chunks, int64_t width);

namespace {

using namespace torchweld;

constexpr int kForwardThreads = 1024;
constexpr int kWideThreads = 512;
constexpr int kBackwardThreads = 256;
constexpr int kBackwardElements = 16;  // columns per thread
constexpr int kSlice = kBackwardThreads * kBackwardElements;
constexpr int kBlocksPerMultiprocessor = 2;

// A thread's V loads of a row, its shares. The width is a multiple of an access.
template <class T, int V>
struct Shares {
  static constexpr int kElements = Packed<T>::kElements;
  int thread, threads;
  int64_t begin, end;  // columns

  __device__ __forceinline__ int64_t at(int v) const {
    return begin + (int64_t)(v * threads + thread) * kElements;
  }
  __device__ __forceinline__ bool has(int v) const { return at(v) < end; }
};

// Kernels multiply by this: an exact division is a call, which spills registers around it.
float per_width_of(int64_t width) { return (float)(1.0 / (double)width); }

// --- Forward ------------------------------------------------------------------------------------

template <bool Centered, class T, int V>
__global__ void __launch_bounds__(V == 1   ? kNarrowBlock
                                  : V == 4 ? kForwardThreads
                                           : kWideThreads)
    forward_in_registers(NormForward a, float per_width, int row_threads) {
  // A compile-time constant where registers are scarce: addresses are then one register and
  // constants.
  const int threads = V == 16 ? kWideThreads : row_threads;
  constexpr int N = Packed<T>::kElements;
  const bool float_params = a.param_dtype == DType::f32;
  const int rows_here = blockDim.x / threads;
  const int64_t stride = (int64_t)gridDim.x * rows_here;
  const Shares<T, V> shares{(int)threadIdx.x % threads, threads, 0, a.width};
  float* scratch = (float*)dynamic_shared();
  int turn = 0;  // alternates between two scratch areas
  const auto row_sum = [&](float value) {
    float sum[1] = {value};
    sum_over_row(sum, threads, scratch + (turn++ & 1) * kWarp);
    return sum[0];
  };

  for (int64_t first = (int64_t)blockIdx.x * rows_here; first < a.rows; first += stride) {
    const int64_t row = first + threadIdx.x / threads;
    const bool exists = row < a.rows;  // all threads take part in the sums
    const T* x = (const T*)a.x + row * a.width;
    Packed<T> kept[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (exists && shares.has(v)) kept[v] = load_once(x + shares.at(v));
    }
    if constexpr (V == 16) {
      if (row + stride < a.rows && shares.thread % 8 == 0) {
        const T* next = x + stride * a.width;
#pragma unroll
        for (int v = 0; v < V; ++v) {
          if (shares.has(v)) prefetch_l2(next + shares.at(v));
        }
      }
    }

    float mean = 0;
    if constexpr (Centered) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (!exists || !shares.has(v)) continue;
#pragma unroll
        for (int i = 0; i < N; ++i) mean += kept[v][i];
      }
      mean = row_sum(mean) * per_width;
    }
    float squares = 0;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if constexpr (Centered) kept[v].forget_floats();
      if (!exists || !shares.has(v)) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) squares += (kept[v][i] - mean) * (kept[v][i] - mean);
    }
    const float rstd = rsqrtf(row_sum(squares) * per_width + (float)a.eps);

    if (!exists) continue;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      kept[v].forget_floats();
      if (!shares.has(v)) continue;
      float y[N], parameters[N];
#pragma unroll
      for (int i = 0; i < N; ++i) y[i] = norm_normalize(kept[v][i], mean, rstd);
      if (a.weight) {
        load_parameters<T>(parameters, a.weight, shares.at(v), float_params);
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] *= parameters[i];
      }
      if (a.bias) {
        load_parameters<T>(parameters, a.bias, shares.at(v), float_params);
#pragma unroll
        for (int i = 0; i < N; ++i) y[i] += parameters[i];
      }
      store((T*)a.y + row * a.width + shares.at(v), y);
    }
    if (shares.thread == 0) {
      if constexpr (Centered) ((float*)a.mean)[row] = mean;
      ((float*)a.rstd)[row] = rstd;
    }
  }
}

// This thread's part of a sum over a row, in runs, so that rounding does not grow with the row.
template <class Term>
__device__ __forceinline__ float sum_in_runs(int64_t width, Term&& term) {
  constexpr int kRun = 32;
  float total = 0;
  for (int64_t base = threadIdx.x; base < width; base += (int64_t)kRun * blockDim.x) {
    float sum = 0;
    for (int64_t i = base; i < width && i < base + (int64_t)kRun * blockDim.x; i += blockDim.x) {
      sum += term(i);
    }
    total += sum;
  }
  return total;
}

// One block per row, any width and alignment.
template <bool Centered, class T>
__global__ void __launch_bounds__(kBackwardThreads, 1) forward_any(NormForward a, float per_width) {
  const bool float_params = a.param_dtype == DType::f32;
  float* scratch = (float*)dynamic_shared();
  int turn = 0;
  const auto row_sum = [&](float value) {
    float sum[1] = {value};
    sum_over_row(sum, blockDim.x, scratch + (turn++ & 1) * kWarp);
    return sum[0];
  };
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* x = (const T*)a.x + row * a.width;
    T* y = (T*)a.y + row * a.width;
    float mean = 0;
    if constexpr (Centered) {
      mean = sum_in_runs(a.width, [&](int64_t i) { return to_float(x[i]); });
      mean = row_sum(mean) * per_width;
    }
    const float squares = sum_in_runs(a.width, [&](int64_t i) {
      const float centered = to_float(x[i]) - mean;
      return centered * centered;
    });
    const float rstd = rsqrtf(row_sum(squares) * per_width + (float)a.eps);
    for (int64_t i = threadIdx.x; i < a.width; i += blockDim.x) {
      float value = norm_normalize(to_float(x[i]), mean, rstd);
      if (a.weight) value *= parameter<T>(a.weight, i, float_params);
      if (a.bias) value += parameter<T>(a.bias, i, float_params);
      y[i] = from_float<T>(value);
    }
    if (threadIdx.x == 0) {
      if constexpr (Centered) ((float*)a.mean)[row] = mean;
      ((float*)a.rstd)[row] = rstd;
    }
  }
}

template <bool Centered, class T, int V>
cudaError_t launch_forward(const NormForward& a, cudaStream_t stream) {
  const int threads = V == 16 ? kWideThreads : threads_of_row(a.width / Packed<T>::kElements, V);
  const int block = threads <= kWarp ? kNarrowBlock : threads;
  const int64_t blocks = (a.rows + block / threads - 1) / (block / threads);
  // V = 16 walks over rows in order to know the next one. Otherwise blocks start as resources free
  // up.
  const int64_t most = V == 16 ? multiprocessors() : 1 << 30;
  return launch(forward_in_registers<Centered, T, V>,
                {dim3((unsigned)(blocks < most ? blocks : most)), block, 2 * kWarp * sizeof(float)},
                stream, a, per_width_of(a.width), threads);
}

template <bool Centered>
cudaError_t forward(const NormForward& a, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;  // for a type that has no kernel
  if (a.rows == 0 || a.width == 0) return cudaSuccess;
  dispatch(a.dtype, DType::f32, [&](auto t, auto) {
    using T = typename decltype(t)::type;
    constexpr int N = Packed<T>::kElements;
    const bool aligned = a.width % N == 0 && is_aligned(a.x) && is_aligned(a.y) &&
                         is_aligned(a.weight) && is_aligned(a.bias);
    if (aligned && a.width <= kWarp * N) {
      error = launch_forward<Centered, T, 1>(a, stream);
    } else if (aligned && a.width <= kForwardThreads * 4 * N) {
      error = launch_forward<Centered, T, 4>(a, stream);
    } else if (aligned && a.width <= kWideThreads * 16 * N) {
      error = launch_forward<Centered, T, 16>(a, stream);
    } else {
      const int64_t most = 1 << 30;
      error = launch(forward_any<Centered, T>,
                     {dim3((unsigned)(a.rows < most ? a.rows : most)), kBackwardThreads,
                      2 * kWarp * sizeof(float)},
                     stream, a, per_width_of(a.width));
    }
  });
  return error;
}

// --- Backward -----------------------------------------------------------------------------------

// The blocks that share a row, one for each slice of columns, and the words that they pass each
// other. One half of a word is a sum, the other the number of its row, counted from 1.
struct Exchange {
  uint64_t* words;  // [chunks][2 rows][slices][2 sums]
  int slices;

  // Adds the sums of the other slices, slice by slice. A block is at most one row ahead of another,
  // so two rows of words are enough.
  __device__ __forceinline__ void add_slices(float (&sums)[2], int64_t chunk, int slice,
                                             int64_t row_number, float* shared) const {
    uint64_t* row = words + (chunk * 2 + row_number % 2) * slices * 2;
    if (threadIdx.x < 2) {
      publish(row + slice * 2 + threadIdx.x,
              (uint64_t)row_number << 32 | __float_as_uint(threadIdx.x ? sums[1] : sums[0]));
    }
    if (threadIdx.x < kWarp) {
      float total[2] = {};
      for (int base = 0; base < slices; base += kWarp) {
        const int other = base + threadIdx.x;
        float part[2] = {};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          if (other >= slices) continue;
          uint64_t word = observe(row + other * 2 + n);
          while (word >> 32 != (uint32_t)row_number) word = observe(row + other * 2 + n);
          part[n] = __uint_as_float((uint32_t)word);
        }
        sum_over_row(part, kWarp, nullptr);
        total[0] += part[0];
        total[1] += part[1];
      }
      if (threadIdx.x == 0) shared[0] = total[0], shared[1] = total[1];
    }
    __syncthreads();
    sums[0] = shared[0];
    sums[1] = shared[1];
  }
};

template <bool Centered, class T, int V>
__global__ void __launch_bounds__(kBackwardThreads, kBlocksPerMultiprocessor)
    backward_in_registers(NormBackward a, float per_width, int threads, Exchange exchange) {
  constexpr int N = Packed<T>::kElements;
  const bool float_params = a.param_dtype == DType::f32;
  const int64_t chunk = blockIdx.x / exchange.slices;
  const int slice = blockIdx.x % exchange.slices;
  const int groups = blockDim.x / threads, group = threadIdx.x / threads;
  const int64_t begin = (int64_t)slice * kSlice;
  const Shares<T, V> shares{(int)threadIdx.x % threads, threads, begin,
                            begin + kSlice < a.width ? begin + kSlice : a.width};
  float* scratch = (float*)dynamic_shared();  // two areas for the sums, then two for the exchange
  const int64_t first = chunk_begin(a.rows, a.chunks, chunk),
                last = chunk_begin(a.rows, a.chunks, chunk + 1);

  constexpr bool kAhead = sizeof(T) == 2;
  float grad_weight[V][N] = {}, grad_bias[V][N] = {};
  Packed<T> next_x[V], next_grad[V];
  const auto load_row = [&](int64_t row) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (row >= last || !shares.has(v)) continue;
      next_x[v] = load_once((const T*)a.x + row * a.width + shares.at(v));
      next_grad[v] = load_once((const T*)a.grad_y + row * a.width + shares.at(v));
    }
  };
  if constexpr (kAhead) load_row(first + group);

  for (int64_t top = first, turn = 0; top < last; top += groups, ++turn) {
    const int64_t row = top + group;
    const bool exists = row < last;
    const float mean = Centered && exists ? ((const float*)a.mean)[row] : 0;
    const float rstd = exists ? ((const float*)a.rstd)[row] : 0;
    if constexpr (!kAhead) load_row(row);
    Packed<T> x[V], grad[V];
#pragma unroll
    for (int v = 0; v < V; ++v) x[v] = next_x[v], grad[v] = next_grad[v];
    if constexpr (kAhead) load_row(row + groups);

    float sums[2] = {};  // of g and of g * x_hat
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (!exists || !shares.has(v)) continue;
      float weight[N];
      if (a.weight) load_parameters<T>(weight, a.weight, shares.at(v), float_params);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float g = a.weight ? grad[v][i] * weight[i] : grad[v][i];
        const float x_hat = norm_normalize(x[v][i], mean, rstd);
        if constexpr (Centered) sums[0] += g;
        sums[1] += g * x_hat;
        grad_weight[v][i] += grad[v][i] * x_hat;
        grad_bias[v][i] += grad[v][i];
      }
    }
    sum_over_row(sums, threads, scratch + (turn & 1) * 2 * kWarp);
    if (exchange.slices > 1) {
      exchange.add_slices(sums, chunk, slice, row + 1, scratch + 4 * kWarp + (turn & 1) * 2);
    }
    const float mean_g = sums[0] * per_width, mean_g_x_hat = sums[1] * per_width;

#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (!exists || !shares.has(v)) continue;
      float weight[N], result[N];
      if (a.weight) load_parameters<T>(weight, a.weight, shares.at(v), float_params);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float g = a.weight ? grad[v][i] * weight[i] : grad[v][i];
        const float x_hat = norm_normalize(x[v][i], mean, rstd);
        result[i] = norm_grad_x(g, x_hat, rstd, mean_g, mean_g_x_hat);
      }
      store((T*)a.grad_x + row * a.width + shares.at(v), result);
    }
  }

  // Rows that were walked side by side are added up in shared memory, group by group.
  const auto write_partials = [&](float (&sums)[V][N], float* partials) {
    if (!partials) return;
    partials += chunk * a.width;
    if (groups == 1) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (!shares.has(v)) continue;
#pragma unroll
        for (int i = 0; i < N; ++i) partials[shares.at(v) + i] = sums[v][i];
      }
      return;
    }
    __syncthreads();
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (!shares.has(v)) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) scratch[group * a.width + shares.at(v) + i] = sums[v][i];
    }
    __syncthreads();
    for (int64_t column = threadIdx.x; column < a.width; column += blockDim.x) {
      float sum = 0;
      for (int g = 0; g < groups; ++g) sum += scratch[g * a.width + column];
      partials[column] = sum;
    }
  };
  write_partials(grad_weight, (float*)a.weight_partials);
  write_partials(grad_bias, (float*)a.bias_partials);
}

// One block per chunk, any width and alignment. A thread keeps to its columns; their sums are in
// memory.
template <bool Centered, class T>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    backward_any(NormBackward a, float per_width) {
  const bool float_params = a.param_dtype == DType::f32;
  float* scratch = (float*)dynamic_shared();
  float* weight_partial = (float*)a.weight_partials;
  float* bias_partial = (float*)a.bias_partials;
  if (weight_partial) weight_partial += blockIdx.x * a.width;
  if (bias_partial) bias_partial += blockIdx.x * a.width;
  for (int64_t i = threadIdx.x; i < a.width; i += blockDim.x) {
    if (weight_partial) weight_partial[i] = 0;
    if (bias_partial) bias_partial[i] = 0;
  }
  const int64_t last = chunk_begin(a.rows, a.chunks, blockIdx.x + 1);
  for (int64_t row = chunk_begin(a.rows, a.chunks, blockIdx.x); row < last; ++row) {
    const T* x = (const T*)a.x + row * a.width;
    const T* grad = (const T*)a.grad_y + row * a.width;
    const float mean = Centered ? ((const float*)a.mean)[row] : 0;
    const float rstd = ((const float*)a.rstd)[row];
    float sums[2] = {};
    for (int64_t i = threadIdx.x; i < a.width; i += blockDim.x) {
      const float gradient = to_float(grad[i]);
      const float x_hat = norm_normalize(to_float(x[i]), mean, rstd);
      const float g = a.weight ? gradient * parameter<T>(a.weight, i, float_params) : gradient;
      if (weight_partial) weight_partial[i] += gradient * x_hat;
      if (bias_partial) bias_partial[i] += gradient;
      if constexpr (Centered) sums[0] += g;
      sums[1] += g * x_hat;
    }
    sum_over_row(sums, blockDim.x, scratch + row % 2 * 2 * kWarp);
    const float mean_g = sums[0] * per_width, mean_g_x_hat = sums[1] * per_width;
    for (int64_t i = threadIdx.x; i < a.width; i += blockDim.x) {
      const float gradient = to_float(grad[i]);
      const float x_hat = norm_normalize(to_float(x[i]), mean, rstd);
      const float g = a.weight ? gradient * parameter<T>(a.weight, i, float_params) : gradient;
      ((T*)a.grad_x)[row * a.width + i] =
          from_float<T>(norm_grad_x(g, x_hat, rstd, mean_g, mean_g_x_hat));
    }
  }
}

int slices_of(int64_t width) { return (int)((width + kSlice - 1) / kSlice); }

template <bool Centered, class T, int V>
cudaError_t launch_backward(const NormBackward& a, cudaStream_t stream) {
  const int slices = slices_of(a.width);
  const int64_t columns = slices > 1 ? kSlice : a.width;
  const int threads = threads_of_row(columns / Packed<T>::kElements, V);
  const int block = threads <= kWarp ? kNarrowBlock : threads;
  const size_t sums = (2 * 2 * kWarp + 4) * sizeof(float);
  const size_t groups = threads <= kWarp ? block / threads * a.width * sizeof(float) : 0;
  const Exchange exchange{(uint64_t*)a.workspace, slices};
  if (slices > 1) {
    const size_t bytes = norm_workspace_bytes(a.chunks, a.width);
    const cudaError_t error = cudaMemsetAsync(a.workspace, 0, bytes, stream);
    if (error != cudaSuccess) return error;
  }
  return launch(backward_in_registers<Centered, T, V>,
                {dim3((unsigned)(a.chunks * slices)), block, sums > groups ? sums : groups,
                 /*cooperative=*/slices > 1},
                stream, a, per_width_of(a.width), threads, exchange);
}

bool fits_in_registers(int64_t width) {
  return slices_of(width) <= kBlocksPerMultiprocessor * multiprocessors();
}

template <bool Centered>
cudaError_t backward(const NormBackward& a, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  if (a.width == 0) return cudaSuccess;
  dispatch(a.dtype, DType::f32, [&](auto t, auto) {
    using T = typename decltype(t)::type;
    constexpr int N = Packed<T>::kElements;
    const bool aligned = a.width % N == 0 && is_aligned(a.x) && is_aligned(a.grad_y) &&
                         is_aligned(a.grad_x) && is_aligned(a.weight);
    if (aligned && a.width <= kWarp * N) {
      error = launch_backward<Centered, T, 1>(a, stream);
    } else if (aligned && fits_in_registers(a.width)) {
      error = launch_backward<Centered, T, kBackwardElements / N>(a, stream);
    } else {
      error = launch(backward_any<Centered, T>,
                     {dim3((unsigned)a.chunks), kBackwardThreads, 2 * 2 * kWarp * sizeof(float)},
                     stream, a, per_width_of(a.width));
    }
  });
  return error;
}

// --- Parameter gradients ------------------------------------------------------------------------

constexpr int kColumns = 32;  // columns per block, each added up by kWarp threads

template <class P>
__global__ void __launch_bounds__(kColumns* kWarp) add_chunks(NormBackward a) {
  __shared__ float sums[kWarp][kColumns + 1];
  const int64_t column = (int64_t)blockIdx.x * kColumns + threadIdx.x % kColumns;
  const int part = threadIdx.x / kColumns;
  const float* partials = (const float*)(blockIdx.y ? a.bias_partials : a.weight_partials);
  P* grad = (P*)(blockIdx.y ? a.grad_bias : a.grad_weight);
  float sum = 0;
  if (grad && column < a.width) {
    for (int64_t chunk = part; chunk < a.chunks; chunk += kWarp) {
      sum += partials[chunk * a.width + column];
    }
  }
  sums[part][threadIdx.x % kColumns] = sum;
  __syncthreads();
  if (part > 0 || !grad || column >= a.width) return;
  for (int other = 1; other < kWarp; ++other) sum += sums[other][threadIdx.x];
  grad[column] = from_float<P>(sum);
}

}  // namespace

TW_EXPORT cudaError_t layer_norm_forward(const NormForward& a, cudaStream_t stream) {
  return forward<true>(a, stream);
}
TW_EXPORT cudaError_t rms_norm_forward(const NormForward& a, cudaStream_t stream) {
  return forward<false>(a, stream);
}
TW_EXPORT cudaError_t layer_norm_backward(const NormBackward& a, cudaStream_t stream) {
  return backward<true>(a, stream);
}
TW_EXPORT cudaError_t rms_norm_backward(const NormBackward& a, cudaStream_t stream) {
  return backward<false>(a, stream);
}

TW_EXPORT cudaError_t norm_parameter_gradients(const NormBackward& a, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  if (a.width == 0) return cudaSuccess;
  dispatch(a.param_dtype, a.param_dtype, [&](auto p, auto) {
    error = launch(add_chunks<typename decltype(p)::type>,
                   {dim3((unsigned)((a.width + kColumns - 1) / kColumns), 2), kColumns * kWarp},
                   stream, a);
  });
  return error;
}

// Enough chunks to fill the device, with at least 16 rows in each, so that partial sums stay a
// small part of the bytes. Blocks that share a row have to be resident at the same time.
TW_EXPORT int64_t norm_chunks(int64_t rows, int64_t width) {
  const int64_t slices = slices_of(width) > 1 ? slices_of(width) : 1;
  const int64_t resident = (int64_t)kBlocksPerMultiprocessor * multiprocessors();
  const int64_t blocks_of_a_narrow_row = width <= 1024 ? 4 : width <= 2048 ? 2 : 1;
  int64_t chunks = slices == 1 ? resident * blocks_of_a_narrow_row : resident / slices;
  const int64_t worth = (rows + 15) / 16;
  chunks = chunks < worth ? chunks : worth;
  return chunks > 1 ? chunks : 1;
}

TW_EXPORT int64_t norm_workspace_bytes(int64_t chunks, int64_t width) {
  const int64_t slices = slices_of(width);
  return slices > 1 ? chunks * 2 * slices * 2 * (int64_t)sizeof(uint64_t) : 0;
}
