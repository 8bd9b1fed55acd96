// The tiles of a layout's blocks, and the scores of a tile, for the kernels of attention.
#pragma once

#include <algorithm>

#include "core/act.h"
#include "cpu/block_bias.h"
#include "cpu/dropout.h"

TW_NAMESPACE_BEGIN

template <class T>
const T* tokens(const Heads& x, int64_t batch, int64_t head, int64_t token) {
  return (const T*)x.data + batch * x.batch + head * x.head + token * x.token;
}

// Rows as accumulators: the tensor's own rows, or a copy in `scratch` if the dtype differs or the
// rows are not adjacent. Rows at a large stride may map to a few cache sets.
template <class T, class A>
const A* rows_of(const Heads& x, int64_t batch, int64_t head, Span span, int64_t width,
                 A* scratch) {
  const T* from = tokens<T>(x, batch, head, span.first);
  if constexpr (sizeof(T) == sizeof(A)) {
    if (x.token == width) return from;
  }
  for (int64_t i = 0; i < span.count; ++i) {
    for_vectors<A>(width, [&](int64_t k, auto at) {
      store(scratch + i * width + k, load(from + i * x.token + k, at), at);
    });
  }
  return scratch;
}

// --- Operations on a tile of scores, with keys or queries in the lanes ---

template <class T, bool keys_in_lanes>
class Scores {
  using A = Accumulate<T>;

 public:
  Scores(const BlockSparse& a, int64_t batch, int64_t head)
      : a_(a),
        slope_(a.slopes ? ((const A*)a.slopes)[batch * a.slopes_batch + head] : 0),
        padding_(a.padding ? a.padding + batch * a.keys : nullptr),
        dropped_row_(a.dropout.seed ? a.dropout.rows((batch * a.heads + head) * a.queries) : 0),
        after_(a.keys - a.queries),
        bias_(a, batch, head) {}

  // Whether any score of the tile is within the causal limit.
  bool any(const Tile& tile) const {
    return !a_.causal || keys(tile).first <= queries(tile).first + queries(tile).count - 1 + after_;
  }

  // Whether scores are products that finish() only excludes, and there is no sink.
  bool only_excludes() const { return a_.softcap == 0 && slope_ == 0 && !a_.bias && !a_.sinks; }

  // Turns products into masked scores. With a softcap `slopes` receives dz / ds. `scratch` has room
  // for a tile.
  void finish(A* z, A* slopes, A* scratch, int64_t lanes, const Tile& tile) {
    const Span key = keys(tile), query = queries(tile);
    const bool cut = a_.causal && key.first + key.count - 1 > query.first + after_;
    if (a_.softcap != 0) cap(z, slopes, lanes * tile.row.count);
    if (slope_ != 0) lower(z, lanes, tile);
    if (a_.bias) bias_.add(z, scratch, lanes, tile);
    if (tile.bits) {
      if constexpr (keys_in_lanes) {
        exclude_by_row(z, lanes, tile);
      } else {
        exclude_by_lane(z, lanes, tile);
      }
    }
    if (cut) exclude_later(z, lanes, tile);
    if (padding_) exclude_padding(z, lanes, tile);
  }

  // Dropout's factors for the elements of a tile.
  void factors(A* to, int64_t lanes, const Tile& tile) const {
    const uint64_t seed = (uint64_t)*a_.dropout.seed;
    const uint32_t threshold = a_.dropout.threshold;
    const A scale = (A)a_.dropout.scale;
    const int64_t first = a_.dropout.column;
    if constexpr (keys_in_lanes) {
      for (int64_t r = 0; r < tile.row.count; ++r) {
        const uint64_t row = dropped_row_ + tile.row.first + r;
        for (int64_t i = 0; i < lanes; i += detail::kDrawn) {
          const int64_t group = (first + tile.lane.first + i) >> 3;
          detail::for_each_kept(seed, row, group, threshold, [&](int64_t k, detail::I32 kept) {
            put(to + r * lanes + i + k, kept, scale, lanes - i - k);
          });
        }
      }
    } else {
      for (int64_t r = 0; r < tile.row.count; r += 8) {
        const detail::U64 group = detail::U64{} + (uint64_t)((first + tile.row.first + r) >> 3);
        for (int64_t i = 0; i < lanes; i += detail::kWide) {
          const auto row = detail::count_from(dropped_row_ + tile.lane.first + i);
          const auto words = detail::philox(group, row, row >> 32, detail::U64{}, seed);
          for (int64_t k = 0; k < 8 && r + k < tile.row.count; ++k) {
            A* at = to + (r + k) * lanes + i;
            for (int64_t n = 0; n < detail::kWide; ++n) {
              at[n] = (uint16_t)(words.word[k / 2][n] >> 16 * (k % 2)) >= threshold ? scale : 0;
            }
          }
        }
      }
    }
  }

 private:
  static Span keys(const Tile& tile) { return keys_in_lanes ? tile.lane : tile.row; }
  static Span queries(const Tile& tile) { return keys_in_lanes ? tile.row : tile.lane; }

  static void put(A* to, detail::I32 kept, A scale, int64_t room) {
    constexpr int64_t kCount = kVectorBytes / 4;
    for (int64_t i = 0; i < kCount && i < room; ++i) to[i] = kept[i] ? scale : 0;
  }

  static Vec<A> number_lanes() {
    Vec<A> lane;
    for (int64_t i = 0; i < kLanes<A>; ++i) lane[i] = (A)i;
    return lane;
  }

  void cap(A* z, A* slopes, int64_t count) const {
    const A cap = (A)a_.softcap;
    for (int64_t i = 0; i < count; i += kLanes<A>) {
      const Vec<A> t = Tanh::value(load(z + i) * (1 / cap));
      store(z + i, t * cap);
      if (slopes) store(slopes + i, 1 - t * t);
    }
  }

  void lower(A* z, int64_t lanes, const Tile& tile) const {
    for (int64_t r = 0; r < tile.row.count; ++r) {
      const int64_t row = tile.row.first + r;
      // The signed distance from the row to lane 0. It grows by one per lane.
      const A first =
          (A)(keys_in_lanes ? tile.lane.first - row - a_.ahead : tile.lane.first - row + a_.ahead);
      for (int64_t i = 0; i < lanes; i += kLanes<A>) {
        const Vec<A> distance = magnitude(number_lanes() + (first + (A)i));
        store(z + r * lanes + i, load(z + r * lanes + i) - distance * slope_);
      }
    }
  }

  void exclude_later(A* z, int64_t lanes, const Tile& tile) const {
    for (int64_t r = 0; r < tile.row.count; ++r) {
      const int64_t row = tile.row.first + r;
      // The lane of the last visible key, or of the first query that sees the row.
      const A limit =
          (A)(keys_in_lanes ? row + after_ - tile.lane.first : row - after_ - tile.lane.first);
      for (int64_t i = 0; i < lanes; i += kLanes<A>) {
        const Vec<A> lane = number_lanes() + (A)i;
        const Bits<A> seen = keys_in_lanes ? lane <= limit : lane >= limit;
        keep(z + r * lanes + i, seen);
      }
    }
  }

  void exclude_padding(A* z, int64_t lanes, const Tile& tile) const {
    const uint8_t* ignored = padding_ + keys(tile).first;
    for (int64_t r = 0; r < tile.row.count; ++r) {
      if constexpr (keys_in_lanes) {
        for (int64_t i = 0; i < tile.lane.count; ++i) {
          if (ignored[i]) z[r * lanes + i] = kExcluded<A>;
        }
      } else if (ignored[r]) {
        std::fill_n(z + r * lanes, lanes, kExcluded<A>);
      }
    }
  }

  static void keep(A* z, Bits<A> seen) { store(z, choose<A>(seen, load(z), splat(kExcluded<A>))); }

  // Turns one bit per lane into a lane mask.
  static Bits<A> mask_of(uint32_t word) {
    Bits<A> lane;
    for (int64_t i = 0; i < kLanes<A>; ++i) lane[i] = i;
    return -(((Bits<A>{} + word) >> lane) & 1);
  }

  // Rows are queries. A row's word holds the bits of the lanes' keys.
  void exclude_by_row(A* z, int64_t lanes, const Tile& tile) const {
    const int64_t words = std::max<int64_t>(a_.block / 32, 1);
    const int64_t key = tile.lane.first % a_.block, query = tile.row.first % a_.block;
    for (int64_t r = 0; r < tile.row.count; ++r) {
      const int32_t* bits = tile.bits + (query + r) * words;
      for (int64_t i = 0; i < lanes; i += kLanes<A>) {
        const uint32_t word = (uint32_t)bits[(key + i) / 32] >> ((key + i) % 32);
        keep(z + r * lanes + i, mask_of(word));
      }
    }
  }

  // Lanes are queries. A lane's word holds the bits of 32 rows' keys.
  void exclude_by_lane(A* z, int64_t lanes, const Tile& tile) const {
    const int64_t words = std::max<int64_t>(a_.block / 32, 1);
    const int64_t key = tile.row.first % a_.block, query = tile.lane.first % a_.block;
    for (int64_t i = 0; i < lanes; i += kLanes<A>) {
      Bits<A> bits = {};
      for (int64_t r = 0; r < tile.row.count; ++r) {
        const int64_t at = key + r;
        if (r == 0 || at % 32 == 0) {
          for (int64_t k = 0; k < kLanes<A>; ++k) {
            const int64_t lane = query + i + k;
            bits[k] = lane < a_.block ? tile.bits[lane * words + at / 32] : 0;
          }
        }
        keep(z + r * lanes + i, -((bits >> (at % 32)) & 1));
      }
    }
  }

  const BlockSparse& a_;
  const A slope_;
  const uint8_t* padding_;
  const int64_t dropped_row_, after_;
  const Bias<T, keys_in_lanes> bias_;
};

// --- The tiles of a line ---

// The tokens of tile number `part` of a block.
inline Span part_of(int64_t block, int64_t index, int64_t part, int64_t length) {
  const int64_t first = index * block + part * kTile;
  return {first, std::min({kTile, block - part * kTile, length - first})};
}

inline int64_t parts_of(int64_t block) { return (block + kTile - 1) / kTile; }

// Calls body(tile) for every tile of the line's blocks, with `lane` as the lane side. A null line
// has every block.
template <class Body>
void for_tiles(const BlockSparse& a, const Lines& lines, const int32_t* line, Span lane,
               int64_t length, Body&& body) {
  const int64_t count = line ? line[3] - line[1] : (length + a.block - 1) / a.block;
  const int64_t words = a.block * std::max<int64_t>(a.block / 32, 1);
  for (int64_t n = 0; n < count; ++n) {
    const int32_t* entry = line ? lines.entries + 2 * (line[1] + n) : nullptr;
    const bool partial = line && line[1] + n >= line[2];
    const int32_t* bits = partial ? a.masks + entry[1] * words : nullptr;
    for (int64_t part = 0; part < parts_of(a.block); ++part) {
      const Span row = part_of(a.block, entry ? entry[0] : n, part, length);
      if (row.count > 0) body(Tile{lane, row, bits});
    }
  }
}

// A work item: a line's slot, a part of its blocks, a batch and a head.
struct Item {
  int64_t slot, part, batch, head;
};

inline Item item_of(const BlockSparse& a, int64_t index, int64_t heads) {
  const int64_t each = a.batch * heads;
  const int64_t at = index / each, rest = index % each;
  return {at / parts_of(a.block), at % parts_of(a.block), rest / heads, rest % heads};
}

// The line of block row or column `which`. Heads order their lines independently, so `slot` is only
// the first guess.
inline const int32_t* line_of(const Lines& lines, int64_t batch, int64_t head, int64_t slot,
                              int64_t which) {
  const int32_t* line = lines.at(batch, head, slot);
  for (int64_t i = 0; line[0] != which; ++i) line = lines.at(batch, head, i);
  return line;
}

// An item for a row of blocks. Its line is null if the layout has every block.
struct RowItem : Item {
  const int32_t* line;
  Span lane;

  RowItem(const BlockSparse& a, int64_t index) : Item(item_of(a, index, a.heads)) {
    line = a.rows.lines ? a.rows.at(batch, head, slot) : nullptr;
    // Without lists, start with the last row: under a causal limit it is the longest.
    lane = part_of(a.block, line ? line[0] : a.rows.count - 1 - slot, part, a.queries);
  }

  // The same row of another batch and head.
  RowItem(const BlockSparse& a, const RowItem& like, int64_t batch, int64_t head)
      : Item{like.slot, like.part, batch, head}, line(nullptr), lane(like.lane) {
    if (like.line) line = line_of(a.rows, batch, head, slot, like.line[0]);
  }
};

TW_NAMESPACE_END
