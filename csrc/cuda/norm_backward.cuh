// The backward pass of norms. norm.cu argues for the design.
#pragma once

#include <atomic>

#include "core/dispatch.h"
#include "cuda/norm_rows.cuh"

TW_NAMESPACE_BEGIN

constexpr int kBackwardThreads = 256;
constexpr int kBackwardElements = 16;  // columns per thread
constexpr int kSlice = kBackwardThreads * kBackwardElements;
constexpr int kWideRow = kWideThreads * kBackwardElements;
constexpr int kBlocksPerMultiprocessor = 2;
constexpr int kRowsAhead = 3;

// A thread's columns of a row, in both directions: x and grad_y in registers.
template <class T, int V>
struct RowPair {
  Packed<T> x[V], grad[V];
};

// A thread's columns in a backward pass: the weight, packed, and accumulated sums.
template <bool Centered, class T, int V>
struct Columns {
  static constexpr int N = Packed<T>::kElements;
  const NormBackward& a;
  Shares<T, V> shares;
  bool loads_weight;  // for each row: float32 beside 16 bits does not fit the registers
  Packed<T> kept_weight[V];
  float grad_weight[V][N] = {}, grad_bias[V][N] = {};

  __device__ __forceinline__ Columns(const NormBackward& args, Shares<T, V> mine)
      : a(args),
        shares(mine),
        loads_weight(args.weight && sizeof(T) == 2 && args.param_dtype == DType::f32) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      kept_weight[v] = ones();
      if (a.weight && !loads_weight && shares.has(v)) {
        kept_weight[v] = Packed<T>(__ldg((const uint4*)((const T*)a.weight + shares.at(v))));
      }
    }
  }

  static __device__ __forceinline__ Packed<T> ones() {
    const unsigned one = bits_of(from_float<T>(1)), word = sizeof(T) == 2 ? one << 16 | one : one;
    return Packed<T>(make_uint4(word, word, word, word));
  }

  __device__ __forceinline__ float mean(int64_t row) const {
    return Centered ? ((const float*)a.mean)[row] : 0;
  }
  __device__ __forceinline__ float rstd(int64_t row) const { return ((const float*)a.rstd)[row]; }

  __device__ __forceinline__ void load(RowPair<T, V>& to, int64_t row) const {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (!shares.has(v)) continue;
      to.x[v] = load_once((const T*)a.x + row * a.width + shares.at(v));
      to.grad[v] = load_once((const T*)a.grad_y + row * a.width + shares.at(v));
    }
  }

  // Calls visit(v, i, grad_y, g, x_hat) with g = grad_y * weight.
  template <class Visit>
  __device__ __forceinline__ void each(const RowPair<T, V>& row, int v, float mean, float rstd,
                                       Visit&& visit) const {
    float weight[N];
    if (loads_weight) {
      load_parameters<T>(weight, a.weight, shares.at(v), true);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) weight[i] = kept_weight[v][i];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float grad = row.grad[v][i];
      visit(i, grad, grad * weight[i], norm_normalize(row.x[v][i], mean, rstd));
    }
  }

  // Adds the row to the parameters' gradients, and to the row's sums of g and of g * x_hat.
  __device__ __forceinline__ void add(const RowPair<T, V>& row, float mean, float rstd,
                                      float (&sums)[2]) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (!shares.has(v)) continue;
      each(row, v, mean, rstd, [&](int i, float grad, float g, float x_hat) {
        if constexpr (Centered) sums[0] += g;
        sums[1] += g * x_hat;
        grad_weight[v][i] += grad * x_hat;
        grad_bias[v][i] += grad;
      });
    }
  }

  __device__ __forceinline__ void store_grad_x(const RowPair<T, V>& pair, int64_t row, float mean,
                                               float rstd, float mean_g, float mean_g_x_hat) const {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (!shares.has(v)) continue;
      float result[N];
      each(pair, v, mean, rstd, [&](int i, float, float g, float x_hat) {
        result[i] = norm_grad_x(g, x_hat, rstd, mean_g, mean_g_x_hat);
      });
      store((T*)a.grad_x + row * a.width + shares.at(v), result);
    }
  }

  __device__ __forceinline__ void store_sums(const float (&sums)[V][N], float* to) const {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (!shares.has(v)) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) to[shares.at(v) + i] = sums[v][i];
    }
  }
};

// --- Sums of chunks by the last block -----------------------------------------------------------

// If there are few, the block that ends last adds them up, in the order and with the bits of
// add_chunks. A block reads some 64 bytes a cycle: at most 2 or 3 us here, less than a launch.
constexpr int64_t kMostAdded = 256 << 10;  // bytes
constexpr int64_t kMostChunks = kWarp;     // add_chunks adds more in another order

// How many blocks of a launch have ended. All are zero between launches: the last block resets its
// launch's. Launches on several streams run at once, so each takes the next counter, and no device
// has as many launches under way as there are counters. A captured launch would come back to its
// counter whenever its graph runs, beside others, so it takes add_chunks.
constexpr unsigned kCounters = 1 << 16;
static __device__ unsigned ended_blocks[kCounters];
constexpr int kNoCounter = -1;
inline int next_counter() {
  static std::atomic<unsigned> launches{0};
  return (int)(launches++ % kCounters);
}

inline bool last_block_adds(const NormBackward& a, cudaStream_t stream) {
  const int64_t wanted = (a.weight_partials != nullptr) + (a.bias_partials != nullptr);
  const int64_t bytes = wanted * a.chunks * a.width * (int64_t)sizeof(float);
  if (bytes == 0 || bytes > kMostAdded || a.chunks > kMostChunks) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return a.width <= kSlice && cudaStreamIsCapturing(stream, &status) == cudaSuccess &&
         status == cudaStreamCaptureStatusNone;
}

template <class P>
__device__ __forceinline__ void add_columns(const NormBackward& a, const void* partials,
                                            void* grad) {
  if (!partials) return;
  for (int64_t column = threadIdx.x * 4; column < a.width; column += blockDim.x * 4) {
    float sums[4] = {};
#pragma unroll 4
    for (int chunk = 0; chunk < (int)a.chunks; ++chunk) {
      // From L2: another block's stores do not reach this multiprocessor's L1.
      const float4 four =
          __ldcg((const float4*)((const float*)partials + chunk * a.width + column));
      sums[0] += four.x, sums[1] += four.y, sums[2] += four.z, sums[3] += four.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) ((P*)grad)[column + i] = from_float<P>(sums[i]);
  }
}

// All threads call this after their block's sums of its chunk. The barrier orders the block's
// stores before thread 0's fence, which orders them before its count. The last block's fence orders
// all counts before its loads.
template <class T>
__device__ __forceinline__ void add_chunks_if_last(const NormBackward& a, unsigned counter) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(&ended_blocks[counter], 1u) + 1 == (unsigned)a.chunks;
    __threadfence();
    if (is_last) ended_blocks[counter] = 0;
  }
  __syncthreads();
  if (!is_last) return;
  const auto add = [&](auto p) {
    add_columns<decltype(p)>(a, a.weight_partials, a.grad_weight);
    add_columns<decltype(p)>(a, a.bias_partials, a.grad_bias);
  };
  a.param_dtype == DType::f32 ? add(float{}) : add(T{});
}

// --- Rows in registers --------------------------------------------------------------------------

// A block processes several rows at a time, one per group of threads. If rows are divided into
// slices of columns, the two sums of each row are Known, in `row_sums`. With a counter the last
// block adds up the chunks.
template <bool Centered, class T, int V, bool Known>
__global__ void __launch_bounds__(kBackwardThreads, kBlocksPerMultiprocessor)
    backward_in_registers(NormBackward a, float per_width, int threads, int slices, int counter) {
  const int64_t chunk = blockIdx.x / slices;
  const int64_t begin = (int64_t)(blockIdx.x % slices) * kSlice;
  const int groups = blockDim.x / threads, group = threadIdx.x / threads;
  Columns<Centered, T, V> columns(a, {(int)threadIdx.x % threads, threads, begin,
                                      begin + kSlice < a.width ? begin + kSlice : a.width});
  float* scratch = (float*)dynamic_shared();  // two areas for the sums
  const int64_t first = chunk_begin(a.rows, a.chunks, chunk),
                last = chunk_begin(a.rows, a.chunks, chunk + 1);

  constexpr bool kAhead = sizeof(T) == 2;
  RowPair<T, V> next;
  if constexpr (kAhead) {
    if (first + group < last) columns.load(next, first + group);
  }
  for (int64_t top = first, turn = 0; top < last; top += groups, ++turn) {
    const int64_t row = top + group;
    const bool exists = row < last;
    const float mean = exists ? columns.mean(row) : 0, rstd = exists ? columns.rstd(row) : 0;
    if constexpr (!kAhead) {
      if (exists) columns.load(next, row);
    }
    const RowPair<T, V> pair = next;
    if constexpr (kAhead) {
      if (row + groups < last) columns.load(next, row + groups);
    }
    float sums[2] = {};  // of g and of g * x_hat
    if (exists) columns.add(pair, mean, rstd, sums);
    if constexpr (Known) {
      const float* known = (const float*)a.workspace + row * 2;
      sums[0] = Centered ? known[0] : 0, sums[1] = known[1];
    } else {
      sum_over_row</*SideBySide=*/true>(sums, threads, scratch + (turn & 1) * 2 * kWarp);
    }
    if (!exists) continue;
    columns.store_grad_x(pair, row, mean, rstd, sums[0] * per_width, sums[1] * per_width);
  }

  // Adds up the sums of the groups in shared memory, group by group.
  const auto write_partials = [&](const float (&sums)[V][Packed<T>::kElements], float* partials) {
    if (!partials) return;
    partials += chunk * a.width;
    if (groups == 1) return columns.store_sums(sums, partials);
    __syncthreads();
    columns.store_sums(sums, scratch + group * a.width);
    __syncthreads();
    for (int64_t column = threadIdx.x; column < a.width; column += blockDim.x) {
      float sum = 0;
      for (int g = 0; g < groups; ++g) sum += scratch[g * a.width + column];
      partials[column] = sum;
    }
  };
  write_partials(columns.grad_weight, (float*)a.weight_partials);
  write_partials(columns.grad_bias, (float*)a.bias_partials);
  if constexpr (!Known) {
    if (counter != kNoCounter) add_chunks_if_last<T>(a, (unsigned)counter);
  }
}

// Rows fill a block, or a cluster of `blocks` with `share` columns each, which has a chunk of rows.
// Rows are copied to shared memory `ahead` rows before they are read.
template <bool Centered, class T, int V, bool Clustered>
__global__ void __launch_bounds__(kWideThreads, 1)
    backward_through_shared(NormBackward a, float per_width, int ahead, int blocks, int share) {
  const int chunk = Clustered ? blockIdx.x / blocks : blockIdx.x;
  const int rank = Clustered ? blockIdx.x % blocks : 0;
  const int64_t begin = (int64_t)rank * share;
  Columns<Centered, T, V> columns(a,
                                  {(int)threadIdx.x, kWideThreads, begin,
                                   Clustered && begin + share < a.width ? begin + share : a.width});
  float* scratch = (float*)dynamic_shared();
  float* sums_of_blocks = scratch + 2 * 2 * kWarp;  // two areas, as in scratch
  T* rows = (T*)(sums_of_blocks + (Clustered ? 2 * 2 * kMostBlocks : 0));
  const int64_t first = chunk_begin(a.rows, a.chunks, chunk),
                last = chunk_begin(a.rows, a.chunks, chunk + 1);
  // The place of the block's x; grad_y is behind it.
  const auto place = [&](int slot) { return rows + slot * 2 * share - begin; };
  // Every call ends a group of copies, even if no row is left.
  const auto fetch = [&](int64_t row, int slot) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (row >= last || !columns.shares.has(v)) continue;
      const int64_t at = columns.shares.at(v);
      copy_async(place(slot) + at, (const T*)a.x + row * a.width + at);
      copy_async(place(slot) + share + at, (const T*)a.grad_y + row * a.width + at);
    }
    end_of_copies();
  };
  for (int n = 0; n < ahead; ++n) fetch(first + n, n);
  if constexpr (Clustered) {  // every block must have started before another writes to it
    arrive_at_cluster();
    wait_for_cluster();
  }

  int slot = 0;
  for (int64_t row = first, turn = 0; row < last; ++row, ++turn) {
    const float mean = columns.mean(row), rstd = columns.rstd(row);
    wait_for_copies(ahead - 1);
    RowPair<T, V> pair;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (!columns.shares.has(v)) continue;
      pair.x[v] = Packed<T>(*(const uint4*)(place(slot) + columns.shares.at(v)));
      pair.grad[v] = Packed<T>(*(const uint4*)(place(slot) + share + columns.shares.at(v)));
    }
    float sums[2] = {};
    columns.add(pair, mean, rstd, sums);
    sum_over_row(sums, kWideThreads, scratch + (turn & 1) * 2 * kWarp);
    // A block reuses an area only after all blocks have arrived for the row in between, and so have
    // read it. Nothing is written after the last row's arrival, so blocks may end.
    float2* area = (float2*)sums_of_blocks + (turn & 1) * kMostBlocks;
    if constexpr (Clustered) {
      if ((int)threadIdx.x < blocks) {
        store_to_block(&area[rank].x, threadIdx.x, sums[0]);
        store_to_block(&area[rank].y, threadIdx.x, sums[1]);
      }
      arrive_at_cluster();
    }
    fetch(row + ahead, slot);  // after the barrier in the reduction, when the slot has been read
    slot = slot + 1 == ahead ? 0 : slot + 1;
    if constexpr (Clustered) {
      wait_for_cluster();
      sums[0] = sums[1] = 0;
      for (int block = 0; block < blocks; ++block) {
        const float2 of_block = area[block];
        sums[0] += of_block.x, sums[1] += of_block.y;
      }
    }
    columns.store_grad_x(pair, row, mean, rstd, sums[0] * per_width, sums[1] * per_width);
  }
  wait_for_copies(0);
  if (a.weight_partials) {
    columns.store_sums(columns.grad_weight, (float*)a.weight_partials + chunk * a.width);
  }
  if (a.bias_partials) {
    columns.store_sums(columns.grad_bias, (float*)a.bias_partials + chunk * a.width);
  }
}

// The first of two passes: every row's sums of g and of g * x_hat, one block per row.
template <bool Centered, class T>
__global__ void __launch_bounds__(kWideThreads, 2) backward_row_sums(NormBackward a) {
  constexpr int N = Packed<T>::kElements;
  float* scratch = (float*)dynamic_shared();
  int turn = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, ++turn) {
    float sums[2] = {};
    for (int64_t at = threadIdx.x * N; at < a.width; at += kWideThreads * N) {
      Columns<Centered, T, 1> columns(a, {0, 1, at, a.width});
      RowPair<T, 1> pair;
      columns.load(pair, row);
      columns.each(pair, 0, columns.mean(row), columns.rstd(row),
                   [&](int, float, float g, float x_hat) {
                     if constexpr (Centered) sums[0] += g;
                     sums[1] += g * x_hat;
                   });
    }
    sum_over_row(sums, kWideThreads, scratch + (turn & 1) * 2 * kWarp);
    if (threadIdx.x < 2) {
      ((float*)a.workspace)[row * 2 + threadIdx.x] = threadIdx.x ? sums[1] : sums[0];
    }
  }
}

// One block per chunk, any width and alignment. A thread keeps the same columns, with their sums in
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

inline int slices_of(int64_t width) { return (int)((width + kSlice - 1) / kSlice); }

constexpr size_t kSumsBytes = 2 * 2 * kWarp * sizeof(float);
constexpr size_t kSumsOfBlocksBytes = 2 * 2 * kMostBlocks * sizeof(float);

template <bool Centered, class T, int V>
cudaError_t launch_in_registers(const NormBackward& a, cudaStream_t stream) {
  const int threads = threads_of_row(a.width / Packed<T>::kElements, V);
  const int at_most = threads <= kWarp ? kNarrowBlock : kBackwardThreads;
  const int groups = at_most / threads;
  const size_t partials = groups > 1 ? groups * a.width * sizeof(float) : 0;
  const int counter = last_block_adds(a, stream) ? next_counter() : kNoCounter;
  return launch(
      backward_in_registers<Centered, T, V, false>,
      {dim3((unsigned)a.chunks), groups * threads, partials > kSumsBytes ? partials : kSumsBytes},
      stream, a, per_width_of(a.width), threads, /*slices=*/1, counter);
}

// The number of rows of x and grad_y, of `columns` each, that fit a block's shared memory.
inline int rows_in_shared(int64_t columns, size_t element_bytes) {
  const int64_t sums = kSumsBytes + kSumsOfBlocksBytes;
  const int64_t rows = (most_shared_bytes() - sums) / (2 * columns * (int64_t)element_bytes);
  return (int)(rows < kRowsAhead ? rows : kRowsAhead);
}

template <bool Centered, class T>
cudaError_t launch_through_shared(const NormBackward& a, int ahead, cudaStream_t stream) {
  constexpr int V = kBackwardElements / Packed<T>::kElements;
  return launch(
      backward_through_shared<Centered, T, V, false>,
      {dim3((unsigned)a.chunks), kWideThreads, kSumsBytes + ahead * 2 * a.width * sizeof(T)},
      stream, a, per_width_of(a.width), ahead, /*blocks=*/1, (int)a.width);
}

// A launch of clusters whose blocks have `share` columns of T each.
template <class T>
Launch of_clusters(int64_t chunks, int blocks, int64_t share) {
  const size_t row = 2 * share * sizeof(T);
  return {dim3((unsigned)(chunks * blocks)), kWideThreads,
          kSumsBytes + kSumsOfBlocksBytes + rows_in_shared(share, sizeof(T)) * row,
          (unsigned)blocks};
}

// The number of blocks in a cluster for rows of this width.
inline int blocks_of_row(int64_t width) {
  int blocks = 2;
  while (blocks * kWideRow < width) blocks *= 2;
  return blocks;
}

// The number of rows of this width that are in clusters at the same time; 0 if they take two
// passes. This kernel's clusters need more than those of any other kernel.
inline int rows_in_clusters(int64_t width) {
  if (width <= kWideRow || width > kMostBlocks * kWideRow) return 0;
  if (rows_in_shared(kWideRow, sizeof(float)) == 0) return 0;
  const auto kernel =
      backward_through_shared<true, float, kBackwardElements / Packed<float>::kElements, true>;
  return clusters_at_once(kernel, of_clusters<float>(1, blocks_of_row(width), kWideRow));
}

template <bool Centered, class T>
cudaError_t launch_clusters(const NormBackward& a, cudaStream_t stream) {
  constexpr int N = Packed<T>::kElements;
  const int blocks = blocks_of_row(a.width);
  const int64_t share = (a.width / N + blocks - 1) / blocks * N;
  return launch(backward_through_shared<Centered, T, kBackwardElements / N, true>,
                of_clusters<T>(a.chunks, blocks, share), stream, a, per_width_of(a.width),
                rows_in_shared(share, sizeof(T)), blocks, (int)share);
}

template <bool Centered, class T>
cudaError_t launch_two_passes(const NormBackward& a, cudaStream_t stream) {
  constexpr int V = kBackwardElements / Packed<T>::kElements;
  const int64_t most = 1 << 30;
  if (a.rows > 0) {
    const cudaError_t error = launch(
        backward_row_sums<Centered, T>,
        {dim3((unsigned)(a.rows < most ? a.rows : most)), kWideThreads, kSumsBytes}, stream, a);
    if (error != cudaSuccess) return error;
  }
  const int slices = slices_of(a.width);
  return launch(backward_in_registers<Centered, T, V, true>,
                {dim3((unsigned)(a.chunks * slices)), kBackwardThreads}, stream, a,
                per_width_of(a.width), kBackwardThreads, slices, kNoCounter);
}

template <class T>
bool is_aligned(const NormBackward& a) {
  return a.width % Packed<T>::kElements == 0 && is_aligned(a.x) && is_aligned(a.grad_y) &&
         is_aligned(a.grad_x) && is_aligned(a.weight);
}

template <bool Centered>
cudaError_t backward(const NormBackward& a, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  if (a.width == 0) return cudaSuccess;
  dispatch(a.dtype, DType::f32, [&](auto t, auto) {
    using T = typename decltype(t)::type;
    constexpr int N = Packed<T>::kElements;
    const bool aligned = is_aligned<T>(a);
    const int ahead =
        a.width > kSlice && a.width <= kWideRow ? rows_in_shared(a.width, sizeof(T)) : 0;
    if (aligned && a.width <= kWarp * N) {
      error = launch_in_registers<Centered, T, 1>(a, stream);
    } else if (aligned && a.width <= kSlice) {
      error = launch_in_registers<Centered, T, kBackwardElements / N>(a, stream);
    } else if (aligned && ahead > 0) {
      error = launch_through_shared<Centered, T>(a, ahead, stream);
    } else if (aligned && rows_in_clusters(a.width) > 0) {
      error = launch_clusters<Centered, T>(a, stream);
    } else if (aligned) {
      error = launch_two_passes<Centered, T>(a, stream);
    } else {
      error = launch(backward_any<Centered, T>,
                     {dim3((unsigned)a.chunks), kBackwardThreads, 2 * 2 * kWarp * sizeof(float)},
                     stream, a, per_width_of(a.width));
    }
  });
  return error;
}

TW_NAMESPACE_END
