// The 8-bit maps on the device. They are in shared memory because lanes look up different entries.
#pragma once

#include <type_traits>

#include "cuda/blocks.cuh"

TW_NAMESPACE_BEGIN

template <bool Signed>
static __device__ const Quant8Map<Signed> kMapInMemory = quant8_map<Signed>();

// Four codes of zero.
constexpr unsigned kSignedZeros = 0x7f7f7f7fu;

__device__ __forceinline__ bool is_finite(float v) {
  return (__float_as_uint(v) & ~kSignBit) < kInfinityBits;
}

// The largest magnitude in the block. Bits of magnitudes sort like the magnitudes, with NaN
// largest.
__device__ __forceinline__ float largest_magnitude(const float (&values)[kGroups][4]) {
  unsigned most = 0;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      most = max(most, __float_as_uint(values[group][i]) & ~kSignBit);
    }
  }
  return __uint_as_float(__reduce_max_sync(0xffffffffu, most));
}

// The largest magnitude among the group's elements in the adjacent lanes that share its row.
__device__ __forceinline__ float largest_magnitude(const float (&group)[4], int lanes_of_row) {
  unsigned most = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) most = max(most, __float_as_uint(group[i]) & ~kSignBit);
#pragma unroll 1
  for (int apart = lanes_of_row / 2; apart > 0; apart /= 2) {
    most = max(most, __shfl_xor_sync(0xffffffffu, most, apart));
  }
  return __uint_as_float(most);
}

// call(fraction), where fraction(x) is x / absmax, rounded once. With the reciprocal known, three
// instructions of a division remain. They neither overflow nor underflow here, except for fractions
// below 2^-23, which are nearest to zero in any case.
template <class Call>
__device__ __forceinline__ void with_fractions(float absmax, Call&& call) {
  const float divisor = quant_divisor(absmax);
  if (divisor > 0x1p-60f && divisor < 0x1p60f) {
    const float reciprocal = 1 / divisor;
    call([=](float x) {
      const float quotient = x * reciprocal;
      return fmaf(fmaf(-divisor, quotient, x), reciprocal, quotient);
    });
  } else {
    call([=](float x) { return x / divisor; });
  }
}

// The tables for decoding and encoding.
template <bool Signed>
struct SharedMap {
  float value[256];
  uint32_t place[Quant8Map<Signed>::kRuns];

  __device__ __forceinline__ void fill() {
    const auto& map = kMapInMemory<Signed>;
    for (int i = (int)threadIdx.x; i < 256; i += (int)blockDim.x) value[i] = map.value[i];
    for (int i = (int)threadIdx.x; i < map.kRuns; i += (int)blockDim.x) place[i] = map.place[i];
  }
  // Encodes this lane's values of a block, `Groups` groups. No magnitude exceeds absmax. With
  // `KeepsPositive` a positive value never becomes zero: steps divide by the root of a second
  // moment.
  template <int Groups = kGroups, bool KeepsPositive = false>
  __device__ __forceinline__ void encode(Four<uint8_t>* to, const float (*values)[4],
                                         float absmax) const {
    with_fractions(absmax, [&](auto&& fraction_of) {
#pragma unroll
      for (int group = 0; group < Groups; ++group) {
        unsigned codes[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t fraction = __float_as_uint(fraction_of(values[group][i]));
          const uint32_t number =
              quant8_number<Signed>(fraction, [this](uint32_t run) { return place[run]; });
          codes[i] = quant8_code<Signed>(fraction, number);
          if (KeepsPositive && codes[i] == 0 && values[group][i] > 0) codes[i] = 1;
        }
        to[group] = pack_bits<uint8_t>(codes);
      }
    });
  }
};
struct NoMap {
  __device__ __forceinline__ void fill() {}
};

// The maps that a kernel needs.
template <bool Signed, bool Unsigned>
struct MapsOf {
  std::conditional_t<Signed, SharedMap<true>, NoMap> with_sign;
  std::conditional_t<Unsigned, SharedMap<false>, NoMap> without;

  // All threads of the block must call this.
  __device__ __forceinline__ void fill() {
    with_sign.fill();
    without.fill();
    if constexpr (Signed || Unsigned) __syncthreads();
  }
  template <bool OfSigned>
  __device__ __forceinline__ const auto& of() const {
    if constexpr (OfSigned) {
      return with_sign;
    } else {
      return without;
    }
  }
};

TW_NAMESPACE_END
