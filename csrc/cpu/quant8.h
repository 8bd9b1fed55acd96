// 8-bit blocks as vectors: table look-ups, and the conversion of a block to codes and back.
#pragma once

#include "core/quant8.h"
#include "cpu/vec.h"
#if defined(__AVX2__) && !defined(__AVX512F__)
#define TW_BY_ARITHMETIC
#include "cpu/quant8_avx2.h"
#endif

TW_NAMESPACE_BEGIN

using detail::F32;
using detail::I32;
using detail::U32;

// table[index] for each lane.
inline U32 look_up(const uint32_t* table, U32 index) {
#if defined(__AVX512F__)
  return (U32)_mm512_i32gather_epi32((__m512i)index, table, 4);
#elif defined(__AVX2__)
  return (U32)_mm256_i32gather_epi32((const int*)table, (__m256i)index, 4);
#else
  U32 result;
  for (int64_t i = 0; i < kLanes<float>; ++i) result[i] = table[index[i]];
  return result;
#endif
}

// Intrinsics, because gcc converts between bytes and lanes one element at a time.
inline U32 load_codes(const uint8_t* codes, Whole) {
#if defined(__AVX512F__)
  return (U32)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)codes));
#elif defined(__AVX2__)
  return (U32)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)codes));
#elif defined(__aarch64__)
  uint32_t packed;
  std::memcpy(&packed, codes, sizeof packed);
  return (U32)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(packed))));
#else
  U32 wide;
  for (int64_t i = 0; i < kLanes<float>; ++i) wide[i] = codes[i];
  return wide;
#endif
}
inline U32 load_codes(const uint8_t* codes, Part part) {
  uint8_t lanes[kLanes<float>];
  load_part(lanes, codes, part);
  return load_codes(lanes, Whole{});
}

#if defined(__AVX512F__)
// Transposes a 4 x 4 matrix of 4-byte pieces.
inline __m512i transpose_pieces(__m512i bytes) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, bytes);
}
#endif

// --- From codes to floats -----------------------------------------------------------------------

#if defined(__AVX512F__)
// Decodes 64 codes at a time, byte by byte. A table of 256 bytes fits four registers, so a byte
// takes few instructions. A table of 256 floats takes 16 registers and is slower.
struct BytePlanes {
  alignas(64) uint8_t byte[4][256];
};
template <bool Signed>
constexpr BytePlanes make_byte_planes() {
  BytePlanes planes{};
  for (int code = 0; code < 256; ++code) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, kQuant8Map<Signed>.value[code]);
    for (int plane = 0; plane < 4; ++plane) {
      planes.byte[plane][code] = (uint8_t)(bits >> (8 * plane));
    }
  }
  return planes;
}
template <bool Signed>
inline constexpr BytePlanes kBytePlanes = make_byte_planes<Signed>();

// Returns how many codes were decoded, a multiple of 64.
__attribute__((target("avx512vbmi,avx512bw"))) inline int64_t decode_bytes(
    float* values, const uint8_t* codes, int64_t count, const BytePlanes& planes) {
  int64_t i = 0;
  for (; i + 64 <= count; i += 64) {
    const __m512i code =
        transpose_pieces(_mm512_loadu_si512(codes + i));  // interleaving undoes this
    const __mmask64 odd = _mm512_test_epi8_mask(code, _mm512_set1_epi8(64));
    const __mmask64 upper = _mm512_movepi8_mask(code);
    __m512i parts[4];
    for (int plane = 0; plane < 4; ++plane) {
      const uint8_t* table = planes.byte[plane];
      const auto quarter = [&](int at) { return _mm512_load_si512(table + 64 * at); };
      __m512i bytes = _mm512_permutexvar_epi8(code, quarter(0));
      bytes = _mm512_mask_permutexvar_epi8(bytes, odd & ~upper, code, quarter(1));
      bytes = _mm512_mask_permutexvar_epi8(bytes, upper & ~odd, code, quarter(2));
      parts[plane] = _mm512_mask_permutexvar_epi8(bytes, upper & odd, code, quarter(3));
    }
    const __m512i low[] = {_mm512_unpacklo_epi8(parts[0], parts[1]),
                           _mm512_unpackhi_epi8(parts[0], parts[1])};
    const __m512i high[] = {_mm512_unpacklo_epi8(parts[2], parts[3]),
                            _mm512_unpackhi_epi8(parts[2], parts[3])};
    for (int half = 0; half < 2; ++half) {
      float* to = values + i + 32 * half;
      _mm512_storeu_si512(to, _mm512_unpacklo_epi16(low[half], high[half]));
      _mm512_storeu_si512(to + 16, _mm512_unpackhi_epi16(low[half], high[half]));
    }
  }
  return i;
}
inline const bool has_byte_look_ups = __builtin_cpu_supports("avx512vbmi");
#endif

// Maps codes to values.
template <bool Signed>
class Values {
 public:
  F32 operator[](U32 code) const {
#if defined(TW_BY_ARITHMETIC)
    return (F32)decode_((__m256i)code);
#elif defined(__AVX512F__)
    // Faster than look-ups in memory: the table fits half of the registers.
    const __m512i at = (__m512i)code;
    __m512 candidates[8];
    for (int i = 0; i < 8; ++i) {
      candidates[i] = _mm512_permutex2var_ps(_mm512_loadu_ps(table_ + 32 * i), at,
                                             _mm512_loadu_ps(table_ + 32 * i + 16));
    }
    for (int bit = 32, left = 4; left > 0; bit *= 2, left /= 2) {
      const __mmask16 upper = _mm512_test_epi32_mask(at, _mm512_set1_epi32(bit));
      for (int i = 0; i < left; ++i) {
        candidates[i] = _mm512_mask_blend_ps(upper, candidates[2 * i], candidates[2 * i + 1]);
      }
    }
    return (F32)candidates[0];
#else
    return (F32)look_up((const uint32_t*)table_, code);
#endif
  }

 private:
#if defined(TW_BY_ARITHMETIC)
  DecodeByDecades<Signed> decode_;
#else
  static constexpr const float* table_ = kQuant8Map<Signed>.value;
#endif
};

// The values of a block's codes. `values` has room for whole vectors.
inline void decode_block(float* values, const uint8_t* codes, int64_t count, bool is_signed) {
  int64_t done = 0;
#if defined(__AVX512F__)
  if (has_byte_look_ups) {
    const BytePlanes& planes = is_signed ? kBytePlanes<true> : kBytePlanes<false>;
    done = decode_bytes(values, codes, count, planes);
  }
#endif
  const auto decode_rest = [&](auto of) {
    for_vectors<float>(count - done, [&](int64_t i, auto place) {
      store(values + done + i, of[load_codes(codes + done + i, place)]);
    });
  };
  is_signed ? decode_rest(Values<true>{}) : decode_rest(Values<false>{});
  // Prefetches two blocks ahead, as read() does.
  for (int64_t i = 0; i < count; i += 64) __builtin_prefetch(codes + 2 * kQuantBlock + i);
}

// --- From floats to codes -----------------------------------------------------------------------

// The codes of four vectors. Stores negative numbers as 0.
#if defined(TW_BY_ARITHMETIC)
inline void store_codes(uint8_t* codes, U32 a, U32 b, U32 c, U32 d) {
  const __m256i words[] = {_mm256_packus_epi32((__m256i)a, (__m256i)b),
                           _mm256_packus_epi32((__m256i)c, (__m256i)d)};
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_packus_epi16(words[0], words[1]);
  _mm256_storeu_si256((__m256i*)codes, _mm256_permutevar8x32_epi32(bytes, order));
}
#elif defined(__AVX512F__)
inline void store_codes(uint8_t* codes, U32 a, U32 b, U32 c, U32 d) {
  const __m512i words[] = {_mm512_packus_epi32((__m512i)a, (__m512i)b),
                           _mm512_packus_epi32((__m512i)c, (__m512i)d)};
  _mm512_storeu_si512(codes, transpose_pieces(_mm512_packus_epi16(words[0], words[1])));
}
#endif
// Stores negative numbers as 0.
inline void store_codes(uint8_t* codes, U32 wide, Whole) {
#if defined(__AVX512F__)
  const __m512i code = _mm512_max_epi32((__m512i)wide, _mm512_setzero_si512());
  _mm_storeu_si128((__m128i*)codes, _mm512_cvtepi32_epi8(code));
#elif defined(__AVX2__)
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)wide),
                                         _mm256_extracti128_si256((__m256i)wide, 1));
  _mm_storel_epi64((__m128i*)codes, _mm_packus_epi16(words, words));
#elif defined(__aarch64__)
  const uint16x4_t words = vqmovun_s32((int32x4_t)wide);
  const uint8x8_t bytes = vqmovn_u16(vcombine_u16(words, words));
  std::memcpy(codes, &bytes, kLanes<float>);
#else
  for (int64_t i = 0; i < kLanes<float>; ++i) codes[i] = (uint8_t)wide[i];
#endif
}
inline void store_codes(uint8_t* codes, U32 wide, Part part) {
  uint8_t lanes[kLanes<float>];
  store_codes(lanes, wide, Whole{});
  store_part(codes, lanes, part);
}

// The codes of the fractions value / divisor.
template <bool Signed>
inline U32 encode_by_place(F32 value, F32 divisor) {
  const F32 fraction = value / divisor;
  const U32 number = quant8_number<Signed>(
      (U32)fraction, [](U32 run) { return look_up(kQuant8Map<Signed>.place, run); });
  return quant8_code<Signed>((U32)fraction, number);
}

// A divisor of values and its finite inverse.
struct Divisor {
  F32 divisor, inverse;
};

// Maps fractions to codes. Construct it before a loop.
#if defined(__AVX512F__)
// Encodes without a look-up in memory and without a division. Between the first thresholds of two
// adjacent decades the nearest values belong to one decade. They are evenly spaced, so the
// number is a linear function there. Multiplying by the inverse is off by an ulp or two. Values
// within kUlps of a region's begin, or within 1 / kUnits of a rounding boundary, are therefore
// encoded exactly.
template <bool Signed>
struct Regions {
  static constexpr int kUnitBits = 12, kUnits = 1 << kUnitBits;
  static constexpr int kUlps = 8;
  // Indexed by a float's binade, the last five bits of its exponent: the region at the binade's
  // begin, and the float kUlps before the next region begins in it. Floats below 2^-31 are treated
  // as 2^-31.
  uint32_t region[32];
  uint32_t before_next[32];  // as bits, which sort like positive floats
  // Indexed by region: 0 for the number 0, 1 to 7 for the decades, 8 for the number kTop. Entries
  // are in units plus one. With that offset, only the last of the bits below kUnits can be set if
  // the number is within one unit of an integer.
  float slope[16], offset[16], upper[16];
};

template <bool Signed>
constexpr Regions<Signed> make_regions() {
  constexpr const auto& map = kQuant8Map<Signed>;
  Regions<Signed> r{};
  float begin[10] = {};  // where each region begins; the last has no end
  double power = 1e-6;
  int first = 1;
  r.offset[0] = r.upper[0] = 0.5f;
  for (int decade = 0; decade < 7; ++decade, power *= 10) {
    const int parts = 1 << (Signed ? decade : decade + 1);
    begin[decade + 1] = map.threshold[first - 1];
    r.slope[decade + 1] = (float)(parts / (0.9 * power));
    r.offset[decade + 1] = (float)(first - parts / 9.0);
    first += parts;
    r.upper[decade + 1] = (float)first - 0.5f;
  }
  begin[8] = map.threshold[first - 1];
  r.offset[8] = r.upper[8] = (float)first + 0.5f;
  begin[9] = 2;
  for (int binade = 0, region = 0; binade < 32; ++binade) {
    const float low = __builtin_bit_cast(float, (uint32_t)(96 + binade) << 23);
    while (begin[region + 1] <= low) ++region;
    r.region[binade] = (uint32_t)region;
    r.before_next[binade] = __builtin_bit_cast(uint32_t, begin[region + 1]) - r.kUlps;
  }
  for (int region = 0; region < 9; ++region) {
    r.slope[region] *= r.kUnits;
    r.offset[region] = r.offset[region] * r.kUnits + 1;
    r.upper[region] = r.upper[region] * r.kUnits + 1;
  }
  return r;
}
template <bool Signed>
inline constexpr Regions<Signed> kRegions = make_regions<Signed>();

template <bool Signed>
class Encoder {
 public:
  // The map lacks -1. Its code here is -1, which is stored as 0, the code of its neighbour.
  U32 operator()(F32 value, const Divisor& by) const {
    const __m512 fraction = (__m512)(value * by.inverse);
    // The smaller of the two magnitudes; 1 for NaN.
    const __m512 least = _mm512_range_ps(fraction, _mm512_set1_ps(1), 0b1010);
    const __m512 x = _mm512_max_ps(least, _mm512_set1_ps(0x1p-31f));
    const __m512i binade = _mm512_srli_epi32((__m512i)x, 23);
    const __m512i past =
        _mm512_sub_epi32((__m512i)x, _mm512_permutex2var_epi32(next_[0], binade, next_[1]));
    const __m512i ulps = _mm512_set1_epi32(Table::kUlps);
    const __mmask16 beyond = _mm512_cmpge_epi32_mask(past, ulps);
    const __mmask16 at_begin = _mm512_testn_epi32_mask(past, _mm512_set1_epi32(-2 * Table::kUlps));
    __m512i region = _mm512_permutex2var_epi32(region_[0], binade, region_[1]);
    region = _mm512_mask_add_epi32(region, beyond, region, _mm512_set1_epi32(1));
    const __m512 line = _mm512_fmadd_ps(x, _mm512_permutexvar_ps(region, slope_),
                                        _mm512_permutexvar_ps(region, offset_));
    const __m512i place =
        _mm512_cvttps_epi32(_mm512_min_ps(line, _mm512_permutexvar_ps(region, upper_)));
    const __mmask16 close = _mm512_testn_epi32_mask(place, _mm512_set1_epi32(Table::kUnits - 2));
    if (__builtin_expect(!_kortestz_mask16_u8(close, at_begin), false)) {
      return encode_by_place<Signed>(value, by.divisor);
    }
    const __m512i number = _mm512_srli_epi32(place, Table::kUnitBits);
    if constexpr (!Signed) return (U32)number;
    const __mmask16 negative = _mm512_movepi32_mask((__m512i)fraction);
    const __m512i zero = _mm512_set1_epi32(127);
    return (U32)_mm512_mask_sub_epi32(_mm512_add_epi32(zero, number), negative, zero, number);
  }

 private:
  static __m512 floats(const float* p) { return _mm512_loadu_ps(p); }
  static __m512i words(const uint32_t* p) { return _mm512_loadu_si512(p); }
  using Table = Regions<Signed>;
  static constexpr const Table& r = kRegions<Signed>;
  __m512i region_[2] = {words(r.region), words(r.region + 16)};
  __m512i next_[2] = {words(r.before_next), words(r.before_next + 16)};
  __m512 slope_ = floats(r.slope), offset_ = floats(r.offset), upper_ = floats(r.upper);
};
#else
template <bool Signed>
struct Encoder {
  U32 operator()(F32 value, const Divisor& by) const {
#if defined(TW_BY_ARITHMETIC)
    bool is_sure;
    const __m256i code = encode_((__m256)(value * by.inverse), is_sure);
    if (__builtin_expect(is_sure, true)) return (U32)code;
#endif
    return encode_by_place<Signed>(value, by.divisor);
  }
#if defined(TW_BY_ARITHMETIC)
  EncodeBySpans<Signed> encode_;
#endif
};
#endif

// The magnitude's bits. As integers they keep the order of magnitudes, and NaN is the largest.
inline U32 magnitude_bits(F32 v) { return (U32)v & ~kSignBit; }

// The largest magnitude among the vectors added to it.
class Largest {
 public:
  void add(F32 v) {
    const U32 bits = magnitude_bits(v);
    most_ = bits > most_ ? bits : most_;
  }
  float value() const {
#if defined(__AVX512F__)
    const uint32_t largest = _mm512_reduce_max_epu32((__m512i)most_);
#else
    uint32_t lane[kLanes<float>], largest = 0;
    std::memcpy(lane, &most_, sizeof lane);
    for (uint32_t bits : lane) largest = bits > largest ? bits : largest;
#endif
    float value;
    std::memcpy(&value, &largest, sizeof value);
    return value;
  }

 private:
  U32 most_ = {};
};

// The code, or the smallest positive one if `KeepsPositive` and a positive value would become zero:
// steps divide by the root of a second moment.
template <bool KeepsPositive>
inline U32 keep_positive(U32 code, F32 value) {
  if constexpr (!KeepsPositive) return code;
#if defined(__AVX512F__)
  const __mmask16 positive = _mm512_cmp_ps_mask((__m512)value, _mm512_setzero_ps(), _CMP_GT_OQ);
  return (U32)_mm512_mask_max_epu32((__m512i)code, positive, (__m512i)code, _mm512_set1_epi32(1));
#elif defined(TW_BY_ARITHMETIC)
  const __m256 positive = _mm256_cmp_ps((__m256)value, _mm256_setzero_ps(), _CMP_GT_OQ);
  return (U32)_mm256_max_epi32((__m256i)code, _mm256_srli_epi32((__m256i)positive, 31));
#else
  return (code == 0) & (value > 0) ? U32{} + 1u : code;
#endif
}

// The codes of values. divisor(i) is the divisor of the values from i on.
template <bool Signed, bool KeepsPositive, class DivisorAt>
inline void encode_values(uint8_t* codes, const float* values, int64_t count, DivisorAt&& divisor) {
  const Encoder<Signed> encode;
  const auto code = [&](int64_t i, auto place) {
    const F32 value = load(values + i, place);
    return keep_positive<KeepsPositive>(encode(value, divisor(i)), value);
  };
  int64_t done = 0;
#if defined(__AVX2__)
  constexpr int64_t kLane = kLanes<float>;
  for (; done + 4 * kLane <= count; done += 4 * kLane) {
    const auto vector = [&](int at) { return code(done + kLane * at, Whole{}); };
    store_codes(codes + done, vector(0), vector(1), vector(2), vector(3));
  }
#endif
  for_vectors<float>(count - done, [&](int64_t i, auto place) {
    store_codes(codes + done + i, code(done + i, place), place);
  });
}

// The divisor of a block's values. If its inverse would be infinite, this scales both the values
// and the divisor by a power of two, which keeps the fractions.
inline float make_divisor(float* values, int64_t count, float absmax) {
  const float divisor = quant_divisor(absmax);
  if (__builtin_expect(divisor >= 0x1p-126f, true)) return divisor;
  constexpr float kExact = 0x1p64f;
  for (int64_t i = 0; i < count; ++i) values[i] *= kExact;
  return divisor * kExact;
}

// The codes of a block from its values and its absmax. May change the values.
template <bool Signed, bool KeepsPositive = false>
inline void encode_block(uint8_t* codes, float* values, int64_t count, float absmax) {
  const float number = make_divisor(values, count, absmax);
  const Divisor divisor{splat(number), splat(1 / number)};
  encode_values<Signed, KeepsPositive>(codes, values, count, [&](int64_t) { return divisor; });
}

// --- Narrow rows --------------------------------------------------------------------------------

// A block that is a short row takes longer to set up than to process. So adjacent short rows, up to
// a full block of elements, are processed together, and each lane uses its own row's absmax.
constexpr int64_t kNarrow = 64;  // from this width on, one row at a time is as fast or faster
inline int64_t rows_at_once(int64_t width) { return width < kNarrow ? kQuantBlock / width : 1; }

// Room for a block's elements and one vector past the last.
struct alignas(kVectorBytes) BlockRoom {
  float at[kQuantBlock + kLanes<float>];
};

// Writes number(row) for each element of the row.
template <class Number>
inline void spread_rows(BlockRoom& to, int64_t rows, int64_t width, Number&& number) {
  float* p = to.at;
  for (int64_t row = 0; row < rows; ++row, p += width) {
    const F32 value = splat(number(row));  // the next row overwrites the excess
    for (int64_t i = 0; i < width; i += kLanes<float>) store(p + i, value);
  }
}

inline void measure_rows(float* absmax, const BlockRoom& values, int64_t rows, int64_t width) {
  if (width >= kLanes<float>) {
    const float* p = values.at;
    for (int64_t row = 0; row < rows; ++row, p += width) {
      Largest largest;
      for_vectors<float>(width, [&](int64_t i, auto place) { largest.add(load(p + i, place)); });
      absmax[row] = largest.value();
    }
    return;
  }
  // Each element holds the maximum over a window that starts at it. Every round up to doubles the
  // window, until it spans a row.
  BlockRoom largest;
  const auto for_all = [&](auto&& most) {
    for (int64_t i = 0; i < rows * width; i += kLanes<float>) store(largest.at + i, (F32)most(i));
  };
  for_all([&](int64_t i) { return magnitude_bits(load(values.at + i)); });
  for (int64_t have = 1; have < width;) {
    const int64_t more = have < width - have ? have : width - have;
    for_all([&](int64_t i) {
      const U32 here = (U32)load(largest.at + i), next = (U32)load(largest.at + i + more);
      return here > next ? here : next;
    });
    have += more;
  }
  for (int64_t row = 0; row < rows; ++row) absmax[row] = largest.at[row * width];
}

// Multiplies the values of each row by its absmax.
inline void scale_rows(BlockRoom& values, const float* absmax, int64_t rows, int64_t width) {
  BlockRoom scales;
  spread_rows(scales, rows, width, [&](int64_t row) { return absmax[row]; });
  for (int64_t i = 0; i < rows * width; i += kLanes<float>) {
    store(values.at + i, load(values.at + i) * load(scales.at + i));
  }
}

template <bool Signed, bool KeepsPositive = false>
inline void encode_rows(uint8_t* codes, BlockRoom& values, const float* absmax, int64_t rows,
                        int64_t width) {
  BlockRoom divisors;
  spread_rows(divisors, rows, width, [&](int64_t row) {
    return make_divisor(values.at + row * width, width, absmax[row]);
  });
  encode_values<Signed, KeepsPositive>(codes, values.at, rows * width, [&](int64_t i) {
    const F32 divisor = load(divisors.at + i);
    return Divisor{divisor, 1 / divisor};
  });
}

TW_NAMESPACE_END
