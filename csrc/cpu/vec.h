// SIMD with the compiler's vector extensions: one width per instruction set, intrinsics only where
// the compiler lacks an operation, and no libm. A kernel written on Vec<A> compiles for every
// variant, NEON included.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstring>

#include "core/bits.h"

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

TW_NAMESPACE_BEGIN

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class A>
constexpr int64_t kLanes = kVectorBytes / sizeof(A);

template <class A>
struct VecOf {
  typedef A type __attribute__((vector_size(kVectorBytes)));
};
template <class A>
using Vec = typename VecOf<A>::type;

template <class A>
inline Vec<A> splat(A value) {
  return value - Vec<A>{};  // x - 0 is x, even if x is -0
}

// A mask with lanes as wide as A's: the result of comparing two Vec<A>.
template <class A>
using Bits = typename BitsOf<Vec<A>>::Signed;

// `yes` in lanes whose mask bits are all set, `no` in lanes whose mask bits are all clear.
template <class A>
inline Vec<A> choose(Bits<A> mask, Vec<A> yes, Vec<A> no) {
  return mask ? yes : no;
}

// Takes b's lane if a's is NaN.
template <class A>
inline Vec<A> maximum(Vec<A> a, Vec<A> b) {
  return a > b ? a : b;
}

// 0 in place of subnormal numbers, for which a GEMM takes ten times as long.
template <class A>
inline Vec<A> normal_or_zero(Vec<A> v) {
  constexpr A kSmallest = sizeof(A) == 4 ? (A)0x1p-126 : (A)0x1p-1022;
  return choose<A>(magnitude(v) < kSmallest, Vec<A>{}, v);
}

// One instruction under -fno-math-errno.
inline float square_root(float value) { return __builtin_sqrtf(value); }
inline double square_root(double value) { return __builtin_sqrt(value); }

inline Vec<float> square_root(Vec<float> v) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_sqrt_ps((__m512)v);
#elif defined(__AVX2__)
  return (Vec<float>)_mm256_sqrt_ps((__m256)v);
#elif defined(__SSE2__)
  return (Vec<float>)_mm_sqrt_ps((__m128)v);
#elif defined(__aarch64__)
  return (Vec<float>)vsqrtq_f32((float32x4_t)v);
#else
  for (int64_t i = 0; i < kLanes<float>; ++i) v[i] = __builtin_sqrtf(v[i]);
  return v;
#endif
}

inline Vec<double> square_root(Vec<double> v) {
  for (int64_t i = 0; i < kLanes<double>; ++i) v[i] = __builtin_sqrt(v[i]);
  return v;
}

// Adds lanes pairwise, in an order that depends only on the width.
template <class A>
inline A horizontal_sum(Vec<A> v) {
  A lane[kLanes<A>];
  std::memcpy(lane, &v, sizeof v);
  for (int64_t half = kLanes<A> / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
}

// Adds the lanes' squares in double. total() combines the two sums.
inline void add_squares(Vec<double> (&sums)[2], Vec<float> v) {
  typedef float HalfVec __attribute__((vector_size(kVectorBytes / 2)));
  HalfVec half[2];
  std::memcpy(half, &v, sizeof v);
  for (int i = 0; i < 2; ++i) {
    const Vec<double> wide = __builtin_convertvector(half[i], Vec<double>);
    sums[i] += wide * wide;
  }
}
inline double total(const Vec<double> (&sums)[2]) {
  return horizontal_sum<double>(sums[0] + sums[1]);
}

namespace detail {

typedef uint32_t U32 __attribute__((vector_size(kVectorBytes)));
typedef int32_t I32 __attribute__((vector_size(kVectorBytes)));
typedef uint16_t U16 __attribute__((vector_size(kVectorBytes / 2)));
typedef float F32 __attribute__((vector_size(kVectorBytes)));

inline U32 widen(const uint16_t* p) {
  U16 v;
  std::memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, U32);
}

inline void narrow(uint16_t* p, U32 v) {
  const U16 narrow = __builtin_convertvector(v, U16);
  std::memcpy(p, &narrow, sizeof narrow);
}

inline U32 select(I32 mask, U32 yes, U32 no) { return ((U32)mask & yes) | (~(U32)mask & no); }

inline F32 bf16_to_f32(U32 bits) { return (F32)(bits << 16); }

// Rounds to nearest, ties to even. NaN becomes the same quiet NaN as in torch.
inline U32 f32_to_bf16(F32 value) {
  const U32 bits = (U32)value;
  const U32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return value != value ? U32{} + 0x7fc0u : rounded;
}

inline F32 f16_to_f32(U32 bits) {
  // The multiplication rebases the exponent and normalises subnormals. The exponent of infinity and
  // NaN is set separately.
  const U32 magnitude = (bits & 0x7fffu) << 13;
  const F32 rebased = (F32)magnitude * 0x1p112f;
  const U32 special = select((I32)(magnitude >= 0x0f800000u), U32{} + 0x7f800000u, U32{});
  return (F32)((U32)rebased | special | ((bits & 0x8000u) << 16));
}

// Rounds to nearest, ties to even, with a float addition: adding 2^13 ulps of the half moves the
// kept bits to the end of the sum's mantissa.
inline U32 f32_to_f16(F32 value) {
  const U32 bits = (U32)value;
  const U32 magnitude = bits & 0x7fffffffu;
  const U32 exponent = magnitude & 0x7f800000u;
  // Below 2^-14, halves are subnormal with a fixed spacing of 2^-24.
  const U32 floor_exponent = select((I32)(exponent > 0x38800000u), exponent, U32{} + 0x38800000u);
  const F32 magic = (F32)(floor_exponent + (13u << 23));
  const F32 aligned = (F32)magnitude + magic;
  const U32 mantissa = (U32)aligned - (U32)magic;
  U32 half = ((floor_exponent - 0x38800000u) >> 13) + mantissa;
  half = select((I32)(magnitude >= 0x477ff000u), U32{} + 0x7c00u, half);
  half = select((I32)(magnitude > 0x7f800000u), U32{} + 0x7e00u, half);
  return half | ((bits >> 16) & 0x8000u);
}

}  // namespace detail

// load and store convert kLanes<A> elements of storage type T from and to accumulators A.
template <class T>
inline Vec<Accumulate<T>> load(const T* p) {
  Vec<T> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <>
inline Vec<float> load(const BFloat16* p) {
  return detail::bf16_to_f32(detail::widen(&p->bits));
}
template <>
inline Vec<float> load(const Half* p) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (Vec<float>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
  return (Vec<float>)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
#else
  return detail::f16_to_f32(detail::widen(&p->bits));
#endif
}

template <class T>
inline void store(T* p, Vec<Accumulate<T>> v) {
  std::memcpy(p, &v, sizeof v);
}
template <>
inline void store(BFloat16* p, Vec<float> v) {
  detail::narrow(&p->bits, detail::f32_to_bf16(v));
}
template <>
inline void store(Half* p, Vec<float> v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)));
#else
  detail::narrow(&p->bits, detail::f32_to_f16(v));
#endif
}

// v as it is read back after it was stored as T.
template <class T>
inline Vec<Accumulate<T>> round_trip(Vec<Accumulate<T>> v) {
  T lanes[kLanes<Accumulate<T>>];
  store(lanes, v);
  return load(lanes);
}

// A position in a row: kLanes<A> whole elements, or the last `count` < kLanes<A> at the row's end.
struct Whole {};
struct Part {
  int64_t count;
};

// Returns v with `fill` in the lanes past the row's end. Call it before combining lanes: arithmetic
// on absent lanes may give NaN, as in 0 / 0 or 0 * infinity.
template <class A>
inline Vec<A> present(Vec<A> v, Whole, A) {
  return v;
}
template <class A>
inline Vec<A> present(Vec<A> v, Part part, A fill) {
  Bits<A> left;
  for (int64_t i = 0; i < kLanes<A>; ++i) left[i] = part.count - i;
  return choose<A>(left > 0, v, splat(fill));
}

// Load or store the first `count` of N elements. A memcpy of variable size is a call, which would
// take longer than all other work on a short row. Masked instructions are used where they exist,
// except under AddressSanitizer, which does not know that masked lanes are not accessed.
#if defined(__AVX512F__) && !defined(__SANITIZE_ADDRESS__)
#define TW_MASKED_PARTS
#endif
template <int N, class T>
inline void copy_part(T* to, const T* from, int64_t count) {
  if constexpr (N > 1) {
    constexpr int kHalf = N / 2;
    if (count & kHalf) {
      std::memcpy(to, from, kHalf * sizeof(T));
      to += kHalf, from += kHalf;
    }
    copy_part<kHalf>(to, from, count);
  }
}
template <int N, class T>
inline void load_part(T (&lanes)[N], const T* from, Part part) {
#if defined(TW_MASKED_PARTS)
  const unsigned there = (1u << part.count) - 1;
  if constexpr (sizeof(T) == 8) {
    _mm512_storeu_si512(lanes, _mm512_maskz_loadu_epi64((__mmask8)there, from));
  } else if constexpr (sizeof(T) == 4) {
    _mm512_storeu_si512(lanes, _mm512_maskz_loadu_epi32((__mmask16)there, from));
  } else if constexpr (sizeof(T) == 2) {
    _mm256_storeu_si256((__m256i*)lanes, _mm256_maskz_loadu_epi16((__mmask16)there, from));
  } else {
    _mm_storeu_si128((__m128i*)lanes, _mm_maskz_loadu_epi8((__mmask16)there, from));
  }
#else
  std::memset(lanes, 0, sizeof lanes);
  copy_part<N>(lanes, from, part.count);
#endif
}
template <int N, class T>
inline void store_part(T* to, const T (&lanes)[N], Part part) {
#if defined(TW_MASKED_PARTS)
  const unsigned there = (1u << part.count) - 1;
  if constexpr (sizeof(T) == 8) {
    _mm512_mask_storeu_epi64(to, (__mmask8)there, _mm512_loadu_si512(lanes));
  } else if constexpr (sizeof(T) == 4) {
    _mm512_mask_storeu_epi32(to, (__mmask16)there, _mm512_loadu_si512(lanes));
  } else if constexpr (sizeof(T) == 2) {
    _mm256_mask_storeu_epi16(to, (__mmask16)there, _mm256_loadu_si256((const __m256i*)lanes));
  } else {
    _mm_mask_storeu_epi8(to, (__mmask16)there, _mm_loadu_si128((const __m128i*)lanes));
  }
#else
  copy_part<N>(to, lanes, part.count);
#endif
}

template <class T>
inline Vec<Accumulate<T>> load(const T* p, Whole, Accumulate<T> = 0) {
  return load(p);
}
// Lanes past the end are `fill`.
template <class T>
inline Vec<Accumulate<T>> load(const T* p, Part part, Accumulate<T> fill = 0) {
  using A = Accumulate<T>;
  T lanes[kLanes<A>];
  load_part(lanes, p, part);
  return present(load(lanes), part, fill);
}

// Loads elements that are read once, and prefetches further ahead than the hardware does. For loops
// that spend many instructions on each element.
constexpr int64_t kAheadBytes = 2048;
template <class T, class Place>
inline Vec<Accumulate<T>> read(const T* p, Place place) {
  __builtin_prefetch((const char*)p + kAheadBytes);
  return load(p, place);
}

template <class T>
inline void store(T* p, Vec<Accumulate<T>> v, Whole) {
  store(p, v);
}
template <class T>
inline void store(T* p, Vec<Accumulate<T>> v, Part part) {
  T lanes[kLanes<Accumulate<T>>];
  store(lanes, v);
  store_part(p, lanes, part);
}

// Whether to store past the caches. A result too large for the caches is then not read before it is
// written, which saves a third of a copy's traffic. Untouched pages are an exception: the operating
// system zeroes them and leaves them in the caches. `row` is the last row that the caller writes,
// not yet written. Rows must begin on a vector's boundary.
constexpr int64_t kStreamBytes = int64_t{16} << 20;

template <class T>
inline bool worth_streaming(void* result, int64_t rows, int64_t width, int64_t row) {
  const int64_t pitch = width * sizeof(T);
  const int64_t unit = kLanes<Accumulate<T>> * sizeof(T);
  if (rows * pitch < kStreamBytes || pitch % unit || (uintptr_t)result % unit) return false;
  constexpr uintptr_t kPage = 4096;
  const uintptr_t page = ((uintptr_t)result + row * pitch) / kPage * kPage;
  unsigned char resident = 1;
  return mincore((void*)page, 1, &resident) == 0 && (resident & 1);
}

template <class T>
inline void stream(T* p, Vec<Accumulate<T>> v) {
#if defined(__SSE2__)
  alignas(kVectorBytes) T buffer[kLanes<Accumulate<T>>];
  store(buffer, v);
  if constexpr (sizeof buffer == 64) {
#if defined(__AVX512F__)
    _mm512_stream_si512((__m512i*)p, _mm512_load_si512(buffer));
#endif
  } else if constexpr (sizeof buffer == 32) {
#if defined(__AVX2__)
    _mm256_stream_si256((__m256i*)p, _mm256_load_si256((const __m256i*)buffer));
#endif
  } else if constexpr (sizeof buffer == 16) {
    _mm_stream_si128((__m128i*)p, _mm_load_si128((const __m128i*)buffer));
  } else {
    std::memcpy(p, buffer, sizeof buffer);
  }
#else
  store(p, v);
#endif
}

// Stores a vector of a result, past the caches if `streamed`.
template <class T>
inline void write(T* p, Vec<Accumulate<T>> v, Whole, bool streamed) {
  if (streamed) {
    stream(p, v);
  } else {
    store(p, v);
  }
}
template <class T>
inline void write(T* p, Vec<Accumulate<T>> v, Part at, bool) {
  store(p, v, at);
}

// Orders streamed stores before later stores. Call it after the last of them.
inline void finish_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// A row of a tensor, or null if the tensor is absent.
template <class T>
inline const T* row_of(const void* tensor, int64_t row, int64_t width) {
  return tensor ? (const T*)tensor + row * width : nullptr;
}
template <class T>
inline T* row_of(void* tensor, int64_t row, int64_t width) {
  return tensor ? (T*)tensor + row * width : nullptr;
}

// body(i, Whole or Part) for every vector of a row.
template <class A, class Body>
inline void for_vectors(int64_t width, Body&& body) {
  int64_t i = 0;
  for (; i + kLanes<A> <= width; i += kLanes<A>) body(i, Whole{});
  if (i < width) body(i, Part{width - i});
}

// Works like for_vectors, for a body that also adds to N sums. Four accumulators per sum hide the latency
// of additions. They are flushed into a total every kRun vectors, so that rounding errors do not
// grow with the row's length. The order of the additions depends only on the width.
template <class A, int N, class Body>
inline void sum_vectors(int64_t width, A (&sums)[N], Body&& body) {
  constexpr int64_t kStep = kLanes<A>;
  constexpr int64_t kRun = 64;
  Vec<A> total[N] = {};
  for (int64_t run = 0; run < width; run += kRun * kStep) {
    const int64_t end = run + kRun * kStep < width ? run + kRun * kStep : width;
    Vec<A> acc[4][N] = {};
    int64_t i = run;
    for (; i + 4 * kStep <= end; i += 4 * kStep) {
      body(i, Whole{}, acc[0]);
      body(i + kStep, Whole{}, acc[1]);
      body(i + 2 * kStep, Whole{}, acc[2]);
      body(i + 3 * kStep, Whole{}, acc[3]);
    }
    for (; i + kStep <= end; i += kStep) body(i, Whole{}, acc[0]);
    if (i < end) body(i, Part{end - i}, acc[1]);
    for (int n = 0; n < N; ++n) total[n] += (acc[0][n] + acc[1][n]) + (acc[2][n] + acc[3][n]);
  }
  for (int n = 0; n < N; ++n) sums[n] = horizontal_sum<A>(total[n]);
}

TW_NAMESPACE_END
