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

#include "core/exp.h"
#include "cpu/block_scores.h"
#include "cpu/scratch.h"
#include "cpu/tile_registers.h"
#include "cpu/tiles.h"

TW_NAMESPACE_BEGIN

template <class A>
void times(A* x, const A* factors, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes<A>) store(x + i, load(x + i) * load(factors + i));
}

// The next multiple of `step`.
inline int64_t padded_to(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

// The running softmax of the lanes: y is the sum of weights exp(scale * (z - base)) times values, and
// `sum` the sum of these weights.
template <class A>
struct Softmax {
  A *base, *sum, *fade;  // `fade` is scratch
};

// The part of `x` that is a tile's rows. `shared` may have it turned.
struct TileOf {
  const Heads& x;
  const TurnedTiles& shared;
  int64_t batch, head, block;
  Span span;
  int64_t width;
};

template <class T>
class WideProducts {
 public:
  using A = Accumulate<T>;
  struct Rows {
    const A* data;
    int64_t count, width;
  };
  // Whether weight() and attend() may take a scale other than 1.
  static constexpr bool kScalesLate = false;

  WideProducts(int64_t, int64_t) {}

  // The side's tokens, with `scale` multiplied in.
  static void turn_side(A* side, int64_t lanes, const T* from, int64_t pitch, int64_t count,
                        int64_t width, A scale) {
    lanes_from_rows(side, lanes, from, pitch, count, width, scale);
  }

  // `scratch` has room for a tile.
  static Rows rows(const TileOf& tile, A* scratch) {
    const A* data = rows_of<T>(tile.x, tile.batch, tile.head, tile.span, tile.width, scratch);
    return {data, tile.span.count, tile.width};
  }

  static void set_scores(A* z, int64_t lanes, const Rows& rows, const A* side, A) {
    multiply<Into::set, false>(z, lanes, rows.data, rows.width, side, lanes, rows.count, lanes,
                               rows.width);
  }

  // exp(scale * z - lse). Large scores of another product than the forward's may round to more than
  // lse, and its error would be a factor: the weight is at most 1. NaN stays NaN.
  static Vec<A> weight(Vec<A> z, A, Vec<A> lse) {
    const Vec<A> below = z - lse;
    return exp_nonpositive(below > 0 ? Vec<A>{} : below);
  }

  static void add(A* sums, int64_t lanes, const Rows& rows, const A* weights) {
    multiply<Into::add, true>(sums, lanes, rows.data, rows.width, weights, lanes, rows.width, lanes,
                              rows.count);
  }

  // Adds the rows to y with the weights of their scores, which become these weights. `kept` has
  // dropout's factors, or is null.
  static void attend(A* y, int64_t lanes, const Rows& rows, A* z, A, const A* kept,
                     const Softmax<A>& softmax) {
    weigh(z, rows.count, lanes, softmax);
    if (kept) times(z, kept, rows.count * lanes);
    multiply<Into::scaled, true>(y, lanes, rows.data, rows.width, z, lanes, rows.width, lanes,
                                 rows.count, softmax.fade);
  }

 private:
  // Lanes that have seen no key keep a sum of zero.
  static void weigh(A* z, int64_t rows, int64_t lanes, const Softmax<A>& softmax) {
    for (int64_t i = 0; i < lanes; i += kLanes<A>) {
      const Vec<A> before = load(softmax.base + i);
      Vec<A> most[2] = {before, before};  // two shorten the dependency chain
      for (int64_t r = 0; r < rows; ++r)
        most[r & 1] = maximum<A>(load(z + r * lanes + i), most[r & 1]);
      const Vec<A> now = maximum<A>(most[0], most[1]);
      const Vec<A> base = choose<A>(now == kExcluded<A>, Vec<A>{}, now);
      const Vec<A> faded = exp_nonpositive(before - base);
      Vec<A> total[2] = {};
      for (int64_t r = 0; r < rows; ++r) {
        const Vec<A> e = exp_nonpositive(load(z + r * lanes + i) - base);
        store(z + r * lanes + i, e);
        total[r & 1] += e;
      }
      store(softmax.base + i, now);
      store(softmax.fade + i, faded);
      store(softmax.sum + i, load(softmax.sum + i) * faded + (total[0] + total[1]));
    }
  }
};

#if defined(TW_TILE_REGISTERS)

class TileProducts {
 public:
  using A = float;
  struct Rows : TileOf {
    const BFloat16* data;  // pitch is x.token
    BFloat16* scratch;     // room for a tile
  };
  static constexpr bool kScalesLate = true;

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

  static Rows rows(const TileOf& tile, A* scratch) {
    return {tile, tokens<BFloat16>(tile.x, tile.batch, tile.head, tile.span.first),
            (BFloat16*)scratch};
  }

  static void set_scores(A* z, int64_t lanes, const Rows& rows, const A* side, A scale) {
    const int64_t count = rows.span.count, width = rows.width;
    const int64_t padded = padded_to(count, detail::kTileLines);
    const BFloat16* data = rows.data;
    if (rows.x.token != width || padded != count) {  // rows at a large stride share cache sets
      for (int64_t r = 0; r < count; ++r) {
        std::memcpy(rows.scratch + r * width, data + r * rows.x.token, width * sizeof *data);
      }
      std::memset((void*)(rows.scratch + count * width), 0,
                  (padded - count) * width * sizeof *data);
      data = rows.scratch;
    }
    detail::tile_products<false>(z, lanes, data, width, (const uint32_t*)side, lanes, padded, lanes,
                                 width);
    if (scale == 1) return;
    for (int64_t i = 0; i < count * lanes; i += kLanes<A>) store(z + i, load(z + i) * scale);
  }

  static Vec<A> weight(Vec<A> z, A scale, Vec<A> lse) {
    z *= scale;
    __asm__("" : "+v"(z));  // rounded, as in lse: the difference of large numbers may be 0
    const Vec<A> below = z - lse;
    return (Vec<A>)detail::power_of_two((__m512)(below > 0 ? Vec<A>{} : below) * (A)kLog2E);
  }

  void add(A* sums, int64_t lanes, const Rows& rows, const A* weights) {
    uint32_t* pairs = (uint32_t*)(A*)pairs_;
    detail::pair_rows(pairs, weights, lanes, rows.span.count, padded_count(rows));
    add_pairs(sums, lanes, rows, pairs);
  }

  void attend(A* y, int64_t lanes, const Rows& rows, A* z, A scale, const A* kept,
              const Softmax<A>& softmax) {
    for (int64_t i = 0; i < lanes; i += kLanes<A>) {
      weigh(y, lanes, rows, z, scale, kept, softmax, i);
    }
    add_pairs(y, lanes, rows, (const uint32_t*)z);
  }

 private:
  // The base may stay below the largest score by so much: then y is scaled rarely.
  static constexpr A kSlack = 8;

  static int64_t padded_count(const Rows& rows) {
    return padded_to(rows.span.count, detail::kTileInner);
  }

  // Replaces a vector's scores by pairs of weights.
  TW_TILES static void weigh(A* y, int64_t lanes, const Rows& rows, A* z, A scale, const A* kept,
                             const Softmax<A>& softmax, int64_t i) {
    const int64_t count = rows.span.count, padded = padded_count(rows);
    const __m512 before = _mm512_loadu_ps(softmax.base + i);
    const __m512 none = _mm512_set1_ps(kExcluded<A>);
    __m512 most = none, odd = none;  // two shorten the dependency chain
    const A* at = z + i;
    for (int64_t r = 0; r + 1 < count; r += 2, at += 2 * lanes) {
      most = _mm512_max_ps(_mm512_loadu_ps(at), most);
      odd = _mm512_max_ps(_mm512_loadu_ps(at + lanes), odd);
    }
    if (count % 2) most = _mm512_max_ps(_mm512_loadu_ps(at), most);
    const __m512 now = _mm512_max_ps(most, odd), factor = _mm512_set1_ps(scale * (A)kLog2E);
    const __mmask16 moves =
        _mm512_cmp_ps_mask((now - before) * scale, _mm512_set1_ps(kSlack), _CMP_GT_OQ);
    __m512 base = before, sum = _mm512_loadu_ps(softmax.sum + i);
    if (moves) {
      base = _mm512_mask_mov_ps(before, moves, now);
      const __m512 fade = _mm512_mask_mov_ps(_mm512_set1_ps(1), moves,
                                             detail::power_of_two((before - base) * factor));
      for (int64_t x = 0; x < rows.width; ++x) {
        A* at = y + x * lanes + i;
        _mm512_storeu_ps(at, _mm512_loadu_ps(at) * fade);
      }
      sum *= fade;
      _mm512_storeu_ps(softmax.base + i, base);
    }
    base = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(base, none, _CMP_NEQ_UQ), base);
    const auto weight = [&](int64_t row) TW_TILES {
      const __m512 score = _mm512_loadu_ps(z + row * lanes + i);
      return detail::power_of_two((score - base) * factor);
    };
    const auto keep = [&](__m512 e, int64_t row) TW_TILES {
      return kept ? e * _mm512_loadu_ps(kept + row * lanes + i) : e;
    };
    __m512 odd_sum = {};
    uint32_t* pairs = (uint32_t*)z + i;
    int64_t r = 0;
    for (; r + 1 < count; r += 2, pairs += lanes) {
      const __m512 low = weight(r), high = weight(r + 1);
      sum += low, odd_sum += high;
      _mm512_storeu_si512(pairs, detail::pair_of(keep(low, r), keep(high, r + 1)));
    }
    if (r < count) {
      const __m512 low = weight(r);
      sum += low;
      _mm512_storeu_si512(pairs, detail::pair_of(keep(low, r), __m512{}));
      r += 2, pairs += lanes;
    }
    for (; r < padded; r += 2, pairs += lanes) _mm512_storeu_si512(pairs, __m512i{});
    _mm512_storeu_ps(softmax.sum + i, sum + odd_sum);
  }

  void add_pairs(A* sums, int64_t lanes, const Rows& rows, const uint32_t* pairs) {
    int64_t pitch = padded_count(rows);
    const BFloat16* data = turn(rows, pitch);
    detail::tile_products<true>(sums, lanes, data, pitch, pairs, lanes, rows.width, lanes,
                                padded_count(rows));
  }

  // The rows as [x][row]: the shared tile, or one of this item if another thread is about it.
  const BFloat16* turn(const Rows& rows, int64_t& pitch) {
    enum : uint8_t { kNone, kBegun, kDone };
    const TurnedTiles& shared = rows.shared;
    if (shared.data) {
      const int64_t tile = rows.span.first / rows.block * parts_of(rows.block) +
                           rows.span.first % rows.block / kTile;
      const int64_t at = (rows.batch * shared.heads + rows.head) * shared.tiles + tile;
      BFloat16* const kept = (BFloat16*)shared.data + at * rows.width * shared.pitch;
      uint8_t state = __atomic_load_n(shared.state + at, __ATOMIC_ACQUIRE);
      const bool is_first =
          state == kNone && __atomic_compare_exchange_n(shared.state + at, &state, kBegun, false,
                                                        __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE);
      if (is_first) {
        turn_rows(kept, shared.pitch, rows);
        __atomic_store_n(shared.state + at, kDone, __ATOMIC_RELEASE);
      }
      if (is_first || state == kDone) {
        pitch = shared.pitch;
        return kept;
      }
    }
    BFloat16* const own = (BFloat16*)(A*)turned_;
    turn_rows(own, pitch, rows);
    return own;
  }

  // to[x][row] = rows[row][x], and zeros for rows past the last.
  static void turn_rows(BFloat16* to, int64_t pitch, const Rows& rows) {
    const int64_t count = rows.span.count, padded = padded_count(rows);
    const auto row = [&](int64_t r, int64_t x) {
      return r < count ? detail::widen(&rows.data[r * rows.x.token + x].bits) : detail::U32{};
    };
    for (int64_t r = 0; r < padded; r += detail::kTileInner) {
      for (int64_t x = 0; x < rows.width; x += kLanes<A>) {
        Vec<A> tile[kLanes<A>];  // pairs of rows
        for (int64_t k = 0; k < kLanes<A>; ++k) {
          tile[k] = (Vec<A>)(row(r + 2 * k, x) | row(r + 2 * k + 1, x) << 16);
        }
        detail::transpose_tile<A>(tile);
        for (int64_t k = 0; k < kLanes<A>; ++k) {
          std::memcpy((void*)(to + (x + k) * pitch + r), &tile[k], sizeof tile[k]);
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

// The pitch of TurnedTiles, or 0 if these tensors need none.
inline int64_t turned_pitch([[maybe_unused]] const BlockSparse& a) {
#if defined(TW_TILE_REGISTERS)
  if (a.dtype == DType::bf16 && TileProducts::serves(a)) {
    return padded_to(std::min(a.block, kTile), detail::kTileInner);
  }
#endif
  return 0;
}

// Calls call(Products) with what serves these tensors best.
template <class T, class Call>
void with_products([[maybe_unused]] const BlockSparse& a, Call&& call) {
#if defined(TW_TILE_REGISTERS)
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (TileProducts::serves(a)) return call(Type<TileProducts>{});
  }
#endif
  call(Type<WideProducts<T>>{});
}

TW_NAMESPACE_END
