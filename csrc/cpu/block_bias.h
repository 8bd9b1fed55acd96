// Biases that attention adds to a tile of scores: one per pair of tokens, or one per distance.
//
// A bias by distance is a vector of numbers. Tokens lie in rows of `bias_row` on a plane, and with
// place(token) = row * (2 * bias_row - 1) + column the difference of two places numbers their
// distance. On a line, where one row has all tokens, a token's place is its number. So the biases
// of a row of a tile are adjacent, in rising or falling order.
#pragma once

#include "core/block_sparse.h"
#include "cpu/tiles.h"

TW_NAMESPACE_BEGIN

constexpr int64_t kTile = 64;

template <class A>
constexpr A kExcluded = -__builtin_inff();

// A range of tokens.
struct Span {
  int64_t first, count;
};

// A part of a block. Either its keys or its queries are in the lanes; the others are the rows.
struct Tile {
  Span lane, row;
  const int32_t* bits;  // the block's mask, or null
};

namespace detail {

template <class A>
inline Vec<A> reversed(Vec<A> v) {
#if !defined(__clang__)
  Bits<A> index;
  for (int64_t i = 0; i < kLanes<A>; ++i) index[i] = kLanes<A> - 1 - i;
  return __builtin_shuffle(v, index);
#else
  Vec<A> turned;
  for (int64_t i = 0; i < kLanes<A>; ++i) turned[i] = v[kLanes<A> - 1 - i];
  return turned;
#endif
}

}  // namespace detail

// The places of tokens for a bias by distance.
class Places {
 public:
  explicit Places(const BlockSparse& a)
      : a_(a),
        line_(a.bias_row == 0 || a.bias_row >= a.keys),
        zero_(line_ ? a.queries - 1 : of(a.keys - 1)) {}

  bool line() const { return line_; }

  // The number of the distance from a query to a key.
  int64_t distance(int64_t query, int64_t key) const {
    if (line_) return key - query + zero_;
    return of(key) - of(query + a_.keys - a_.queries) + zero_;
  }

 private:
  int64_t of(int64_t token) const { return token + token / a_.bias_row * (a_.bias_row - 1); }

  const BlockSparse& a_;
  const bool line_;
  const int64_t zero_;
};

template <class T, bool keys_in_lanes>
class Bias {
  using A = Accumulate<T>;

 public:
  Bias(const BlockSparse& a, int64_t batch, int64_t head) : a_(a), places_(a) {
    if (a.bias_row) {
      by_distance_ = (const A*)a.bias + head * a.bias_head;
    } else {
      by_pair_ = (const T*)a.bias + batch * a.bias_batch + head * a.bias_head;
    }
  }

  // Adds the bias to the scores of a tile; `scratch` has room for a tile.
  void add(A* z, A* scratch, int64_t lanes, const Tile& tile) const {
    if (!a_.bias_row) {
      add_by_pair(z, scratch, lanes, tile);
    } else if (places_.line()) {
      add_on_line(z, lanes, tile);
    } else {
      for (int64_t r = 0; r < tile.row.count; ++r) {
        for (int64_t i = 0; i < tile.lane.count; ++i) {
          z[r * lanes + i] += by_distance_[distance(tile, r, i)];
        }
      }
    }
  }

 private:
  int64_t distance(const Tile& tile, int64_t r, int64_t i) const {
    const int64_t row = tile.row.first + r, lane = tile.lane.first + i;
    return keys_in_lanes ? places_.distance(row, lane) : places_.distance(lane, row);
  }

  void add_by_pair(A* z, A* scratch, int64_t lanes, const Tile& tile) const {
    if constexpr (keys_in_lanes) {
      for (int64_t r = 0; r < tile.row.count; ++r) {
        const T* from = by_pair_ + (tile.row.first + r) * a_.bias_query + tile.lane.first;
        for_vectors<A>(tile.lane.count, [&](int64_t i, auto at) {
          store(z + r * lanes + i, load(z + r * lanes + i) + load(from + i, at));
        });
      }
    } else {
      const T* from = by_pair_ + tile.lane.first * a_.bias_query + tile.row.first;
      lanes_from_rows(scratch, lanes, from, a_.bias_query, tile.lane.count, tile.row.count, (A)1);
      for (int64_t i = 0; i < lanes * tile.row.count; i += kLanes<A>) {
        store(z + i, load(z + i) + load(scratch + i));
      }
    }
  }

  void add_on_line(A* z, int64_t lanes, const Tile& tile) const {
    for (int64_t r = 0; r < tile.row.count; ++r) {
      const A* from = by_distance_ + distance(tile, r, 0);
      A* to = z + r * lanes;
      if constexpr (keys_in_lanes) {
        for_vectors<A>(tile.lane.count, [&](int64_t i, auto at) {
          store(to + i, load(to + i) + load(from + i, at));
        });
      } else {
        int64_t i = 0;
        for (; i + kLanes<A> <= tile.lane.count; i += kLanes<A>) {
          const Vec<A> falling = load(from - i - (kLanes<A> - 1));
          store(to + i, load(to + i) + detail::reversed<A>(falling));
        }
        for (; i < tile.lane.count; ++i) to[i] += from[-i];
      }
    }
  }

  const BlockSparse& a_;
  const Places places_;
  const A* by_distance_ = nullptr;
  const T* by_pair_ = nullptr;
};

// Adds the gradients of a tile's scores, with queries in the lanes, to the gradients of the bias.
template <class A>
class BiasGradient {
 public:
  // `sums` is a vector of distances, or the head's queries x keys.
  BiasGradient(const BlockSparse& a, A* sums) : a_(a), places_(a), sums_(sums) {}

  void add(const A* g, A* scratch, int64_t lanes, const Tile& tile) const {
    if (!a_.bias_row) {
      add_by_pair(g, scratch, lanes, tile);
    } else if (places_.line()) {
      add_on_line(g, lanes, tile);
    } else {
      for (int64_t r = 0; r < tile.row.count; ++r) {
        for (int64_t i = 0; i < tile.lane.count; ++i) {
          sums_[places_.distance(tile.lane.first + i, tile.row.first + r)] += g[r * lanes + i];
        }
      }
    }
  }

 private:
  void add_by_pair(const A* g, A* scratch, int64_t lanes, const Tile& tile) const {
    A one[kTile];
    std::fill_n(one, kTile, (A)1);
    rows_from_lanes(scratch, kTile, g, lanes, tile.lane.count, tile.row.count, (const A*)one);
    for (int64_t i = 0; i < tile.lane.count; ++i) {
      A* to = sums_ + (tile.lane.first + i) * a_.keys + tile.row.first;
      for_vectors<A>(tile.row.count, [&](int64_t r, auto at) {
        store(to + r, load(to + r, at) + load(scratch + i * kTile + r, at), at);
      });
    }
  }

  // Adds up diagonals first. Diagonal number kTile - 1 begins at the tile's first pair.
  void add_on_line(const A* g, int64_t lanes, const Tile& tile) const {
    A diagonals[2 * kTile] = {};
    for (int64_t r = 0; r < tile.row.count; ++r) {
      A* to = diagonals + kTile - 1 - r;
      for (int64_t i = 0; i < lanes; i += kLanes<A>) {
        store(to + i, load(to + i) + load(g + r * lanes + i));
      }
    }
    A* first = sums_ + places_.distance(tile.lane.first, tile.row.first);
    for (int64_t n = kTile - tile.row.count; n < kTile - 1 + tile.lane.count; ++n) {
      first[kTile - 1 - n] += diagonals[n];
    }
  }

  const BlockSparse& a_;
  const Places places_;
  A* sums_;
};

TW_NAMESPACE_END
