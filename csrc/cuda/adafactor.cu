// Adafactor in CUDA. Nothing here has been measured yet. This header argues for the design, and
// bench/evidence will hold the figures.
//
// 1. The floor. A gradient is read three times, and a parameter is read twice and written once: 24
//    bytes in float32, 12 in 16 bits. At the 4.3 TB/s that a copy reaches on an H200, 10^9 float32
//    parameters take 5.6 ms. A vector's averages are read twice and written once, 12 bytes more. A
//    first moment is read and written, 8 bytes more.
//
// 2. One warp per block. A block covers a slice of 512 columns and at least 16 rows of a matrix,
//    more if the matrix has more than 4096 rows. A lane keeps the same 16 columns throughout, as
//    four groups of four: each access of a warp is contiguous, with 16 bytes a lane in float32 and
//    8 in 16 bits. Column sums stay in registers and are written once per block. Row sums are
//    reduced across the warp. A second kernel adds up both. For an 8192 x 8192 matrix a block has
//    32 rows: partial sums cost 0.25 bytes a parameter, written and read, and 8 bytes per 512
//    elements of a row. Warps exchange nothing, so no kernel that reads elements has a barrier. If
//    rows are unaligned or not multiples of four, the same code reads elements one by one, at the
//    same positions.
//
// 3. Bytes in flight. At 1 us latency the copy bandwidth needs 33 KB per multiprocessor. With 128
//    registers a thread 16 warps fit. The sums have 32 KB in flight in float32 and 16 KB in 16
//    bits; measures and steps have twice that, since they also read parameters. 80% of the copy
//    bandwidth is the target. In 16 bits the sums, a sixth of the bytes, have half of the
//    needed bytes in flight: 70% overall. They could load their next row ahead.
//
// 4. Instructions. 132 multiprocessors start 29.6e12 thread instructions in a second. At the copy
//    bandwidth that is 27 an element for sums, 55 for measures, 83 for steps. Counted in the code
//    for sm_90, float32 matrices take about 10 for sums and 26 for steps. Sums have three float64
//    instructions an element at half the rate, and a conversion. Measures took 20 when they squared
//    in float64; runs in float32 (runs.cuh) are some ten instructions a square, two squares an
//    element. Vectors have a root and a division more, for 12 and 20 bytes.
//
// 5. Launches. The descriptions of 96 tensors fit the 32 KB of a launch's arguments. A first kernel
//    takes these by value and writes them to memory. The other kernels, one launch each for all
//    tensors, find their tensor by bisection. Nothing is copied to the device, and a CUDA graph
//    captures everything. One thread per tensor computes the rates and lengths, which depend on
//    step numbers on the device. A step of matrices is ten launches, of vectors five, and one more
//    for each further 96 tensors. One warp adds up the averages of a matrix: 8192 rows take about
//    20 us. Matrices of a few elements, as in convolutions, leave most of a warp idle: they cost
//    latency, not bytes.
//
// 6. Sums of squares, or of runs of them, are float64, by lane, warp, block and matrix, in an order
//    that depends only on sizes. Elements have the bits of the CPU's kernel, except where sums in
//    another order round to another float32. Products are not fused with sums (the flags are in
//    build.py).
#include "cuda/optim.cuh"

#include "core/adafactor.h"
#include "core/chunks.h"
#include "cuda/runs.cuh"

namespace {

using namespace torchweld;

// --- Blocks -------------------------------------------------------------------------------------

constexpr int kTileThreads = 128;
constexpr int kTileWarps = kTileThreads / kWarp;
// Thread blocks per multiprocessor. Stochastic rounding takes more registers.
template <class Param>
constexpr int kTileCtas = std::is_same<Param, RoundedParam>::value ? 3 : 4;

constexpr int kTileGroups = 4;
constexpr int kSlice = kTileGroups * kGroupStride;  // columns
constexpr int kRunGroups = kRun / 4;

// A warp's block: rows of a slice of a matrix.
struct Tile {
  int64_t matrix, chunk, slice;

  __device__ __forceinline__ Tile(const FactoredTensor& t, int64_t block) {
    const int64_t chunk_of_all = block / t.slices;
    slice = block - chunk_of_all * t.slices;
    matrix = chunk_of_all / t.chunks;
    chunk = chunk_of_all - matrix * t.chunks;
  }
  // The first column of a lane's group in the matrix.
  __device__ __forceinline__ int64_t column(int group) const {
    return slice * kSlice + place(group);
  }
};

// body(tensor, tile, block index), run by the block's warp.
template <class Body>
__device__ __forceinline__ void for_tile(const Adafactor& a, Body&& body) {
  const int64_t block = (int64_t)blockIdx.x * kTileWarps + threadIdx.x / kWarp;
  if (block >= a.blocks || a.found_inf.read() != 0) return;
  const FactoredTensor t = a.tensors[step_tensor(a.tensors, a.count, block)];
  body(t, Tile(t, block - t.first_block), block);
}

// Accesses to a row's groups. A vectorised access skips groups past the end of the row.
template <bool InFours>
struct RowAccess : Access<InFours> {
  template <class T>
  __device__ __forceinline__ Four<T> read(const T* p) const {
    if (!InFours || this->count > 0) return Access<InFours>::read(p);
    return pack_bits<T>({0, 0, 0, 0});
  }
};

// body(row of the tensor, the lane's first element, group -> its RowAccess) for the rows of a tile.
template <class Body>
__device__ __forceinline__ void for_rows(const FactoredTensor& t, const Tile& tile, Body&& body) {
  const int64_t last = chunk_begin(t.height, t.chunks, tile.chunk + 1);
#pragma unroll 1
  for (int64_t row = chunk_begin(t.height, t.chunks, tile.chunk); row < last; ++row) {
    const int64_t row_of_all = tile.matrix * t.height + row, begin = row_of_all * t.columns;
    const int64_t in_row = t.width - begin < t.columns ? t.width - begin : t.columns;
    const int64_t first = tile.column(0), in_slice = in_row - tile.slice * kSlice;
    const int here = (int)(in_slice < kSlice ? in_slice : kSlice);
    const auto left = [&](int group) { return here - place(group); };
    if (t.in_fours) {
      body(row_of_all, begin + first, [&](int group) { return RowAccess<true>{{left(group)}}; });
    } else {
      body(row_of_all, begin + first, [&](int group) { return RowAccess<false>{{left(group)}}; });
    }
  }
}

// --- Averages -----------------------------------------------------------------------------------

// Sums g^2 over the tile's part of each row and each column.
template <class T>
__global__ void __launch_bounds__(kTileThreads, kTileCtas<T>)
    sum_tiles(const Adafactor __grid_constant__ a) {
  const float grad_factor = (float)a.grad_factor.read();
  for_tile(a, [&](const FactoredTensor& t, const Tile& tile, int64_t) {
    double of_column[kTileGroups][4] = {};
    for_rows(t, tile, [&](int64_t row, int64_t at, auto access_to) {
      Four<T> grad[kTileGroups];
#pragma unroll
      for (int group = 0; group < kTileGroups; ++group) {
        grad[group] = access_to(group).read((const T*)t.grad + at + group * kGroupStride);
      }
      double of_row = 0;
#pragma unroll
      for (int group = 0; group < kTileGroups; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const double g = grad[group][i] * grad_factor, square = g * g;
          of_column[group][i] += square;
          of_row += square;
        }
      }
      of_row = sum_over_warp(of_row);
      if (lane() == 0) t.row_partials[row * t.slices + tile.slice] = of_row;
    });
    double* partials = t.column_partials + (tile.matrix * t.chunks + tile.chunk) * t.columns;
#pragma unroll
    for (int group = 0; group < kTileGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t column = tile.column(group) + i;
        if (column < t.columns) partials[column] = of_column[group][i];
      }
    }
  });
}

// body(tensor, i, rows) for every average i of every tensor. It is a row's average if i < rows,
// else a column's.
template <class Body>
__device__ __forceinline__ void for_average(const Adafactor& a, Body&& body) {
  const int64_t at = (int64_t)blockIdx.x * kStepThreads + threadIdx.x;
  if (at >= a.averages || a.found_inf.read() != 0) return;
  const FactoredTensor& t =
      a.tensors[step_tensor(a.tensors, a.count, at, &FactoredTensor::first_average)];
  body(t, at - t.first_average, t.matrices * t.height);
}

__global__ void __launch_bounds__(kStepThreads) add_partials(const Adafactor __grid_constant__ a) {
  for_average(a, [](const FactoredTensor& t, int64_t i, int64_t rows) {
    const bool is_row = i < rows;
    const int64_t matrix = is_row ? 0 : (i - rows) / t.columns;
    const int64_t column = i - rows - matrix * t.columns;
    const double* partial = is_row ? t.row_partials + i * t.slices
                                   : t.column_partials + matrix * t.chunks * t.columns + column;
    const int64_t count = is_row ? t.slices : t.chunks, stride = is_row ? 1 : t.columns;
    double sum = 0;
    for (int64_t k = 0; k < count; ++k) sum += partial[k * stride];
    t.row_sums[i] = sum;
  });
}

__global__ void __launch_bounds__(kStepThreads) take_in_means(const Adafactor __grid_constant__ a) {
  for_average(a, [&](const FactoredTensor& t, int64_t i, int64_t rows) {
    const bool is_row = i < rows;
    float& average = is_row ? ((float*)t.moment[0])[i] : ((float*)t.moment[1])[i - rows];
    const int64_t elements = is_row ? t.whole_columns : t.whole_height;
    average = take_in_mean(a.settings, t.rate, average, t.row_sums[i], elements);
  });
}

// One warp per matrix.
__global__ void __launch_bounds__(kStepThreads) sum_averages(const Adafactor __grid_constant__ a) {
  const int64_t at = (int64_t)blockIdx.x * kStepWarps + threadIdx.x / kWarp;
  if (at >= a.matrices || a.found_inf.read() != 0) return;
  const FactoredTensor& t =
      a.tensors[step_tensor(a.tensors, a.count, at, &FactoredTensor::first_matrix)];
  const int64_t matrix = at - t.first_matrix, height = t.height;
  const float* rows = (const float*)t.moment[0] + matrix * height;
  double sum = 0;
#pragma unroll 8
  for (int64_t i = lane(); i < height; i += kWarp) sum += rows[i];
  sum = sum_over_warp(sum);
  if (lane() == 0) t.average_sums[matrix] = sum;
}

// The scales of rows and columns that turn a gradient into a direction.
__global__ void __launch_bounds__(kStepThreads) make_scales(const Adafactor __grid_constant__ a) {
  for_average(a, [&](const FactoredTensor& t, int64_t i, int64_t rows) {
    if (i < rows) {
      const double of_averages = t.average_sums[i / t.height];
      const float mean = adafactor_mean(a.settings, of_averages, t.whole_height);
      t.row_scales[i] = square_root(mean) / square_root(((const float*)t.moment[0])[i]);
    } else {
      t.row_scales[i] = 1 / square_root(((const float*)t.moment[1])[i - rows]);
    }
  });
}

// --- Directions ---------------------------------------------------------------------------------

// A lane's elements of a row and their directions, with zeros past the row's end.
template <class Param>
struct LaneOfRow {
  Param param[kTileGroups];
  float direction[kTileGroups][4], variance[kTileGroups][4];
};

// body(LaneOfRow, the lane's first element, group -> its RowAccess) for the rows of a tile.
template <class Param, bool Factored, class Body>
__device__ __forceinline__ void for_directions(const Adafactor& a, const FactoredTensor& t,
                                               const Tile& tile, Body&& body) {
  using Storage = typename Param::Storage;
  const AdafactorDirection rule(a.settings, t.rate);
  const float grad_factor = (float)a.grad_factor.read();
  float column_scale[kTileGroups][4];
  if constexpr (Factored) {
    const float* scales = t.column_scales + tile.matrix * t.columns;
#pragma unroll
    for (int group = 0; group < kTileGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t column = tile.column(group) + i;
        column_scale[group][i] = column < t.columns ? scales[column] : 0;
      }
    }
  }
  for_rows(t, tile, [&](int64_t row, int64_t at, auto access_to) {
    LaneOfRow<Param> of_row;
    Four<Storage> grad[kTileGroups];
    [[maybe_unused]] Four<float> average[kTileGroups];
#pragma unroll
    for (int group = 0; group < kTileGroups; ++group) {
      const auto access = access_to(group);
      const int64_t first = at + group * kGroupStride;
      grad[group] = access.read((const Storage*)t.grad + first);
      of_row.param[group].read(t, first, access);
      if constexpr (!Factored) average[group] = access.read((const float*)t.moment[0] + first);
    }
    [[maybe_unused]] float row_scale = 0;
    if constexpr (Factored) row_scale = t.row_scales[row];
#pragma unroll
    for (int group = 0; group < kTileGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float g = grad[group][i] * grad_factor;
        float& direction = of_row.direction[group][i];
        if constexpr (Factored) {
          direction = rule.scale_by_factors(g, row_scale, column_scale[group][i]);
        } else {
          float& variance = of_row.variance[group][i];
          variance = average[group][i];
          direction = rule.scale_by_average(g, variance);
        }
        if (i >= access_to(group).count) direction = 0;
      }
    }
    body(of_row, at, access_to);
  });
}

template <class Param, bool Factored>
__global__ void __launch_bounds__(kTileThreads, kTileCtas<Param>)
    measure_tiles(const Adafactor __grid_constant__ a) {
  for_tile(a, [&](const FactoredTensor& t, const Tile& tile, int64_t block) {
    double of_param = 0, of_direction = 0;
    for_directions<Param, Factored>(a, t, tile, [&](const auto& row, int64_t, auto) {
#pragma unroll
      for (int first = 0; first < kTileGroups; first += kRunGroups) {
        float params[kRun], directions[kRun];
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
          params[i] = row.param[first + i / 4][i % 4];
          directions[i] = row.direction[first + i / 4][i % 4];
        }
        of_param += sum_of_run</*Rounded=*/true>(params);
        of_direction += sum_of_run</*Rounded=*/true>(directions);
      }
    });
    of_param = sum_over_warp(of_param);
    of_direction = sum_over_warp(of_direction);
    if (lane() == 0) {
      a.squares[block][0] = of_param;
      a.squares[block][1] = of_direction;
    }
  });
}

// One thread block per tensor.
__global__ void __launch_bounds__(kStepThreads) add_squares(const Adafactor __grid_constant__ a) {
  if (a.found_inf.read() != 0) return;
  const FactoredTensor& t = a.tensors[blockIdx.x];
  const int64_t last = t.first_block + t.matrices * t.chunks * t.slices;
  double of_param = 0, of_direction = 0;
#pragma unroll 4
  for (int64_t at = t.first_block + threadIdx.x; at < last; at += kStepThreads) {
    of_param += a.squares[at][0];
    of_direction += a.squares[at][1];
  }
  of_param = sum_over_block(of_param);
  of_direction = sum_over_block(of_direction);
  if (threadIdx.x == 0) {
    t.squares[0] = of_param;
    t.squares[1] = of_direction;
  }
}

__global__ void __launch_bounds__(kStepThreads) find_lengths(const Adafactor __grid_constant__ a) {
  const int64_t i = (int64_t)blockIdx.x * kStepThreads + threadIdx.x;
  if (i < a.count && a.found_inf.read() == 0) set_lengths(a, a.tensors[i]);
}

template <class Param, bool Factored>
__global__ void __launch_bounds__(kTileThreads, kTileCtas<Param>)
    step_tiles(const Adafactor __grid_constant__ a) {
  const float beta1 = (float)a.settings.beta1, taken = 1 - beta1;
  for_tile(a, [&](const FactoredTensor& t, const Tile& tile, int64_t) {
    const float decay = t.decay, length = t.length;
    for_directions<Param, Factored>(a, t, tile, [&](auto& row, int64_t at, auto access_to) {
#pragma unroll
      for (int group = 0; group < kTileGroups; ++group) {
        const auto access = access_to(group);
        if (access.count <= 0) continue;
        const int64_t first = at + group * kGroupStride;
        float (&step)[4] = row.direction[group];
#pragma unroll
        for (int i = 0; i < 4; ++i) step[i] *= length;
        if (t.moment[2]) {
          float* momentum = (float*)t.moment[2] + first;
          const Four<float> before = access.read(momentum);
#pragma unroll
          for (int i = 0; i < 4; ++i) step[i] = before[i] * beta1 + step[i] * taken;
          access.write(momentum, pack<float>(step));
        }
        if constexpr (!Factored) {
          access.write((float*)t.moment[0] + first, pack<float>(row.variance[group]));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) step[i] = row.param[group][i] * decay - step[i];
        Param::write(t, first, step, access);
      }
    });
  });
}

// --- Launches -----------------------------------------------------------------------------------

// Tensors by value. The kernel computes the fields that depend on step numbers.
constexpr int kTensorsAtOnce = 96;
struct Prepare {
  FactoredTensor tensors[kTensorsAtOnce];
  Number steps[kTensorsAtOnce];
  FactoredTensor* room;
  AdafactorSettings settings;
  Number found_inf;
  int count;
  bool counts;
};
static_assert(sizeof(Prepare) <= kLaunchBytes);
__global__ void __launch_bounds__(kTensorsAtOnce)
    prepare_tensors(const Prepare __grid_constant__ a) {
  const int i = (int)threadIdx.x;
  if (i >= a.count) return;
  const double number = a.steps[i].read() + 1;
  a.room[i] = a.tensors[i];
  a.room[i].number = number;
  a.room[i].rate = adafactor_rate(a.settings, number);
  if (a.counts && a.found_inf.read() == 0) a.steps[i].write(number);
}

// Whether the elements of every row can be accessed in groups of four.
template <class T>
bool in_fours(const Adafactor& a, const FactoredTensor& t) {
  bool aligned = t.columns % 4 == 0 && t.width % 4 == 0;
  aligned &= holds_groups<T>(t.param) && holds_groups<T>(t.grad);
  aligned &= a.param == ParamCodec::master ? holds_groups<float>(t.master)
                                           : holds_groups<uint16_t>(t.master);
  aligned &= a.factored || holds_groups<float>(t.moment[0]);
  return aligned && holds_groups<float>(t.moment[2]);
}

template <class T>
cudaError_t prepare(const Adafactor& a, cudaStream_t stream) {
  for (int64_t first = 0; first < a.count; first += kTensorsAtOnce) {
    const int64_t left = a.count - first;
    Prepare some = {};
    some.room = a.tensors + first;
    some.settings = a.settings;
    some.found_inf = a.found_inf;
    some.count = (int)(left < kTensorsAtOnce ? left : kTensorsAtOnce);
    some.counts = a.counts;
    for (int i = 0; i < some.count; ++i) {
      some.tensors[i] = a.given[first + i];
      some.tensors[i].in_fours = in_fours<T>(a, some.tensors[i]);
      some.steps[i] = a.steps[first + i];
    }
    const cudaError_t error =
        launch(prepare_tensors, {dim3(1), dim3(kTensorsAtOnce)}, stream, some);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Launches thread blocks of `each` items.
template <class Kernel>
cudaError_t launch_over(Kernel* kernel, const Adafactor& a, int64_t items, int each, int threads,
                        cudaStream_t stream) {
  const int64_t blocks = (items + each - 1) / each;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  if (blocks == 0) return cudaSuccess;
  return launch(kernel, {dim3((unsigned)blocks), dim3((unsigned)threads)}, stream, a);
}
template <class Kernel>
cudaError_t launch_tiles(Kernel* kernel, const Adafactor& a, cudaStream_t stream) {
  return launch_over(kernel, a, a.blocks, kTileWarps, kTileThreads, stream);
}
template <class Kernel>
cudaError_t launch_each(Kernel* kernel, const Adafactor& a, int64_t items, cudaStream_t stream) {
  return launch_over(kernel, a, items, kStepThreads, kStepThreads, stream);
}

// call(Type<T>{}) with the gradients' type.
template <class Call>
cudaError_t with_storage(const Adafactor& a, Call&& call) {
  switch (a.dtype) {
    case DType::f32:
      return call(Type<float>{});
    case DType::bf16:
      return call(Type<BFloat16>{});
    case DType::f16:
      return call(Type<Half>{});
    case DType::f64:
      break;
  }
  return cudaErrorInvalidValue;
}

// call(Type<Param>{}). Only parameters that are written are rounded.
template <bool Writes, class Call>
cudaError_t with_params(const Adafactor& a, Call&& call) {
  if constexpr (Writes) {
    if (a.param == ParamCodec::rounded) return call(Type<RoundedParam>{});
  }
  if (a.param == ParamCodec::remainder) return call(Type<RemainderParam>{});
  if (a.param == ParamCodec::short_remainder) return call(Type<ShortRemainderParam>{});
  return with_storage(a, [&](auto t) {
    using T = typename decltype(t)::type;
    if constexpr (sizeof(T) == 2) {
      if (a.param == ParamCodec::master) return call(Type<MasteredParam<T>>{});
    }
    return call(Type<PlainParam<T>>{});
  });
}

}  // namespace

TW_EXPORT int64_t adafactor_chunks(int64_t height) {
  const int64_t chunks = (height + 15) / 16;
  return chunks < 1 ? 1 : chunks > 256 ? 256 : chunks;
}
// The number of column slices is at least one, so that the row sums of a matrix without columns are written.
TW_EXPORT int64_t adafactor_slices(int64_t columns) {
  return columns > 0 ? (columns + kSlice - 1) / kSlice : 1;
}

TW_EXPORT cudaError_t adafactor_prepare(const Adafactor& a, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  if (a.roundings) error = launch_roundings(a.roundings, a.given, a.steps, a.count, stream);
  if (error != cudaSuccess) return error;
  return with_storage(a, [&](auto t) { return prepare<typename decltype(t)::type>(a, stream); });
}

TW_EXPORT cudaError_t adafactor_sum(const Adafactor& a, cudaStream_t stream) {
  return with_storage(
      a, [&](auto t) { return launch_tiles(sum_tiles<typename decltype(t)::type>, a, stream); });
}
TW_EXPORT cudaError_t adafactor_add(const Adafactor& a, cudaStream_t stream) {
  return launch_each(add_partials, a, a.averages, stream);
}
TW_EXPORT cudaError_t adafactor_average(const Adafactor& a, cudaStream_t stream) {
  const cudaError_t error = launch_each(take_in_means, a, a.averages, stream);
  if (error != cudaSuccess) return error;
  return launch_over(sum_averages, a, a.matrices, kStepWarps, kStepThreads, stream);
}
TW_EXPORT cudaError_t adafactor_scale(const Adafactor& a, cudaStream_t stream) {
  return launch_each(make_scales, a, a.averages, stream);
}
TW_EXPORT cudaError_t adafactor_measure(const Adafactor& a, cudaStream_t stream) {
  return with_params<false>(a, [&](auto param) {
    using Param = typename decltype(param)::type;
    const auto kernel = a.factored ? measure_tiles<Param, true> : measure_tiles<Param, false>;
    return launch_tiles(kernel, a, stream);
  });
}
TW_EXPORT cudaError_t adafactor_add_squares(const Adafactor& a, cudaStream_t stream) {
  return launch_over(add_squares, a, a.count, 1, kStepThreads, stream);
}
TW_EXPORT cudaError_t adafactor_find_lengths(const Adafactor& a, cudaStream_t stream) {
  return launch_each(find_lengths, a, a.count, stream);
}
TW_EXPORT cudaError_t adafactor_step(const Adafactor& a, cudaStream_t stream) {
  return with_params<true>(a, [&](auto param) {
    using Param = typename decltype(param)::type;
    const auto kernel = a.factored ? step_tiles<Param, true> : step_tiles<Param, false>;
    return launch_tiles(kernel, a, stream);
  });
}
