// Softmax with scale, mask and dropout in CUDA. Nothing here has been measured yet. This header
// argues for the design, and bench/evidence will hold the figures.
//
// 1. The floor. Forward reads the scores and writes y, 2 tensors of rows x width. Backward reads
//    grad_y and y (or the scores, with dropout) and writes grad_scores, 3 tensors. A mask is read
//    in addition. At bf16 4 x 32 x 2048 x 2048 these are 2.1 and 3.2 GB, 0.50 and 0.75 ms at the
//    4.3 TB/s that a copy reaches on an H200. Under the causal mask half of the scores is not read:
//    1.5 and 2 tensors. Statistics, kept only with dropout, are 8 bytes a row.
//
// 2. Rows in registers. A thread holds 4 accesses of 16 bytes: 32 columns in 16 bits, 16 in fp32;
//    in backward 16 columns of two tensors. With 256 threads a row of up to 8192 columns (4096 in
//    fp32 and in backward) is read once. At 80 registers 768 threads fill a multiprocessor and have
//    48 KB of scores in flight; 1 us at half of the copy bandwidth needs 16 KB. Rows of up
//    to 1024 columns (512) take a warp or less, without a barrier. Wider rows take two passes over
//    tiles, with a running maximum. Up to 32768 columns the second pass hits L1 or L2: three rows
//    of 131072 on each of 132 multiprocessors are 104 MB in 16 bits, more than L2 holds.
//
// 3. Instructions. 132 multiprocessors start 29.6e12 thread instructions in a second. At the copy
//    bandwidth that is 27 a column of bf16 forward and 41 backward; twice that in fp32. Counted in
//    the code for sm_90, at a width of 4096:
//      - forward without dropout: 19 a column, 6 of them a thread's fixed costs. Memory limits, and
//        88% of the copy bandwidth is to be expected;
//      - backward from y: 21. Memory limits again, 80% and more;
//      - forward with dropout: 33 before, 31 now. Philox and its comparisons were 14 of them and are
//        12 (the bare multiplications and XORs are 10): bf16 can reach 88% of the copy bandwidth if
//        no cycle is lost, 83% before, and fp32 is limited by memory;
//      - backward from the scores: 40 before, 38 now, where 41 fit in the time of the memory traffic.
//      Under the causal mask no numbers are drawn for columns that a row does not see, half of them:
//      6 instructions less for each column of the whole.
//    Philox therefore runs between the loads and their first use, where threads wait anyway. Its
//    result is kept as one bit a column, which frees the registers for the rows.
//
// 4. Exponentials are 2^(z * log2(e) - that of the highest): one fused multiply-add and ex2.approx,
//    within 2^-22. Each thread subtracts the highest that it has seen itself, so that one pass over
//    the registers finds both the maximum and the sum. One factor a thread rescales them at the
//    end.
//
// 5. Unaligned rows (a width that is not a multiple of 16 bytes, an unaligned pointer) run through
//    the same code, four columns at a time, each loaded on its own. This path
//    aims at correct results first.
#include "core/softmax.h"

#include <cuda_runtime.h>

#include "core/dispatch.h"
#include "core/exp.h"
#include "cuda/columns.cuh"
#include "cuda/dropout.cuh"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/rows.cuh"
#include "cuda/vec.cuh"

namespace {

using namespace torchweld;

constexpr int kThreads = 256;
template <bool Aligned>
constexpr int kBlocks = Aligned ? 3 : 2;  // blocks of kThreads per multiprocessor
constexpr int kForwardAccesses = 4;
template <class T, bool Aligned>
constexpr int kBackwardAccesses = 16 / kAccessColumns<T, Aligned>;
constexpr float kExcluded = -__builtin_inff();

// --- The part of a row in registers -------------------------------------------------------------

// A thread's V accesses of N columns; adjacent threads access adjacent columns.
template <class T, bool Aligned, int Accesses>
struct Tile {
  static constexpr int N = kAccessColumns<T, Aligned>, V = Accesses;
  int thread, threads;

  __device__ __forceinline__ int at(int v) const { return (v * threads + thread) * N; }
  __device__ __forceinline__ int64_t columns() const { return (int64_t)threads * V * N; }
  // The number of the tile's columns that lie before column `end` of the row.
  __device__ __forceinline__ int until(int64_t end, int64_t begin) const {
    const int64_t left = end - begin;
    return left < 0 ? 0 : left < columns() ? (int)left : (int)columns();
  }

  template <class M>
  __device__ __forceinline__ void load(Packed<M, N> (&to)[V], const M* from, int count) const {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      load_columns<Aligned>(to[v], from + at(v), count - at(v));
    }
  }
  // Overwrites all values past the first `count` columns.
  __device__ __forceinline__ void fill(float (&values)[V][N], int count, float with) const {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int left = count - at(v);
      if (left >= N) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (i >= left) values[v][i] = with;
      }
    }
  }
  __device__ __forceinline__ void store(T* to, const float (&values)[V][N], int count) const {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      store_columns<Aligned>(to + at(v), values[v], count - at(v));
    }
  }
};

// call(v, i) for each of a thread's columns.
template <class Tile, class Call>
__device__ __forceinline__ void for_columns(const Tile&, Call&& call) {
#pragma unroll
  for (int v = 0; v < Tile::V; ++v) {
#pragma unroll
    for (int i = 0; i < Tile::N; ++i) call(v, i);
  }
}

// --- Masks --------------------------------------------------------------------------------------

// Divisors for the two row maps and the causal mask.
struct Places {
  Rows mask, dropout;
  Divisor queries;
};

// A row of the mask. If it broadcasts along columns, a boolean mask becomes a limit on the number
// of keys, and an additive mask becomes `added`.
struct RowMask {
  const void* data = nullptr;
  float added = 0;
};

// Returns the number of keys that the row sees, and sets its mask for them.
template <class T>
__device__ __forceinline__ int64_t keys_of_row(const ScoreMask& mask, const Causal& causal,
                                               const Places& places, int64_t row, int64_t width,
                                               RowMask& row_mask) {
  int64_t keys = width;
  if (causal.on) keys = keys_of_query(causal, places.queries.remainder(row), width);
  if (mask.kind == MaskKind::none) return keys;
  const int64_t at = places.mask(row);
  if (mask.kind == MaskKind::boolean) {
    row_mask.data = (const uint8_t*)mask.data + at;
    return mask.stride || *(const uint8_t*)row_mask.data ? keys : 0;
  }
  const bool wide = mask.dtype == DType::f32;
  row_mask.data = (const char*)mask.data + at * (wide ? sizeof(float) : sizeof(T));
  if (!mask.stride) row_mask.added = parameter<T>(row_mask.data, 0, wide);
  return keys;
}

// Computes z for the tile's first `visible` columns, and -inf for the others.
template <class T, bool Aligned, int V, int N>
__device__ __forceinline__ void mask_scores(float (&z)[V][N], const Packed<T, N> (&scores)[V],
                                            const Tile<T, Aligned, V>& tile, float scale,
                                            const ScoreMask& mask, const RowMask& row,
                                            int64_t begin, int visible) {
  // combine(score, element of the mask)
  const auto with = [&](auto m, auto&& combine) {
    using M = decltype(m);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      Packed<M, N> elements;
      load_columns<Aligned>(elements, (const M*)row.data + begin + tile.at(v),
                            visible - tile.at(v));
#pragma unroll
      for (int i = 0; i < N; ++i) z[v][i] = combine(scores[v][i] * scale, elements, i);
    }
  };
  const auto add = [](float score, const auto& mask, int i) { return score + mask[i]; };
  if (mask.stride == 0) {
    for_columns(tile, [&](int v, int i) { z[v][i] = scores[v][i] * scale + row.added; });
  } else if (mask.kind == MaskKind::boolean) {
    with(uint8_t{}, [](float score, const auto& mask, int i) {
      return mask.bits(i) & 0xff ? score : kExcluded;
    });
  } else if (mask.dtype == DType::f32) {
    with(float{}, add);
  } else {
    with(T{}, add);
  }
  tile.fill(z, visible, kExcluded);
}

// The rounded exponent z * log2(e) of exp(z) as a power of two. It must not be contracted with the
// subtraction that follows: exponentials relative to the same base have to agree.
__device__ __forceinline__ float exponent_of(float z) { return __fmul_rn(z, (float)kLog2E); }

// The exponent of a row's highest score, which is subtracted from all exponents. It is 0 if nothing
// is visible: exp2(-inf - 0) is then 0, as wanted.
__device__ __forceinline__ float base_of(float highest) {
  return highest == kExcluded ? 0 : exponent_of(highest);
}

// A larger base is rounded by more than a small exponent.
constexpr float kLargestBase = 0x1p28f;

// Exponentials relative to the row's highest score, times a factor. The multiplication is fused with
// the subtraction: the base's rounding error is then the same factor for the whole row, unless the
// scores are so large that it overflows.
template <class Tile>
__device__ __forceinline__ void exponentials_of(float (&e)[Tile::V][Tile::N], const Tile& tile,
                                                float highest, float base, float factor) {
  if (fabsf(base) < kLargestBase) {
    for_columns(
        tile, [&](int v, int i) { e[v][i] = power_of_2(e[v][i] * (float)kLog2E - base) * factor; });
  } else {
    for_columns(tile, [&](int v, int i) {
      e[v][i] = power_of_2(__fsub_rn(e[v][i], highest) * (float)kLog2E) * factor;
    });
  }
}

// How many calls of Philox run at once: with two the backward kernel spills on sm_100.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kDrawsAtOnce = 1;
#else
constexpr int kDrawsAtOnce = 2;
#endif

// Bits that say which of a thread's columns are kept. In 16 bits nothing is drawn for accesses past
// the first `visible` columns, which have no weight. In float32, where memory limits, the branch
// would make the backward kernel spill.
template <class T, class Tile>
__device__ __forceinline__ unsigned kept_columns(const Tile& tile, const Dropout& dropout,
                                                 const Places& places, int64_t row, int64_t begin,
                                                 int visible) {
  const DropoutRow<false> dropped(dropout, places.dropout(row));
  unsigned kept = 0;
#pragma unroll kDrawsAtOnce
  for (int v = 0; v < Tile::V; ++v) {
    if (sizeof(T) == 2 && tile.at(v) >= visible) break;
    kept |= dropped.template kept<Tile::N>(begin + tile.at(v)) << (v * Tile::N);
  }
  return kept;
}

// --- Forward ------------------------------------------------------------------------------------

template <class T, bool Aligned>
__global__ void __launch_bounds__(kThreads, kBlocks<Aligned>)
    forward(SoftmaxForward a, Places places) {
  using Tile = Tile<T, Aligned, kForwardAccesses>;
  const Tile tile{(int)threadIdx.x, (int)blockDim.x};
  const bool one_tile = a.width <= tile.columns();
  float* scratch = (float*)dynamic_shared();
  const int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
  const bool exists = row < a.rows;  // all threads take part in the reductions
  const T* scores = (const T*)a.scores + row * a.width;
  T* y = (T*)a.y + row * a.width;
  const bool drops = exists && a.dropout.seed;
  RowMask mask;
  const int64_t keys = exists ? keys_of_row<T>(a.mask, a.causal, places, row, a.width, mask) : 0;

  // Exponentials relative to the highest score that this thread has seen, and which of them are
  // kept.
  float e[Tile::V][Tile::N], highest = kExcluded, sum = 0;
  unsigned kept = ~0u;
  const auto load = [&](int64_t begin, bool drop) {
    const int visible = tile.until(keys, begin);
    Packed<T, Tile::N> packed[Tile::V];
    tile.load(packed, scores + begin, visible);
    if (drop) kept = kept_columns<T>(tile, a.dropout, places, row, begin, visible);
    mask_scores(e, packed, tile, (float)a.scale, a.mask, mask, begin, visible);
  };
  const auto exponentials = [&] { exponentials_of(e, tile, highest, base_of(highest), 1); };
  int64_t begin = 0;
  do {
    load(begin, drops && one_tile);
    const float before = exponent_of(highest);
    for_columns(tile, [&](int v, int i) { highest = fmaxf(highest, e[v][i]); });
    exponentials();
    float tile_sum = 0;
    for_columns(tile, [&](int v, int i) { tile_sum += e[v][i]; });
    sum = sum * power_of_2(before - base_of(highest)) + tile_sum;
    begin += tile.columns();
  } while (begin < keys);

  const float row_highest = max_over_row(highest, tile.threads, scratch);
  const float factor = power_of_2(exponent_of(highest) - base_of(row_highest));
  float sums[1] = {sum * factor};
  sum_over_row(sums, tile.threads, scratch + kWarp);
  const float inverse = softmax_inverse(sums[0], a.mask, a.causal);
  if (!exists) return;
  if (a.statistics && tile.thread == 0) {
    ((float*)a.statistics)[2 * row] = row_highest == kExcluded ? 0 : row_highest;
    ((float*)a.statistics)[2 * row + 1] = inverse;
  }

  const float kept_factor = factor * inverse * (float)a.dropout.scale;
  const float dropped_value = kept_factor * 0;  // NaN if the row is NaN
  for (begin = 0; begin < a.width; begin += tile.columns()) {
    if (!one_tile) {
      load(begin, drops);
      exponentials();
    }
    for_columns(tile, [&](int v, int i) {
      e[v][i] = kept >> (v * Tile::N + i) & 1 ? e[v][i] * kept_factor : dropped_value;
    });
    tile.store(y + begin, e, tile.until(a.width, begin));
  }
}

// --- Backward -----------------------------------------------------------------------------------

// FromScores: computes s from the scores, since y lacks the dropped elements.
template <class T, bool Aligned, bool FromScores>
__global__ void __launch_bounds__(kThreads, kBlocks<Aligned>)
    backward(SoftmaxBackward a, Places places) {
  using Tile = Tile<T, Aligned, kBackwardAccesses<T, Aligned>>;
  constexpr int N = Tile::N, V = Tile::V;
  const Tile tile{(int)threadIdx.x, (int)blockDim.x};
  const bool one_tile = a.width <= tile.columns();
  float* scratch = (float*)dynamic_shared();
  const int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
  const bool exists = row < a.rows;
  const T* grad_y = (const T*)a.grad_y + row * a.width;
  T* grad_scores = (T*)a.grad_scores + row * a.width;
  RowMask mask;
  int64_t keys = 0;
  float highest = 0, inverse = 0;
  if (exists) keys = keys_of_row<T>(a.mask, a.causal, places, row, a.width, mask);
  if (FromScores && exists) {
    highest = ((const float*)a.statistics)[2 * row];
    inverse = ((const float*)a.statistics)[2 * row + 1];
    if (inverse == 0) keys = 0;
  }

  float s[V][N], g[V][N];
  const auto load = [&](int64_t begin) {
    const int visible = tile.until(keys, begin);
    Packed<T, N> gradient[V], saved[V];
    tile.load(gradient, grad_y + begin, visible);
    tile.load(saved, (const T*)(FromScores ? a.scores : a.y) + row * a.width + begin, visible);
    if constexpr (FromScores) {
      const unsigned kept =
          exists ? kept_columns<T>(tile, a.dropout, places, row, begin, visible) : 0;
      mask_scores(s, saved, tile, (float)a.scale, a.mask, mask, begin, visible);
      exponentials_of(s, tile, highest, base_of(highest), inverse);
      for_columns(tile, [&](int v, int i) {
        g[v][i] = gradient[v][i] * (kept >> (v * N + i) & 1 ? (float)a.dropout.scale : 0);
      });
    } else {
      for_columns(tile, [&](int v, int i) { s[v][i] = saved[v][i], g[v][i] = gradient[v][i]; });
    }
  };

  float dot[1] = {0};
  int64_t begin = 0;
  do {
    load(begin);
    float tile_dot = 0;
    for_columns(tile, [&](int v, int i) { tile_dot += s[v][i] * g[v][i]; });
    dot[0] += tile_dot;
    begin += tile.columns();
  } while (begin < keys);
  sum_over_row(dot, tile.threads, scratch);
  if (!exists) return;

  for (begin = 0; begin < a.width; begin += tile.columns()) {
    if (!one_tile) load(begin);
    for_columns(tile, [&](int v, int i) { s[v][i] *= (g[v][i] - dot[0]) * (float)a.scale; });
    tile.fill(s, tile.until(keys, begin), 0);  // also if the row is NaN
    tile.store(grad_scores + begin, s, tile.until(a.width, begin));
  }
}

// --- Launches -----------------------------------------------------------------------------------

template <class Args>
Places places_of(const Args& a) {
  return {Rows(a.mask.rows), Rows(a.dropout.rows), Divisor(a.causal.queries)};
}

// Whether every row of the mask can be loaded `columns` at a time.
bool is_aligned(const ScoreMask& mask, int columns) {
  if (mask.kind == MaskKind::none || mask.stride == 0) return true;
  const int size = mask.kind == MaskKind::boolean ? 1 : mask.dtype == DType::f32 ? 4 : 2;
  const int bytes = size * columns < kAccessBytes ? size * columns : kAccessBytes;
  bool aligned = (uintptr_t)mask.data % bytes == 0 && mask.rows.offset % columns == 0;
  for (int d = 0; d < mask.rows.dims; ++d) aligned &= mask.rows.stride[d] % columns == 0;
  return aligned;
}

// `columns` per access, `accesses` per thread.
template <class Args>
cudaError_t launch_rows(void (*kernel)(Args, Places), const Args& a, int columns, int accesses,
                        cudaStream_t stream) {
  const int needed = threads_of_row((a.width + columns - 1) / columns, accesses);
  const int threads = needed < kThreads ? needed : kThreads;
  const int rows = threads <= kWarp ? kNarrowBlock / threads : 1;  // rows per block
  const int64_t blocks = (a.rows + rows - 1) / rows;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  return launch(
      kernel,
      {dim3((unsigned)blocks), dim3((unsigned)threads, (unsigned)rows), 2 * kWarp * sizeof(float)},
      stream, a, places_of(a));
}

// call(Type<T>{}, Aligned) for the arguments' type and layout.
template <class Args, class Call>
cudaError_t with_type_and_alignment(const Args& a, std::initializer_list<const void*> tensors,
                                    Call&& call) {
  cudaError_t error = cudaErrorInvalidValue;  // for types without a kernel
  if (a.rows == 0 || a.width == 0) return cudaSuccess;
  dispatch(a.dtype, DType::f32, [&](auto t, auto) {
    constexpr int N = Packed<typename decltype(t)::type>::kElements;
    bool aligned = a.width % N == 0 && is_aligned(a.mask, N);
    for (const void* tensor : tensors) aligned &= torchweld::is_aligned(tensor);
    error = aligned ? call(t, std::true_type{}) : call(t, std::false_type{});
  });
  return error;
}

}  // namespace

TW_EXPORT cudaError_t softmax_dropout_forward(const SoftmaxForward& a, cudaStream_t stream) {
  return with_type_and_alignment(a, {a.scores, a.y}, [&](auto t, auto aligned) {
    using T = typename decltype(t)::type;
    return launch_rows(forward<T, aligned>, a, kAccessColumns<T, aligned>, kForwardAccesses,
                       stream);
  });
}

TW_EXPORT cudaError_t softmax_dropout_backward(const SoftmaxBackward& a, cudaStream_t stream) {
  const std::initializer_list<const void*> tensors = {a.grad_y, a.y, a.scores, a.grad_scores};
  return with_type_and_alignment(a, tensors, [&](auto t, auto aligned) {
    using T = typename decltype(t)::type;
    return launch_rows(a.y ? backward<T, aligned, false> : backward<T, aligned, true>, a,
                       kAccessColumns<T, aligned>, kBackwardAccesses<T, aligned>, stream);
  });
}
