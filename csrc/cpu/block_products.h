// The products of attention's tiles. A work item keeps one side of its tiles transposed, with its
// tokens in vector lanes; the rows of the other side are read tile by tile. There are two products:
//
//   scores[row][lane] = scale * sum over x of rows[row][x] * side[x][lane]
//   sums[x][lane] += sum over rows of rows[row][x] * weights[row][lane]
//
// WideProducts multiplies accumulators. TileProducts multiplies bfloat16 in the tile registers of
// AMX, which do 16 times the work of an AVX-512 multiplication in a cycle; weights are rounded to
// bfloat16 for it, as on a GPU.
#pragma once

#include <type_traits>

#include "cpu/block_scores.h"
#include "cpu/scratch.h"
#include "cpu/tiles.h"

#if defined(__AVX512F__) && defined(__linux__)
#define TW_TILE_REGISTERS
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

TW_NAMESPACE_BEGIN

// The next multiple of `step`.
inline int64_t padded_to(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

template <class T>
class WideProducts {
 public:
  using A = Accumulate<T>;
  struct Rows {
    const A* data;
    int64_t count, width;
  };

  WideProducts(int64_t, int64_t) {}

  // The side's tokens, with `scale` multiplied in.
  static void turn_side(A* side, int64_t lanes, const T* from, int64_t pitch, int64_t count,
                        int64_t width, A scale) {
    lanes_from_rows(side, lanes, from, pitch, count, width, scale);
  }

  // `scratch` has room for a tile.
  static Rows rows(const Heads& x, int64_t batch, int64_t head, Span span, int64_t width,
                   A* scratch) {
    return {rows_of<T>(x, batch, head, span, width, scratch), span.count, width};
  }

  static void set_scores(A* z, int64_t lanes, const Rows& rows, const A* side, A) {
    multiply<Into::set, false>(z, lanes, rows.data, rows.width, side, lanes, rows.count, lanes,
                               rows.width);
  }

  template <Into into>
  static void add(A* sums, int64_t lanes, const Rows& rows, const A* weights,
                  const A* factors = nullptr) {
    multiply<into, true>(sums, lanes, rows.data, rows.width, weights, lanes, rows.width, lanes,
                         rows.count, factors);
  }
};

#if defined(TW_TILE_REGISTERS)

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
  const __m512i first = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(low));
  const __m512i second = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(high));
  return _mm512_or_si512(first, _mm512_slli_epi32(second, 16));
}

// Pairs of rows: to[row / 2][lane] for an even number of rows; rows from `count` on are zero.
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

class TileProducts {
 public:
  using A = float;
  struct Rows {
    const BFloat16* data;  // up to a multiple of 32 rows, with zeros in those past `count`
    int64_t count, width;

    int64_t padded() const { return padded_count(count); }
  };

  static bool serves(const BlockSparse& a) {
    return detail::has_tiles && a.width > 0 && a.value_width > 0 &&
           a.width % detail::kTileInner == 0 && a.value_width % detail::kTileInner == 0;
  }

  TileProducts(int64_t width, int64_t lanes)
      : turned_(kTile * width / 2), pairs_(kTile / 2 * lanes) {}

  // As pairs of rows; set_scores multiplies by the scale, so that the tokens keep their bits.
  static void turn_side(A* side, int64_t lanes, const BFloat16* from, int64_t pitch, int64_t count,
                        int64_t width, A) {
    for (int64_t i = 0; i < lanes; i += kLanes<A>) {
      for (int64_t x = 0; x < width; x += 2 * kLanes<A>) {
        Vec<A> tile[kLanes<A>] = {};
        for (int64_t k = 0; k < kLanes<A> && i + k < count; ++k) {
          std::memcpy(&tile[k], from + (i + k) * pitch + x, sizeof tile[k]);
        }
        detail::transpose_tile<A>(tile);
        for (int64_t k = 0; k < kLanes<A>; ++k) store(side + (x / 2 + k) * lanes + i, tile[k]);
      }
    }
  }

  static Rows rows(const Heads& x, int64_t batch, int64_t head, Span span, int64_t width,
                   A* scratch) {
    const BFloat16* from = tokens<BFloat16>(x, batch, head, span.first);
    const int64_t padded = padded_count(span.count), bytes = width * sizeof(BFloat16);
    if (x.token == width && padded == span.count) return {from, span.count, width};
    BFloat16* to = (BFloat16*)scratch;
    for (int64_t r = 0; r < span.count; ++r) std::memcpy(to + r * width, from + r * x.token, bytes);
    std::memset(to + span.count * width, 0, (padded - span.count) * bytes);
    return {to, span.count, width};
  }

  static void set_scores(A* z, int64_t lanes, const Rows& rows, const A* side, A scale) {
    const int64_t count = padded_to(rows.count, detail::kTileLines);
    detail::tile_products<false>(z, lanes, rows.data, rows.width, (const uint32_t*)side, lanes,
                                 count, lanes, rows.width);
    if (scale == 1) return;
    for (int64_t i = 0; i < rows.count * lanes; i += kLanes<A>) store(z + i, load(z + i) * scale);
  }

  template <Into into>
  void add(A* sums, int64_t lanes, const Rows& rows, const A* weights, const A* factors = nullptr) {
    if constexpr (into == Into::scaled) {
      for (int64_t x = 0; x < rows.width; ++x) {
        for (int64_t i = 0; i < lanes; i += kLanes<A>) {
          store(sums + x * lanes + i, load(sums + x * lanes + i) * load(factors + i));
        }
      }
    }
    turn(rows);
    uint32_t* pairs = (uint32_t*)(A*)pairs_;
    detail::pair_rows(pairs, weights, lanes, rows.count, rows.padded());
    detail::tile_products<true>(sums, lanes, turned(), rows.padded(), pairs, lanes, rows.width,
                                lanes, rows.padded());
  }

 private:
  static int64_t padded_count(int64_t count) { return padded_to(count, detail::kTileInner); }

  BFloat16* turned() { return (BFloat16*)(A*)turned_; }

  // turned[x][row] = rows[row][x].
  void turn(const Rows& rows) {
    const int64_t width = rows.width;
    for (int64_t r = 0; r < rows.padded(); r += detail::kTileInner) {
      for (int64_t x = 0; x < width; x += kLanes<A>) {
        Vec<A> tile[kLanes<A>];  // pairs of rows
        for (int64_t k = 0; k < kLanes<A>; ++k) {
          const BFloat16* at = rows.data + (r + 2 * k) * width + x;
          tile[k] = (Vec<A>)(detail::widen(&at->bits) | detail::widen(&at[width].bits) << 16);
        }
        detail::transpose_tile<A>(tile);
        for (int64_t k = 0; k < kLanes<A>; ++k) {
          std::memcpy(turned() + (x + k) * rows.padded() + r, &tile[k], sizeof tile[k]);
        }
      }
    }
  }

  detail::TileRegisters registers_;
  Scratch<A> turned_, pairs_;
};

#endif

inline bool has_tiles() {
#if defined(TW_TILE_REGISTERS)
  return detail::has_tiles;
#else
  return false;
#endif
}

// Calls call(Products) with what serves these tensors best.
template <class T, class Call>
void with_products(const BlockSparse& a, Call&& call) {
#if defined(TW_TILE_REGISTERS)
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (TileProducts::serves(a)) return call(Type<TileProducts>{});
  }
#endif
  call(Type<WideProducts<T>>{});
}

TW_NAMESPACE_END
