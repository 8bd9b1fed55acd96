// Quantises to 1 bit and back on the CPU.
//
// The new error depends on the scale, so quantising takes two passes: one reads x and the error and
// writes bits, the other reads both again and writes the new error. That is 20 + 1/8 bytes per
// element in float32. Dequantising moves 4 + 1/8.
#include "core/one_bit.h"

#include <type_traits>

#include "core/dispatch.h"
#include "cpu/vec.h"

namespace {

using namespace torchweld;
using F32 = Vec<float>;

constexpr int64_t kLane = kLanes<float>;
// Elements per iteration: a whole number of bytes of bits.
constexpr int64_t kUnit = kLane < 8 ? 8 : kLane;

// Reverses the bits of a byte, so that the first element's bit becomes the least significant one.
inline unsigned reverse_bits(unsigned byte) {
  return (unsigned)((byte * 0x0202020202ull & 0x010884422010ull) % 1023);
}

// Bit i is the sign of lane i.
inline unsigned signs(F32 v) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)v, _mm512_setzero_ps(), _CMP_GE_OQ);
#elif defined(__AVX2__)
  return (unsigned)_mm256_movemask_ps((__m256)(v >= 0));
#elif defined(__SSE2__)
  return (unsigned)_mm_movemask_ps((__m128)(v >= 0));
#elif defined(__aarch64__)
  return vaddvq_u32((uint32x4_t)(v >= 0) & uint32x4_t{1, 2, 4, 8});
#else
  unsigned bits = 0;
  for (int64_t i = 0; i < kLane; ++i) bits |= (unsigned)(v[i] >= 0) << i;
  return bits;
#endif
}

inline F32 with_signs(float scale, unsigned of_lanes) {
  Bits<float> weights;
  for (int64_t i = 0; i < kLane; ++i) weights[i] = 1 << i;
  return choose<float>((weights & (int32_t)of_lanes) != 0, splat(scale), splat(-scale));
}

// The stored bits of the lanes from element i on: lane j's in bit j. i is a multiple of kLane.
template <class Place>
inline unsigned bits_at(const uint8_t* bits, int64_t i, Place place) {
  if constexpr (kLane < 8) {
    return reverse_bits(bits[i / 8]) >> (i % 8) & ((1u << kLane) - 1);
  } else {
    unsigned word = 0;
    int64_t bytes = kLane / 8;
    if constexpr (std::is_same_v<Place, Part>) bytes = (place.count + 7) / 8;
    for (int64_t b = 0; b < bytes; ++b) word |= reverse_bits(bits[i / 8 + b]) << (8 * b);
    return word;
  }
}

// x as float32.
template <class T>
struct Given {
  const T* x;
  Given(const Quantize1& a, const OneBitPiece& at) : x((const T*)a.x + at.begin) {}
  template <class Place>
  F32 operator()(int64_t i, Place place) const {
    return load(x + i, place);
  }
};

// The mean of votes.
struct Mean {
  Votes votes;
  int64_t bytes, blocks;
  float workers;
  Mean(const Quantize1& a, const OneBitPiece& at)
      : votes(a.votes),
        bytes(a.shape.bytes()),
        blocks(a.shape.blocks()),
        workers((float)a.votes.workers) {
    votes.bits += at.begin / 8;
    votes.scale += at.block;
  }
  template <class Place>
  F32 operator()(int64_t i, Place place) const {
    F32 sum = {};
    for (int64_t w = 0; w < votes.workers; ++w) {
      sum += with_signs(votes.scale[w * blocks], bits_at(votes.bits + w * bytes, i, place));
    }
    return sum / splat(workers);
  }
};

template <class Error, class Place>
inline F32 with_error(F32 value, const Error* error, int64_t i, Place place) {
  return error ? value + load(error + i, place) : value;
}

template <class Source, class Error>
void write_signs(const Quantize1& a, int64_t piece) {
  const OneBitPiece at(a.shape, piece);
  const Source source(a, at);
  const Error* error = a.error ? (const Error*)a.error + at.begin : nullptr;
  uint8_t* bits = a.bits + at.begin / 8;
  Vec<double> sums[2] = {};
  for (int64_t unit = 0; unit < at.count; unit += kUnit) {
    unsigned word = 0;
    const auto take = [&](int64_t i, auto place) {
      const F32 value = with_error(source(i, place), error, i, place);
      add_squares(sums, present(value, place, 0.0f));
      word |= signs(value) << (i - unit);
    };
    for (int64_t i = unit; i < unit + kUnit && i < at.count; i += kLane) {
      if (i + kLane <= at.count) {
        take(i, Whole{});
      } else {
        take(i, Part{at.count - i});
      }
    }
    const int64_t left = at.count - unit;
    if (left < kUnit) word &= (1u << left) - 1;
    for (int64_t b = 0; b < kUnit / 8 && 8 * b < left; ++b) {
      bits[unit / 8 + b] = (uint8_t)reverse_bits(word >> (8 * b) & 255);
    }
  }
  a.sums[piece] = total(sums);
}

template <class Source, class Error>
void write_errors(const Quantize1& a, int64_t piece) {
  const OneBitPiece at(a.shape, piece);
  const Source source(a, at);
  const Error* error = a.error ? (const Error*)a.error + at.begin : nullptr;
  Error* new_error = (Error*)a.new_error + at.begin;
  const F32 scale = splat(a.scale[at.block]);
  for_vectors<float>(at.count, [&](int64_t i, auto place) {
    const F32 value = with_error(source(i, place), error, i, place);
    store(new_error + i, value - choose<float>(value >= 0, scale, -scale), place);
  });
}

// call(Type<T>{}) with the storage type of `dtype`.
template <class Call>
void dispatch_float(DType dtype, Call&& call) {
  dispatch(dtype, dtype, [&](auto t, auto) {
    if constexpr (!std::is_same_v<typename decltype(t)::type, double>) call(t);
  });
}

// call(Type<Source>{}, Type<Error>{}) with the kind of source and the errors' storage type.
template <class Call>
void dispatch_source(const Quantize1& a, Call&& call) {
  dispatch_float(a.error_dtype, [&](auto error) {
    if (!a.x) return call(Type<Mean>{}, error);
    dispatch_float(a.dtype,
                   [&](auto t) { call(Type<Given<typename decltype(t)::type>>{}, error); });
  });
}

template <class T>
void dequantize(const Dequantize1& a, int64_t piece) {
  const OneBitPiece at(a.shape, piece);
  const uint8_t* bits = a.bits + at.begin / 8;
  T* y = (T*)a.y + at.begin;
  const float scale = a.scale[at.block];
  for_vectors<float>(at.count, [&](int64_t i, auto place) {
    store(y + i, with_signs(scale, bits_at(bits, i, place)), place);
  });
}

}  // namespace

// Items are pieces.
TW_EXPORT void one_bit_signs(const Quantize1& a, int64_t begin, int64_t end) {
  dispatch_source(a, [&](auto source, auto error) {
    using Source = typename decltype(source)::type;
    using Error = typename decltype(error)::type;
    for (int64_t piece = begin; piece < end; ++piece) write_signs<Source, Error>(a, piece);
  });
}

TW_EXPORT void one_bit_errors(const Quantize1& a, int64_t begin, int64_t end) {
  dispatch_source(a, [&](auto source, auto error) {
    using Source = typename decltype(source)::type;
    using Error = typename decltype(error)::type;
    for (int64_t piece = begin; piece < end; ++piece) write_errors<Source, Error>(a, piece);
  });
}

TW_EXPORT void dequantize_one_bit(const Dequantize1& a, int64_t begin, int64_t end) {
  dispatch_float(a.dtype, [&](auto t) {
    for (int64_t piece = begin; piece < end; ++piece) {
      dequantize<typename decltype(t)::type>(a, piece);
    }
  });
}
