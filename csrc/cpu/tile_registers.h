// Products of bfloat16 matrices in the tile registers of AMX, which do 16 times the work of an AVX-512
// multiplication in a cycle.
#pragma once

#include "core/exp.h"
#include "cpu/vec.h"

#if defined(__AVX512F__) && defined(__linux__)
#define TW_TILE_REGISTERS
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

TW_NAMESPACE_BEGIN

#define TW_TILES __attribute__((target("amx-tile,amx-bf16,avx512bf16")))

namespace detail {

// A tile register has 16 rows of 64 bytes: 16 floats, or 32 bfloat16.
constexpr int64_t kTileLines = 16, kTileInner = 32;

// Whether the processor has them and the kernel lets this process use them.
inline bool may_use_tiles() {
  unsigned a, b, c, d, kept_low, kept_high;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if (!(d >> 22 & 1) || !(d >> 24 & 1)) return false;  // AMX-BF16, AMX-TILE
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return false;  // AVX512-BF16
  __asm__("xgetbv" : "=a"(kept_low), "=d"(kept_high) : "c"(0));
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return (kept_low >> 17 & 3) == 3 && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
inline const bool has_tiles = may_use_tiles();

// C[16 * down][16 * across] = A B, or C += A B. A has rows of bfloat16, B pairs of rows: element
// [pair][lane] holds B[2 * pair][lane] and B[2 * pair + 1][lane].
template <bool add, int down, int across>
TW_TILES inline void tile_product(float* c, int64_t ldc, const BFloat16* a, int64_t lda,
                                  const uint32_t* b, int64_t ldb, int64_t inner) {
  constexpr int64_t kLines = kTileLines;
  const int64_t c_bytes = ldc * 4, a_bytes = lda * 2, b_bytes = ldb * 4;
  if constexpr (add) {
    _tile_loadd(0, c, c_bytes);
    if constexpr (across > 1) _tile_loadd(1, c + kLines, c_bytes);
    if constexpr (down > 1) _tile_loadd(2, c + kLines * ldc, c_bytes);
    if constexpr (down > 1 && across > 1) _tile_loadd(3, c + kLines * ldc + kLines, c_bytes);
  } else {
    _tile_zero(0);
    if constexpr (across > 1) _tile_zero(1);
    if constexpr (down > 1) _tile_zero(2);
    if constexpr (down > 1 && across > 1) _tile_zero(3);
  }
  for (int64_t x = 0; x < inner; x += kTileInner) {
    const uint32_t* right = b + x / 2 * ldb;
    _tile_loadd(4, a + x, a_bytes);
    _tile_loadd(6, right, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (across > 1) {
      _tile_loadd(7, right + kLines, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (down > 1) {
      _tile_loadd(5, a + kLines * lda + x, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (across > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_bytes);
  if constexpr (across > 1) _tile_stored(1, c + kLines, c_bytes);
  if constexpr (down > 1) _tile_stored(2, c + kLines * ldc, c_bytes);
  if constexpr (down > 1 && across > 1) _tile_stored(3, c + kLines * ldc + kLines, c_bytes);
}

// The same for `rows` and `lanes` that are multiples of 16, and `inner` of 32.
template <bool add>
TW_TILES inline void tile_products(float* c, int64_t ldc, const BFloat16* a, int64_t lda,
                                   const uint32_t* b, int64_t ldb, int64_t rows, int64_t lanes,
                                   int64_t inner) {
  constexpr int64_t kPair = 2 * kTileLines;
  // gcc 12's intrinsics do not say that they read memory.
  __asm__ volatile("" ::: "memory");
  for (int64_t i = 0; i < lanes; i += kPair) {
    for (int64_t r = 0; r < rows; r += kPair) {
      float* to = c + r * ldc + i;
      const bool low = r + kTileLines < rows, wide = i + kTileLines < lanes;
      const auto product = low ? (wide ? tile_product<add, 2, 2> : tile_product<add, 2, 1>)
                               : (wide ? tile_product<add, 1, 2> : tile_product<add, 1, 1>);
      product(to, ldc, a + r * lda, lda, b + i, ldb, inner);
    }
  }
}

// Rounds two vectors to bfloat16, as the low and the high halves of each lane.
TW_TILES inline __m512i pair_of(__m512 low, __m512 high) {
  alignas(64) static constexpr uint16_t kInTurn[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                       21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                       11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
  return _mm512_permutexvar_epi16(_mm512_load_si512(kInTurn), both);
}

// Pairs of rows: to[row / 2][lane] for an even number of rows; rows from `count` on are zero.
// `to` may be `from`.
TW_TILES inline void pair_rows(uint32_t* to, const float* from, int64_t lanes, int64_t count,
                               int64_t rows) {
  for (int64_t r = 0; r < rows; r += 2) {
    for (int64_t i = 0; i < lanes; i += kTileLines) {
      const float* at = from + r * lanes + i;
      const __m512 low = r < count ? _mm512_loadu_ps(at) : __m512{};
      const __m512 high = r + 1 < count ? _mm512_loadu_ps(at + lanes) : __m512{};
      _mm512_storeu_si512(to + r / 2 * lanes + i, pair_of(low, high));
    }
  }
}

// 2^t for t <= 126, with a relative error below 2^-22; 0 for t < -126. The polynomial is minimax.
inline __m512 power_of_two(__m512 t) {
  // Adding kMagic rounds to an integer n, and leaves n + 127 in the low bits of the sum.
  constexpr float kMagic = 0x1.8p23f + 127;
  constexpr float kTerms[] = {0.00132764718f, 0.00967554189f, 0.0555071346f,
                              0.240221202f,   0.693146944f,   1.00000012f};
  const __m512 shifted = t + kMagic, fraction = t - (shifted - kMagic);
  __m512 sum = _mm512_set1_ps(kTerms[0]);
  for (int i = 1; i < 6; ++i) sum = sum * fraction + kTerms[i];
  const __m512 power = (__m512)_mm512_slli_epi32((__m512i)shifted, 23);
  const __mmask16 normal = _mm512_cmp_ps_mask(t, _mm512_set1_ps(-126), _CMP_NLT_UQ);  // or NaN
  return _mm512_maskz_mul_ps(normal, sum, power);
}

// Configures the registers of this thread: all eight have their full size.
class TileRegisters {
 public:
  TW_TILES TileRegisters() {
    struct alignas(64) Config {
      uint8_t palette, start, reserved[14];
      uint16_t bytes[16];
      uint8_t lines[16];
    };
    static constexpr Config kWhole{
        1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&kWhole);
  }
  TW_TILES ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

}  // namespace detail

TW_NAMESPACE_END

#endif
