// quantize_1bit, dequantize_mean and dequantize_1bit in CUDA. A thread has eight elements, one byte
// of bits.
//
// The new error depends on the scale, so quantising reads x and the error twice: 20 + 1/8 bytes per
// element in float32, or 28 if the second read misses the caches. Dequantising moves 4 + 1/8. The
// float64 sums take one conversion and one product per element. Not measured yet.
#include "core/one_bit.h"

#include "core/dispatch.h"
#include "cuda/launch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"

namespace {

using namespace torchweld;

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kByte = 8;  // elements of a thread

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

// body(i, count, values) for each eight elements of a piece, of which `count` exist.
template <class Source, class Error, class Body>
__device__ __forceinline__ void for_eights(const Quantize1& a, const OneBitPiece& at,
                                           bool is_aligned, Body&& body) {
  for (int64_t within = threadIdx.x * kByte; within < at.count; within += kThreads * kByte) {
    const int64_t i = at.begin + within, count = at.count - within;
    float values[kByte];
    Source::read_at(values, a, at, i, count, is_aligned);
    if (a.error) {
      float errors[kByte];
      read(errors, (const Error*)a.error + i, count, is_aligned);
#pragma unroll
      for (int j = 0; j < kByte; ++j) values[j] += errors[j];
    }
    body(i, count, values);
  }
}

// The sum over the block's threads, in thread 0, in an order that depends only on the launch.
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

template <class Source, class Error>
__global__ void __launch_bounds__(kThreads) write_signs(Quantize1 a, bool is_aligned) {
  const OneBitPiece at(a.shape, blockIdx.x);
  double sum = 0;
  for_eights<Source, Error>(a, at, is_aligned, [&](int64_t i, int64_t count, const auto& values) {
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
  });
  sum = sum_of_threads(sum);
  if (threadIdx.x == 0) a.sums[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) write_scales(Quantize1 a) {
  const int64_t block = blockIdx.x, end = a.shape.first_piece(block + 1);
  double sum = 0;
  for (int64_t i = a.shape.first_piece(block) + threadIdx.x; i < end; i += kThreads) {
    sum += a.sums[i];
  }
  sum = sum_of_threads(sum);
  if (threadIdx.x == 0) a.scale[block] = one_bit_scale(sum, a.shape.count(block));
}

template <class Source, class Error>
__global__ void __launch_bounds__(kThreads) write_errors(Quantize1 a, bool is_aligned) {
  const OneBitPiece at(a.shape, blockIdx.x);
  const float scale = a.scale[at.block];
  for_eights<Source, Error>(a, at, is_aligned, [&](int64_t i, int64_t count, const auto& values) {
    float errors[kByte];
#pragma unroll
    for (int j = 0; j < kByte; ++j) errors[j] = values[j] - (values[j] >= 0 ? scale : -scale);
    write((Error*)a.new_error + i, errors, count, is_aligned);
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

template <class Source, class Error>
cudaError_t quantize(const Quantize1& a, cudaStream_t stream) {
  const int64_t pieces = a.shape.pieces();
  if (pieces > INT32_MAX) return cudaErrorInvalidValue;
  const bool aligned = is_aligned(a.x) && is_aligned(a.error) && is_aligned(a.new_error);
  const Launch over_pieces{dim3((unsigned)pieces), dim3(kThreads)};
  if (pieces > 0) {
    const cudaError_t error = launch(write_signs<Source, Error>, over_pieces, stream, a, aligned);
    if (error != cudaSuccess) return error;
  }
  const Launch over_blocks{dim3((unsigned)a.shape.blocks()), dim3(kThreads)};
  const cudaError_t error = launch(write_scales, over_blocks, stream, a);
  if (error != cudaSuccess || pieces == 0) return error;
  return launch(write_errors<Source, Error>, over_pieces, stream, a, aligned);
}

}  // namespace

TW_EXPORT cudaError_t quantize_1bit(const Quantize1& a, cudaStream_t stream) {
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

TW_EXPORT cudaError_t dequantize_1bit(const Dequantize1& a, cudaStream_t stream) {
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
