// Blocks of 256 elements, one per warp. A lane has eight elements in two groups of four, so that
// the accesses of a warp are contiguous for every dtype.
#pragma once

#include "core/quant8.h"
#include "cuda/vec.cuh"

TW_NAMESPACE_BEGIN

constexpr int kGroups = 2;
static_assert(kGroups * 4 * kWarp == kQuantBlock);

__device__ __forceinline__ int lane() { return (int)threadIdx.x % kWarp; }
// The distance between a lane's groups, and where a group begins in the block.
constexpr int kGroupStride = kWarp * 4;
__device__ __forceinline__ int place(int group) { return group * kGroupStride + lane() * 4; }

// Narrow rows, which are blocks of few elements, would leave most lanes idle. A warp therefore
// takes as many rows as make up 256 elements. The width must be a power of two, so that a row
// consists of the groups of adjacent lanes.
TW_HD uint32_t rows_of_warp(int64_t width) {
  const bool narrow = width >= 4 && width < kQuantBlock && (width & (width - 1)) == 0;
  return narrow ? (uint32_t)kQuantBlock / (uint32_t)width : 1;
}

template <class T>
using Four = Packed<T, 4>;

template <class T>
__device__ __forceinline__ Four<T> pack_bits(const unsigned (&bits)[4]) {
  Four<T> four;
#pragma unroll
  for (int w = 0; w < four.kWords; ++w) four.word[w] = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    four.word[i / four.kInWord] |= bits[i] << (i % four.kInWord * 8 * sizeof(T));
  }
  return four;
}
template <class T>
__device__ __forceinline__ Four<T> pack(const float (&values)[4]) {
  unsigned bits[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) bits[i] = bits_of(from_float<T>(values[i]));
  return pack_bits<T>(bits);
}

// Access to a group: in one instruction if the block is whole and aligned, otherwise element by
// element. Each element is read once, before it may be written.
template <bool Whole>
struct Access {
  int count;  // elements from the group's first one to the end of the block

  // Elements past the end take the bits of `nothing`, a word of fill elements.
  template <class T>
  __device__ __forceinline__ Four<T> read(const T* p, unsigned nothing = 0) const {
    Four<T> four;
    if constexpr (Whole) {
      constexpr int kWords = Four<T>::kWords;
      if constexpr (kWords == 1) {
        four.word[0] = __ldcs((const unsigned*)p);
      } else if constexpr (kWords == 2) {
        const uint2 two = __ldcs((const uint2*)p);
        four.word[0] = two.x, four.word[1] = two.y;
      } else {
        const uint4 all = __ldcs((const uint4*)p);
        four.word[0] = all.x, four.word[1] = all.y, four.word[2] = all.z, four.word[3] = all.w;
      }
    } else {
      unsigned bits[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bits[i] = i < count ? bits_of(p[i]) : nothing & (~0u >> (32 - 8 * sizeof(T)));
      }
      four = pack_bits<T>(bits);
    }
    return four;
  }

  template <class T>
  __device__ __forceinline__ void write(T* p, const Four<T>& four) const {
    if constexpr (!Whole) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < count) p[i] = element<T>(four.bits(i));
      }
    } else if constexpr (Four<T>::kWords == 1) {
      __stcs((unsigned*)p, four.word[0]);
    } else if constexpr (Four<T>::kWords == 2) {
      __stcs((uint2*)p, make_uint2(four.word[0], four.word[1]));
    } else {
      __stcs((uint4*)p, make_uint4(four.word[0], four.word[1], four.word[2], four.word[3]));
    }
  }
};

// Whether p is aligned for groups of four elements of T.
template <class T>
inline bool holds_groups(const void* p) {
  return (uintptr_t)p % (4 * sizeof(T)) == 0;
}

TW_NAMESPACE_END
