// Adafactor in CUDA. Nothing here has been measured yet: what follows is the argument for the design,
// and bench/evidence is where figures will be.
//
// 1. The floor. A gradient is read three times, a parameter is read twice and written once: 24 bytes
//    of float32, 12 of 16 bits. At the 4.3 TB/s that a copy reaches on an H200, 10^9 float32 parameters
//    take 5.6 ms. A vector's averages are read twice and written once more, 12 bytes; a first moment is
//    read and written, 8.
//
// 2. A warp has a block: some rows of 512 columns, 16 rows of each matrix or more where it has more
//    than 4096. A lane keeps the same 16 columns all the way, as four groups of four: what a warp reads
//    lies side by side, 16 bytes a lane of float32, 8 of 16 bits. Sums of columns stay in its registers
//    and are written once a block, sums of rows go through the warp; both are added up in a second
//    kernel. Of a matrix of 8192 x 8192 a block has 32 rows: 0.25 bytes a parameter are written and
//    read, and 8 for each 512 elements of a row. Nothing is passed between warps of a kernel, and no
//    barrier is in one that reads elements. Where rows are not multiples of four, or not aligned,
//    elements are read one by one through the same code, at the same places.
//
// 3. In flight on a multiprocessor, of the 33 KB that 1 us at the copy bandwidth asks for: at 128
//    registers 16 warps have 32 KB of the sums' float32, 16 KB of 16 bits, and twice that of measures
//    and steps, which read parameters too. 80% of the copy bandwidth is to be hoped for; in 16 bits the
//    sums have half of it and are a sixth of the bytes: 70%. Their next row could be asked for ahead.
//
// 4. Instructions. 132 multiprocessors start 29.6e12 of a thread's in a second: at the copy bandwidth
//    27 for an element of the sums, 55 of a measure, 83 of a step. Counted in the code for sm_90, of
//    float32 matrices: some 10, 20 and 26. Of the float64 ones, which are half as fast, sums have three
//    and measures four, and as many conversions. Vectors have a root and a division more, for 12 and 20
//    bytes.
//
// 5. Launches. What is known of 96 tensors fits the 32 KB that a launch may have: a first kernel has
//    these by value and writes them to memory, where the others, a launch each for all tensors, find
//    theirs by bisection. Nothing is copied to the device, and a graph has all of it. What depends on
//    numbers that are there, rates and lengths, is made there, by a thread a tensor. A step of
//    matrices is ten launches, of vectors five, and one for each 96 tensors more. The sum of a matrix's
//    averages is one warp's: 8192 rows take some 20 us. Matrices of a few elements, as convolutions
//    have them, leave most of a warp idle: what they cost is latency, not bytes.
//
// 6. Sums are float64, by lane, warp, block and matrix, in an order that only sizes decide. Elements
//    have the bits of the CPU's kernel, but where sums in another order round to another float32;
//    products are not fused with sums (the flags are in build.py).
#include "cuda/optim.cuh"

#include "core/adafactor.h"
#include "core/chunks.h"

namespace {

using namespace torchweld;

// --- Blocks -------------------------------------------------------------------------------------

constexpr int kTileThreads = 128;
constexpr int kTileWarps = kTileThreads / kWarp;
// Blocks of threads on a multiprocessor. Stochastic rounding takes some more registers.
template <class Param>
constexpr int kTileCtas = std::is_same<Param, RoundedParam>::value ? 3 : 4;

constexpr int kTileGroups = 4;
constexpr int kSlice = kTileGroups * kGroupStride;  // columns

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

// body(tensor, tile, number of the block) in the warp of each block.
template <class Body>
__device__ __forceinline__ void for_tile(const Adafactor& a, Body&& body) {
  const int64_t block = (int64_t)blockIdx.x * kTileWarps + threadIdx.x / kWarp;
  if (block >= a.blocks || a.found_inf.read() != 0) return;
  const FactoredTensor t = a.tensors[step_tensor(a.tensors, a.count, block)];
  body(t, Tile(t, block - t.first_block), block);
}

// Groups past the end of a row are left out where groups are accessed as one.
template <bool InFours>
struct RowAccess : Access<InFours> {
  template <class T>
  __device__ __forceinline__ Four<T> read(const T* p) const {
    if (!InFours || this->count > 0) return Access<InFours>::read(p);
    return pack_bits<T>({0, 0, 0, 0});
  }
};

// body(row, first element of the lane, group -> its RowAccess) for the rows of a tile.
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

// The sums of g^2 over what a tile has of each row and of each column.
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

// body(tensor, i, rows) for each average of all tensors, the tensor's i-th: of a row where i < rows.
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

// A warp has a matrix.
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

// The elements of a row that a lane has, and their directions; zeros past the end.
template <class Param>
struct LaneOfRow {
  Param param[kTileGroups];
  float direction[kTileGroups][4], variance[kTileGroups][4];
};

// body(LaneOfRow, first element of the lane, group -> its RowAccess) for the rows of a tile.
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
          direction = rule.factored(g, row_scale, column_scale[group][i]);
        } else {
          float& variance = of_row.variance[group][i];
          variance = average[group][i];
          direction = rule.own(g, variance);
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
      for (int group = 0; group < kTileGroups; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const double p = row.param[group][i], u = row.direction[group][i];
          of_param += p * p;
          of_direction += u * u;
        }
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

// A block of threads has a tensor.
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

// Tensors by value, with what depends on the numbers of their steps.
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

// Launch as many blocks of threads as there are `each` items.
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

// call(Type<T>{}) of the gradients.
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

// call(Type<Param>{}); parameters that are only read are not rounded.
template <bool Writes, class Call>
cudaError_t with_params(const Adafactor& a, Call&& call) {
  if constexpr (Writes) {
    if (a.param == ParamCodec::rounded) return call(Type<RoundedParam>{});
  }
  if (a.param == ParamCodec::remainder) return call(Type<RemainderParam>{});
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
// A matrix without columns has one too, so that the sums of its rows are written.
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
