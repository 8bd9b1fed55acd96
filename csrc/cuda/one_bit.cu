// quantize_one_bit, average_one_bit and dequantize_one_bit in CUDA. A thread has eight elements, one byte
// of bits.
//
// The new error depends on the scale. A block of at most 8192 elements, one piece, stays in registers
// until its scale is known: 12 + 1/8 bytes per element in float32, where reading x and the error
// twice took 20 + 1/8, or 28 if the second read missed the caches. Longer blocks are read twice.
// They go in strips of whole blocks that fit the L2 cache of current GPUs, so that the second read
// finds them there: 20 + 1/8 bytes; 12 + 1/8 of them reach memory. A block longer than a strip
// takes 20 + 1/8. Dequantising moves 4 + 1/8. The float64 sums take one conversion and one product
// per element. Not measured yet.
#include "core/one_bit.h"

#include "core/dispatch.h"
#include "cuda/launch.cuh"
#include "cuda/vec.cuh"

namespace {

using namespace torchweld;

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kByte = 8;                                         // elements of a thread
constexpr int kRounds = (int)kOneBitPiece / (kThreads * kByte);  // of the threads over a piece
// Elements of a strip: x, the error and the new error are 25 MB in float32.
constexpr int64_t kStrip = int64_t{1} << 21;

// Loads the first `count` of eight elements from i on; the others are zero.
template <class T>
__device__ __forceinline__ void read(float (&values)[kByte], const T* p, int64_t count,
                                     bool is_aligned) {
  constexpr int kAtOnce = kAccessBytes / (int)sizeof(T);
  if (is_aligned && count >= kByte) {
#pragma unroll
    for (int i = 0; i < kByte; i += kAtOnce) {
      const Packed<T> some(__ldg((const uint4*)(p + i)));
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) values[i + j] = some[j];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kByte; ++i) values[i] = i < count ? to_float(p[i]) : 0.0f;
  }
}

template <class T>
__device__ __forceinline__ void write(T* p, const float (&values)[kByte], int64_t count,
                                      bool is_aligned) {
  constexpr int kAtOnce = kAccessBytes / (int)sizeof(T);
  if (is_aligned && count >= kByte) {
#pragma unroll
    for (int i = 0; i < kByte; i += kAtOnce) {
      float some[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) some[j] = values[i + j];
      store(p + i, some);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kByte; ++i) {
      if (i < count) p[i] = from_float<T>(values[i]);
    }
  }
}

// The first element's bit is the most significant one.
__device__ __forceinline__ float with_sign(float scale, unsigned byte, int i) {
  return byte >> (kByte - 1 - i) & 1 ? scale : -scale;
}

// x as float32.
template <class T>
struct Given {
  static __device__ __forceinline__ void read_at(float (&values)[kByte], const Quantize1& a,
                                                 const OneBitPiece&, int64_t i, int64_t count,
                                                 bool is_aligned) {
    read(values, (const T*)a.x + i, count, is_aligned);
  }
};

// The mean of votes.
struct Mean {
  static __device__ __forceinline__ void read_at(float (&values)[kByte], const Quantize1& a,
                                                 const OneBitPiece& at, int64_t i, int64_t, bool) {
    const int64_t bytes = a.shape.bytes(), blocks = a.shape.blocks();
#pragma unroll
    for (int j = 0; j < kByte; ++j) values[j] = 0;
    for (int64_t w = 0; w < a.votes.workers; ++w) {
      const unsigned byte = a.votes.bits[w * bytes + i / kByte];
      const float scale = a.votes.scale[w * blocks + at.block];
#pragma unroll
      for (int j = 0; j < kByte; ++j) values[j] += with_sign(scale, byte, j);
    }
#pragma unroll
    for (int j = 0; j < kByte; ++j) values[j] /= (float)a.votes.workers;
  }
};

// Loads eight elements of a piece and adds their errors. Those past `count` are zero.
template <class Source, class Error>
__device__ __forceinline__ void read_sums(float (&values)[kByte], const Quantize1& a,
                                          const OneBitPiece& at, int64_t i, int64_t count,
                                          bool is_aligned) {
  Source::read_at(values, a, at, i, count, is_aligned);
  if (a.error) {
    float errors[kByte];
    read(errors, (const Error*)a.error + i, count, is_aligned);
#pragma unroll
    for (int j = 0; j < kByte; ++j) values[j] += errors[j];
  }
}

// body(i, count, values) for each group of eight elements of a piece; `count` of them exist.
template <class Source, class Error, class Body>
__device__ __forceinline__ void for_eights(const Quantize1& a, const OneBitPiece& at,
                                           bool is_aligned, Body&& body) {
  for (int64_t within = threadIdx.x * kByte; within < at.count; within += kThreads * kByte) {
    const int64_t i = at.begin + within, count = at.count - within;
    float values[kByte];
    read_sums<Source, Error>(values, a, at, i, count, is_aligned);
    body(i, count, values);
  }
}

// Writes the bits of eight elements and adds their squares.
__device__ __forceinline__ void write_byte(const Quantize1& a, int64_t i, int64_t count,
                                           const float (&values)[kByte], double& sum) {
  unsigned byte = 0;
#pragma unroll
  for (int j = 0; j < kByte; ++j) {
    if (j < count) {
      sum += (double)values[j] * values[j];
      // Do not shift the comparison's result: gcc 12 with -fsanitize=undefined then always sets
      // the bit.
      if (values[j] >= 0) byte |= 0x80u >> j;
    }
  }
  a.bits[i / kByte] = (uint8_t)byte;
}

template <class Error>
__device__ __forceinline__ void write_error(const Quantize1& a, int64_t i, int64_t count,
                                            const float (&values)[kByte], float scale,
                                            bool is_aligned) {
  float errors[kByte];
#pragma unroll
  for (int j = 0; j < kByte; ++j) errors[j] = values[j] - (values[j] >= 0 ? scale : -scale);
  write((Error*)a.new_error + i, errors, count, is_aligned);
}

// The sum over the block's threads, in every thread, in an order that depends only on the launch.
__device__ __forceinline__ double sum_of_threads(double value) {
  __shared__ double of_warp[kWarps];
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  double sum = 0;
  for (int warp = 0; warp < kWarps; ++warp) sum += of_warp[warp];
  return sum;
}

// A whole block of elements that is one piece.
template <class Source, class Error>
__global__ void __launch_bounds__(kThreads) write_block(Quantize1 a, bool is_aligned) {
  const OneBitPiece at(a.shape, blockIdx.x);
  float values[kRounds][kByte];
  double sum = 0;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int64_t within = (round * kThreads + threadIdx.x) * kByte;
    if (within >= at.count) continue;
    const int64_t i = at.begin + within, count = at.count - within;
    read_sums<Source, Error>(values[round], a, at, i, count, is_aligned);
    write_byte(a, i, count, values[round], sum);
  }
  const float scale = one_bit_scale(sum_of_threads(sum), at.count);
  if (threadIdx.x == 0) a.scale[blockIdx.x] = scale;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int64_t within = (round * kThreads + threadIdx.x) * kByte;
    if (within >= at.count) continue;
    write_error<Error>(a, at.begin + within, at.count - within, values[round], scale, is_aligned);
  }
}

template <class Source, class Error>
__global__ void __launch_bounds__(kThreads)
    write_signs(Quantize1 a, int64_t first_piece, bool is_aligned) {
  const int64_t piece = first_piece + blockIdx.x;
  const OneBitPiece at(a.shape, piece);
  double sum = 0;
  for_eights<Source, Error>(a, at, is_aligned, [&](int64_t i, int64_t count, const auto& values) {
    write_byte(a, i, count, values, sum);
  });
  sum = sum_of_threads(sum);
  if (threadIdx.x == 0) a.sums[piece] = sum;
}

__global__ void __launch_bounds__(kThreads) write_scales(Quantize1 a, int64_t first_block) {
  const int64_t block = first_block + blockIdx.x, end = a.shape.first_piece(block + 1);
  double sum = 0;
  for (int64_t i = a.shape.first_piece(block) + threadIdx.x; i < end; i += kThreads) {
    sum += a.sums[i];
  }
  sum = sum_of_threads(sum);
  if (threadIdx.x == 0) a.scale[block] = one_bit_scale(sum, a.shape.count(block));
}

template <class Source, class Error>
__global__ void __launch_bounds__(kThreads)
    write_errors(Quantize1 a, int64_t first_piece, bool is_aligned) {
  const OneBitPiece at(a.shape, first_piece + blockIdx.x);
  const float scale = a.scale[at.block];
  for_eights<Source, Error>(a, at, is_aligned, [&](int64_t i, int64_t count, const auto& values) {
    write_error<Error>(a, i, count, values, scale, is_aligned);
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads) dequantize(Dequantize1 a, bool is_aligned) {
  const OneBitPiece at(a.shape, blockIdx.x);
  const float scale = a.scale[at.block];
  for (int64_t within = threadIdx.x * kByte; within < at.count; within += kThreads * kByte) {
    const int64_t i = at.begin + within;
    const unsigned byte = a.bits[i / kByte];
    float values[kByte];
#pragma unroll
    for (int j = 0; j < kByte; ++j) values[j] = with_sign(scale, byte, j);
    write((T*)a.y + i, values, at.count - within, is_aligned);
  }
}

// The blocks [first, last); each block is read twice.
template <class Source, class Error>
cudaError_t quantize_strip(const Quantize1& a, int64_t first, int64_t last, bool is_aligned,
                           cudaStream_t stream) {
  const int64_t piece = a.shape.first_piece(first), pieces = a.shape.first_piece(last) - piece;
  const Launch over_pieces{dim3((unsigned)pieces), dim3(kThreads)};
  const Launch over_blocks{dim3((unsigned)(last - first)), dim3(kThreads)};
  cudaError_t error = cudaSuccess;
  if (pieces > 0) {
    error = launch(write_signs<Source, Error>, over_pieces, stream, a, piece, is_aligned);
  }
  if (error == cudaSuccess) error = launch(write_scales, over_blocks, stream, a, first);
  if (error != cudaSuccess || pieces == 0) return error;
  return launch(write_errors<Source, Error>, over_pieces, stream, a, piece, is_aligned);
}

template <class Source, class Error>
cudaError_t quantize(const Quantize1& a, cudaStream_t stream) {
  const int64_t pieces = a.shape.pieces(), blocks = a.shape.blocks();
  if (pieces > INT32_MAX) return cudaErrorInvalidValue;
  const bool aligned = is_aligned(a.x) && is_aligned(a.error) && is_aligned(a.new_error);
  if (pieces > 0 && a.shape.pieces_of_block() == 1) {
    const Launch over_blocks{dim3((unsigned)blocks), dim3(kThreads)};
    return launch(write_block<Source, Error>, over_blocks, stream, a, aligned);
  }
  const int64_t block = a.shape.block > 0 ? a.shape.block : 1;
  const int64_t at_once = block < kStrip ? kStrip / block : 1;
  for (int64_t first = 0; first < blocks; first += at_once) {
    const int64_t last = first + at_once < blocks ? first + at_once : blocks;
    const cudaError_t error = quantize_strip<Source, Error>(a, first, last, aligned, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

TW_EXPORT cudaError_t quantize_one_bit(const Quantize1& a, cudaStream_t stream) {
  cudaError_t result = cudaErrorInvalidValue;  // for types without a kernel
  dispatch(a.error_dtype, a.error_dtype, [&](auto error, auto) {
    using Error = typename decltype(error)::type;
    if (!a.x) {
      result = quantize<Mean, Error>(a, stream);
      return;
    }
    dispatch(a.dtype, a.dtype, [&](auto t, auto) {
      result = quantize<Given<typename decltype(t)::type>, Error>(a, stream);
    });
  });
  return result;
}

TW_EXPORT cudaError_t dequantize_one_bit(const Dequantize1& a, cudaStream_t stream) {
  const int64_t pieces = a.shape.pieces();
  if (pieces > INT32_MAX) return cudaErrorInvalidValue;
  cudaError_t result = cudaErrorInvalidValue;
  dispatch(a.dtype, a.dtype, [&](auto t, auto) {
    using T = typename decltype(t)::type;
    result =
        launch(dequantize<T>, {dim3((unsigned)pieces), dim3(kThreads)}, stream, a, is_aligned(a.y));
  });
  return result;
}
