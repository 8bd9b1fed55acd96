// quantize_8bit and dequantize_8bit in CUDA: one warp per block of 256 elements.
//
// Bytes per fp32 element: quantising reads 4 and writes 1 + 1/64, dequantising the reverse. A
// thread block encodes 64 blocks, 80 KB of traffic, and first fills 7 or 13 KB of tables from L2.
// Not measured yet.
#include "core/dispatch.h"
#include "cuda/launch.cuh"
#include "cuda/quant8.cuh"

namespace {

using namespace torchweld;

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr uint32_t kPiece = 64;  // blocks per thread block

// body(block, its begin, group -> its Access), run by the block's warp. All accesses share one
// branch.
template <class Body>
__device__ __forceinline__ void for_blocks(uint32_t blocks, int64_t width, bool is_aligned,
                                           Body&& body) {
  const uint32_t first = blockIdx.x * kPiece;
  const uint32_t last = blocks - first < kPiece ? blocks : first + kPiece;
#pragma unroll 1
  for (uint32_t block = first + threadIdx.x / kWarp; block < last; block += kWarps) {
    const QuantBlock here = quant_block(block, width);
    const auto left = [&](int group) { return (int)here.count - place(group); };
    if (is_aligned && here.count == kQuantBlock) {
      body(block, here.begin, [&](int group) { return Access<true>{left(group)}; });
    } else {
      body(block, here.begin, [&](int group) { return Access<false>{left(group)}; });
    }
  }
}

template <class T, bool Signed>
__global__ void __launch_bounds__(kThreads)
    quantize(Quantize8 a, uint32_t blocks, bool is_aligned) {
  __shared__ MapsOf<Signed, !Signed> maps;
  maps.fill();
  for_blocks(blocks, a.width, is_aligned, [&](uint32_t block, int64_t begin, auto&& access_to) {
    float values[kGroups][4];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const Four<T> four = access_to(group).read((const T*)a.x + begin + place(group));
#pragma unroll
      for (int i = 0; i < 4; ++i) values[group][i] = four[i];
    }
    const float absmax = largest_magnitude(values);
    Four<uint8_t> codes[kGroups];
    maps.template of<Signed>().encode(codes, values, absmax);
    if (lane() == 0) a.absmax[block] = absmax;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      access_to(group).write(a.codes + begin + place(group), codes[group]);
    }
  });
}

template <class T, bool Signed>
__global__ void __launch_bounds__(kThreads)
    dequantize(Dequantize8 a, uint32_t blocks, bool is_aligned) {
  __shared__ MapsOf<Signed, !Signed> maps;
  maps.fill();
  for_blocks(blocks, a.width, is_aligned, [&](uint32_t block, int64_t begin, auto&& access_to) {
    const float absmax = a.absmax[block];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const auto access = access_to(group);
      const Four<uint8_t> codes = access.read(a.codes + begin + place(group));
      float values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[i] = maps.template of<Signed>().value[codes.bits(i) & 0xffu] * absmax;
      }
      access.write((T*)a.y + begin + place(group), pack<T>(values));
    }
  });
}

template <class Args>
cudaError_t launch_blocks(void (*kernel)(Args, uint32_t, bool), const Args& a, bool is_aligned,
                          cudaStream_t stream) {
  const int64_t blocks = a.rows * quant_blocks(a.width);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  const unsigned pieces = ((uint32_t)blocks + kPiece - 1) / kPiece;
  return launch(kernel, {dim3(pieces), dim3(kThreads)}, stream, a, (uint32_t)blocks,
                is_aligned && a.width % 4 == 0);
}

}  // namespace

TW_EXPORT cudaError_t quantize_8bit(const Quantize8& a, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;  // for types without a kernel
  dispatch(a.dtype, a.dtype, [&](auto t, auto) {
    using T = typename decltype(t)::type;
    error = launch_blocks(a.is_signed ? quantize<T, true> : quantize<T, false>, a,
                          holds_groups<T>(a.x) && holds_groups<uint8_t>(a.codes), stream);
  });
  return error;
}

TW_EXPORT cudaError_t dequantize_8bit(const Dequantize8& a, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  dispatch(a.dtype, a.dtype, [&](auto t, auto) {
    using T = typename decltype(t)::type;
    error = launch_blocks(a.is_signed ? dequantize<T, true> : dequantize<T, false>, a,
                          holds_groups<T>(a.y) && holds_groups<uint8_t>(a.codes), stream);
  });
  return error;
}
