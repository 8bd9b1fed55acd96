// LayerNorm and RMSNorm in CUDA. Nothing here has been measured yet. This header argues for the
// design, and bench/evidence will hold the figures.
//
// 1. The floor. Forward reads x and writes y, 2 tensors of rows x width. Backward reads grad_y and
//    x and writes grad_x, 3 tensors. At bf16 32768 x 4096 these are 0.54 and 0.81 GB, 125 and 187
//    us at the 4.3 TB/s that a copy reaches on an H200. Statistics are 8 bytes a row, parameters
//    stay in L2.
//
// 2. Rows in registers. A row is read once: between the statistics and the result its elements stay
//    in registers, in their storage format. About 1 us of latency times the bandwidth requires
//    about 32 KB in flight on each multiprocessor: 4 loads of 16 bytes a thread
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
//    columns (8 and 4 if V = 1) throughout and holds their parameter gradients in 32 registers, so
//    partial sums are written once per chunk. 264 chunks at width 4096 are 8.7 MB written
//    and read, 2% of the floor. 2 blocks of 256 threads load 2 x 256 x 64 (16-bit) or 128 (fp32)
//    bytes a row: 32 or 64 KB a multiprocessor. In 16 bits there are registers for the next row
//    too, which loads while the current row is reduced. Rows of fewer threads share a block, side
//    by side: 4096 x 1024 has 256 chunks of 16 rows, and 8 warps in each.
//    A thread also keeps its weights, packed in 8 registers (16-bit) or 16 (fp32). Each row used to
//    read them twice from L1, as many bytes as x and grad_y: 64 (16-bit) or 128 (fp32) a thread, now
//    none. The code of the loop over rows for sm_90 went from 896 to 848 instructions in LayerNorm
//    bf16, from 952 to 765 in fp32, from 840 to 795 in RMSNorm bf16. No kernel spills. Float32
//    weights beside 16-bit rows do not fit, and are read as before.
//    A second launch adds up the chunks. Up to 32 chunks (256 rows) of 256 KB together, the block
//    that ends last does so instead: one launch in place of two, and a block reads 256 KB from L2 in
//    some 2.3 us at 64 bytes a cycle. More would not pay: 8.7 MB would take one block 80 us.
//
// 4. Backward of wide rows. Up to 8192 columns, one block of 512 threads has a row. A
//    multiprocessor holds one such block, so nothing would load while it reduces and stores. Its
//    rows are therefore copied to shared memory up to three rows ahead: 32 KB a row in 16 bits, 64
//    in fp32. A thread copies and reads its own columns only, so no barrier guards them.
//      - Up to 65536 columns, on sm_90 and later, the same kernel runs in clusters: 2, 4 or 8 such
//        blocks have a row. They write their two sums to each other's shared memory and meet once a
//        row, in which time the copies of a later row start. It moves 3 tensors: 1.61 GB at bf16
//        4096 x 65536, 375 us at 4.3 TB/s. A block has a row's part in 1.5 us of bandwidth (48 KB
//        in 16 bits); arithmetic takes two thirds of it, and the two barriers some 0.3 us. 16
//        clusters of 8 are 128 of 132 multiprocessors. Clusters do not wait for each other. The blocks of
//        a cooperative launch would, and it would also wait for any other kernel, such as a
//        collective's, to end. A cluster only waits if a collective leaves fewer than 8
//        multiprocessors of its GPC free.
//      - Otherwise, and if a part of a GPU has no room for a cluster, rows take two passes, whose
//        blocks need not wait for each other: the first reads a row and stores its two sums, the
//        second works on slices of 4096 columns. It moves 5 tensors, 2.68 GB and 624 us there: 60%
//        of the floor's speed.
//
// 5. Any other row (a width that is not a multiple of 16 bytes, an unaligned pointer, a width that
//    does not fit) is processed element by element in several passes, which mostly hit L2.
//    This path aims at correct results first.
#include "core/norm.h"

#include <cuda_runtime.h>

#include "core/dispatch.h"
#include "cuda/norm_backward.cuh"

namespace {

using namespace torchweld;

constexpr int kForwardThreads = 1024;

// --- Forward ------------------------------------------------------------------------------------

template <bool Centered, class T, int V>
__global__ void __launch_bounds__(V == 1   ? kNarrowBlock
                                  : V == 4 ? kForwardThreads
                                           : kWideThreads)
    forward_in_registers(NormForward a, float per_width, int row_threads) {
  // A compile-time constant where registers are scarce: addresses are then one register plus
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

// This thread's part of a sum over a row, added in runs so that rounding errors do not grow with
// the row.
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
  // With V = 16 a block loops over rows, so that it knows the next one. Otherwise each row group is
  // a block, scheduled as resources free up.
  const int64_t most = V == 16 ? multiprocessors() : 1 << 30;
  return launch(forward_in_registers<Centered, T, V>,
                {dim3((unsigned)(blocks < most ? blocks : most)), block, 2 * kWarp * sizeof(float)},
                stream, a, per_width_of(a.width), threads);
}

template <bool Centered>
cudaError_t forward(const NormForward& a, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;  // for types without a kernel
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
  bool are_added = false;
  dispatch(a.dtype, DType::f32, [&](auto t, auto) {
    are_added = is_aligned<typename decltype(t)::type>(a) && last_block_adds(a, stream);
  });
  if (are_added) return cudaSuccess;
  dispatch(a.param_dtype, a.param_dtype, [&](auto p, auto) {
    error = launch(add_chunks<typename decltype(p)::type>,
                   {dim3((unsigned)((a.width + kColumns - 1) / kColumns), 2), kColumns * kWarp},
                   stream, a);
  });
  return error;
}

// Enough chunks to fill the device, with at least 8 rows each: writing and reading the partial sums
// of 8 rows of 16 bits adds a third to their bytes, and of fewer rows more.
TW_EXPORT int64_t norm_chunks(int64_t rows, int64_t width) {
  // A row of up to 512 columns takes at most a warp, in a block of 128 threads.
  const int64_t blocks = width <= kWarp * kBackwardElements    ? 4 * kBlocksPerMultiprocessor
                         : width > kSlice && width <= kWideRow ? 1
                                                               : kBlocksPerMultiprocessor;
  const int64_t slices = width > kWideRow ? slices_of(width) : 1;
  const int64_t clusters = rows_in_clusters(width);
  const int64_t most = clusters ? clusters : (blocks * multiprocessors() + slices - 1) / slices;
  const int64_t worth = (rows + 7) / 8;
  const int64_t chunks = most < worth ? most : worth;
  return chunks > 1 ? chunks : 1;
}

// The row sums for rows that take two passes. Rows narrow enough for one pass take two if shared
// memory is too small.
TW_EXPORT int64_t norm_workspace_bytes(int64_t rows, int64_t width) {
  return width > kSlice ? rows * 2 * (int64_t)sizeof(float) : 0;
}
