// 8-bit codes by arithmetic, for processors with AVX2 only: their gathers are slow. Included by
// cpu/quant8.h.
#pragma once

#include "core/quant8.h"
#include "cpu/vec.h"

TW_NAMESPACE_BEGIN

// --- From codes to floats -----------------------------------------------------------------------

// A decade's values are midpoints of 2^k equal parts. This computes them as quant8_map() does, with
// the same roundings. `place` is 2^k plus the part's number, so that its exponent tells the decade,
// and the two tables are indexed by the exponent's last three bits.
struct Decades {
  float part[8];   // 2^-k
  float scale[8];  // half of the decade's power of ten: of a sum of two boundaries
  // A part's boundary, of [0.1, 1], is kSlope * t + kLower below 0.5, and + kUpper from there.
  static constexpr float kSlope = 1.0f - 0.1f, kLower = 0.1f, kUpper = 1.0f - kSlope;
};
template <bool Signed>
constexpr Decades make_decades() {
  constexpr float kDecade[7] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1e0f};
  Decades d{};
  for (int decade = 0; decade < 7; ++decade) {
    const int exponent = 127 + decade + !Signed;
    d.part[exponent & 7] = 1.0f / (float)(1 << (decade + !Signed));
    d.scale[exponent & 7] = kDecade[decade] * 0.5f;
  }
  // The value 1, whose place is the next power of two: t is -1, and so the sum is -1.6 or so.
  const int top = (127 + 7 + !Signed) & 7;
  const float boundary = (float)((double)Decades::kLower - (double)Decades::kSlope);
  d.part[top] = 0;
  d.scale[top] = 1 / (boundary + boundary);
  return d;
}
template <bool Signed>
inline constexpr Decades kDecades = make_decades<Signed>();

template <bool Signed>
class DecodeByDecades {
 public:
  __m256 operator()(__m256i code) const {
    const __m256i distance = Signed ? _mm256_sub_epi32(code, _mm256_set1_epi32(127)) : code;
    const __m256i number = Signed ? _mm256_abs_epi32(distance) : code;
    const __m256i at = Signed ? number : _mm256_add_epi32(number, _mm256_set1_epi32(1));
    const __m256 place = _mm256_cvtepi32_ps(at);
    const __m256i decade = _mm256_srli_epi32(_mm256_castps_si256(place), 23);
    const __m256 part = _mm256_permutevar8x32_ps(part_, decade);
    const __m256 begin = _mm256_fmsub_ps(place, part, _mm256_set1_ps(1));
    const __m256 sum = _mm256_add_ps(boundary(begin), boundary(_mm256_add_ps(begin, part)));
    __m256 value = _mm256_mul_ps(sum, _mm256_permutevar8x32_ps(scale_, decade));
    value = _mm256_andnot_ps(
        _mm256_castsi256_ps(_mm256_cmpeq_epi32(number, _mm256_setzero_si256())), value);
    if constexpr (!Signed) return value;
    const __m256 sign = _mm256_castsi256_ps(distance);
    return _mm256_or_ps(value, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
  }

 private:
  static __m256 boundary(__m256 t) {
    const __m256 upper = _mm256_cmp_ps(t, _mm256_set1_ps(0.5f), _CMP_GE_OQ);
    const __m256 offset =
        _mm256_blendv_ps(_mm256_set1_ps(Decades::kLower), _mm256_set1_ps(Decades::kUpper), upper);
    return _mm256_fmadd_ps(t, _mm256_set1_ps(Decades::kSlope), offset);
  }
  __m256 part_ = _mm256_loadu_ps(kDecades<Signed>.part);
  __m256 scale_ = _mm256_loadu_ps(kDecades<Signed>.scale);
};

// --- From floats to codes -----------------------------------------------------------------------

// As Regions in cpu/quant8.h, with eight regions: the first has the numbers 0 to 1 (signed) or 2,
// the last the number kTop, and each other one a decade's.
template <bool Signed>
struct Spans {
  static constexpr int kUnitBits = 12, kUnits = 1 << kUnitBits;
  static constexpr int kUlps = 8;
  // Indexed by a float's pair of binades, its exponent's bits 1 to 4: one more than the region at
  // the pair's begin. A pair has at most one region's begin.
  uint8_t region[16];
  uint32_t end[8];  // indexed by that entry: the bits of the float where the region ends
  float slope[8], offset[8], upper[8];  // in units, indexed by region
};
template <bool Signed>
constexpr Spans<Signed> make_spans() {
  constexpr const auto& map = kQuant8Map<Signed>;
  Spans<Signed> s{};
  float end[8] = {};
  double power = 1e-6;
  int first = 1;
  for (int decade = 0; decade < 7; ++decade, power *= 10) {
    const int parts = 1 << (Signed ? decade : decade + 1);
    double slope = parts / (0.9 * power), offset = first - parts / 9.0;
    if (decade == 0) {  // a line through the thresholds of the numbers 1 and 2
      slope = 1 / ((double)map.threshold[Signed ? 0 : 1] - (Signed ? 0 : map.threshold[0]));
      offset = 1 - slope * map.threshold[0];
    }
    first += parts;
    s.slope[decade] = (float)(slope * s.kUnits);
    s.offset[decade] = (float)(offset * s.kUnits + 1);
    s.upper[decade] = (first - 0.5f) * s.kUnits + 1;
    end[decade] = map.threshold[first - 1];
  }
  s.offset[7] = s.upper[7] = (first + 0.5f) * s.kUnits + 1;
  end[7] = 2;
  for (int region = 0; region < 8; ++region) {
    s.end[(region + 1) & 7] = __builtin_bit_cast(uint32_t, end[region]);
  }
  for (int pair = 0, region = 0; pair < 16; ++pair) {
    const float low = __builtin_bit_cast(float, (uint32_t)(96 + 2 * pair) << 23);
    while (end[region] <= low) ++region;
    s.region[pair] = (uint8_t)(region + 1);
  }
  return s;
}
template <bool Signed>
inline constexpr Spans<Signed> kSpans = make_spans<Signed>();

// The codes of values whose fractions are near no threshold; `is_sure` says whether all are.
// A magnitude of 128 with a negative sign is -1, as in Encoder.
template <bool Signed>
class EncodeBySpans {
 public:
  __m256i operator()(__m256 fraction, bool& is_sure) const {
    const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), fraction);
    const __m256 least = _mm256_min_ps(magnitude, _mm256_set1_ps(1));  // 1 for NaN
    const __m256 x = _mm256_max_ps(least, _mm256_set1_ps(0x1p-31f));
    const __m256i bits = _mm256_castps_si256(x);
    // Only the last byte counts, and of that the last three bits.
    const __m256i entry = _mm256_shuffle_epi8(region_, _mm256_srli_epi32(bits, 24));
    const __m256i past = _mm256_sub_epi32(bits, _mm256_permutevar8x32_epi32(end_, entry));
    const __m256i region = _mm256_add_epi32(entry, _mm256_srai_epi32(past, 31));
    const __m256 line = _mm256_fmadd_ps(x, _mm256_permutevar8x32_ps(slope_, region),
                                        _mm256_permutevar8x32_ps(offset_, region));
    const __m256i place =
        _mm256_cvttps_epi32(_mm256_min_ps(line, _mm256_permutevar8x32_ps(upper_, region)));
    const __m256i within = _mm256_and_si256(place, _mm256_set1_epi32(Table::kUnits - 2));
    const __m256i sure = _mm256_and_si256(
        _mm256_cmpgt_epi32(within, _mm256_setzero_si256()),
        _mm256_cmpgt_epi32(_mm256_abs_epi32(past), _mm256_set1_epi32(Table::kUlps)));
    is_sure = _mm256_movemask_ps(_mm256_castsi256_ps(sure)) == 0xff;
    const __m256i number = _mm256_srli_epi32(place, Table::kUnitBits);
    if constexpr (!Signed) return number;
    const __m256i distance = _mm256_sign_epi32(number, _mm256_castps_si256(fraction));
    return _mm256_add_epi32(distance, _mm256_set1_epi32(127));
  }

 private:
  using Table = Spans<Signed>;
  static constexpr const Table& t = kSpans<Signed>;
  __m256i region_ = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)t.region));
  __m256i end_ = _mm256_loadu_si256((const __m256i*)t.end);
  __m256 slope_ = _mm256_loadu_ps(t.slope), offset_ = _mm256_loadu_ps(t.offset);
  __m256 upper_ = _mm256_loadu_ps(t.upper);
};

TW_NAMESPACE_END
