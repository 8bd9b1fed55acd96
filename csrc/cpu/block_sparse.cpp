// Attention over the blocks of a layout on the CPU.
//
// Work is cut into tiles of at most 64 queries by 64 keys. A work item keeps one side of its tiles
// in vector lanes: queries for y and grad_q, keys for grad_k and grad_v. It loops over the other
// side and broadcasts its elements. So every product is one of tiles.h, the softmax reduces lane by
// lane, and only the item's own side is transposed.
//
// A tile takes two products forward, three for grad_q and four for grad_k and grad_v, each of 2 *
// 64 * 64 * width floating-point operations. Both sides of the backward pass recompute the scores,
// so that no two items write to the same memory.
#include "core/block_sparse.h"

#include <algorithm>

#include "core/act.h"
#include "core/dispatch.h"
#include "core/exp.h"
#include "core/log.h"
#include "cpu/dropout.h"
#include "cpu/scratch.h"
#include "cpu/tiles.h"

namespace {

using namespace torchweld;

constexpr int64_t kTile = 64;

template <class A>
constexpr A kExcluded = -__builtin_inff();

// A range of tokens.
struct Span {
  int64_t first, count;
};

// Part of a block. Either its keys or its queries are in the lanes; the other side are rows.
struct Tile {
  Span lane, row;
  const int32_t* bits;  // the block's mask, or null
};

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

template <class A, bool keys_in_lanes>
class Scores {
 public:
  Scores(const BlockSparse& a, int64_t batch, int64_t head)
      : a_(a),
        slope_(a.slopes ? ((const A*)a.slopes)[batch * a.slopes_batch + head] : 0),
        padding_(a.padding ? a.padding + batch * a.keys : nullptr),
        dropped_row_(a.dropout.seed ? a.dropout.rows((batch * a.heads + head) * a.queries) : 0),
        after_(a.keys - a.queries) {}

  // Whether any score of the tile is within the causal limit.
  bool any(const Tile& tile) const {
    return !a_.causal || keys(tile).first <= queries(tile).first + queries(tile).count - 1 + after_;
  }

  // Turns products into masked scores. With a softcap `slopes` receives dz / ds.
  void finish(A* z, A* slopes, int64_t lanes, const Tile& tile) {
    const Span key = keys(tile), query = queries(tile);
    const bool cut = a_.causal && key.first + key.count - 1 > query.first + after_;
    if (a_.softcap != 0) cap(z, slopes, lanes * tile.row.count);
    if (slope_ != 0) lower(z, lanes, tile);
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
      constexpr int64_t kAtOnce = 4 * detail::kWide;
      for (int64_t r = 0; r < tile.row.count; ++r) {
        const uint64_t row = dropped_row_ + tile.row.first + r;
        for (int64_t i = 0; i < lanes; i += kAtOnce) {
          const auto words = detail::dropout_words(seed, row, (first + tile.lane.first + i) >> 2);
          put(to + r * lanes + i, words.first >= threshold, scale, lanes - i);
          put(to + r * lanes + i + kAtOnce / 2, words.second >= threshold, scale,
              lanes - i - kAtOnce / 2);
        }
      }
    } else {
      for (int64_t r = 0; r < tile.row.count; r += 4) {
        const detail::U64 group = detail::U64{} + (uint64_t)((first + tile.row.first + r) >> 2);
        for (int64_t i = 0; i < lanes; i += detail::kWide) {
          const auto row = detail::counting_from(dropped_row_ + tile.lane.first + i);
          const auto words = detail::philox(group, row, row >> 32, detail::U64{}, seed);
          for (int64_t k = 0; k < 4 && r + k < tile.row.count; ++k) {
            A* at = to + (r + k) * lanes + i;
            for (int64_t n = 0; n < detail::kWide; ++n) {
              at[n] = (uint32_t)words.word[k][n] >= threshold ? scale : 0;
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

  static Vec<A> counting() {
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
        const Vec<A> distance = magnitude(counting() + (first + (A)i));
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
        const Vec<A> lane = counting() + (A)i;
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
};

// --- The tiles of a line ---

// The tokens of tile number `part` of a block.
Span part_of(int64_t block, int64_t index, int64_t part, int64_t length) {
  const int64_t first = index * block + part * kTile;
  return {first, std::min({kTile, block - part * kTile, length - first})};
}

int64_t parts_of(int64_t block) { return (block + kTile - 1) / kTile; }

// body(tile) for every tile of the line's blocks, with `lane` as the lane side. A null line has
// every block.
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

Item item_of(const BlockSparse& a, int64_t index, int64_t heads) {
  const int64_t each = a.batch * heads;
  const int64_t at = index / each, rest = index % each;
  return {at / parts_of(a.block), at % parts_of(a.block), rest / heads, rest % heads};
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
};

int64_t lanes_for(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

// --- Forward ---

// The online softmax: updates the maximum, replaces z by exp(z - maximum) and rescales the previous
// sum by `fade`. Lanes that have seen no key keep a sum of zero.
template <class A>
void online(A* z, int64_t rows, int64_t lanes, A* highest, A* sum, A* fade) {
  for (int64_t i = 0; i < lanes; i += kLanes<A>) {
    const Vec<A> before = load(highest + i);
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
    store(highest + i, now);
    store(fade + i, faded);
    store(sum + i, load(sum + i) * faded + (total[0] + total[1]));
  }
}

template <class A>
void times(A* x, const A* factors, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes<A>) store(x + i, load(x + i) * load(factors + i));
}

template <class T>
void forward_item(const BlockSparseForward& a, int64_t index) {
  using A = Accumulate<T>;
  const RowItem item(a, index);
  const Span lane = item.lane;
  if (lane.count <= 0) return;
  const int64_t lanes = lanes_for(lane.count, kLanes<A>), width = a.width;
  const int64_t key_head = a.key_head(item.head);
  Scratch<A> scratch((2 * lanes + 2 * kTile) * width + (2 * kTile + 4) * lanes);
  A *q = scratch, *y = q + width * lanes, *keys = y + width * lanes, *values = keys + kTile * width;
  A *z = values + kTile * width, *kept = z + kTile * lanes, *highest = kept + kTile * lanes;
  A *sum = highest + lanes, *fade = sum + lanes;
  lanes_from_rows(q, lanes, tokens<T>(a.q, item.batch, item.head, lane.first), a.q.token,
                  lane.count, width, (A)a.scale);
  std::fill_n(y, width * lanes, (A)0);
  std::fill_n(highest, lanes, a.sinks ? ((const A*)a.sinks)[item.head] : kExcluded<A>);
  std::fill_n(sum, lanes, (A)(a.sinks ? 1 : 0));
  Scores<A, false> scores(a, item.batch, item.head);
  for_tiles(a, a.rows, item.line, lane, a.keys, [&](const Tile& tile) {
    if (!scores.any(tile)) return;
    const int64_t rows = tile.row.count;
    const A* k = rows_of<T>(a.k, item.batch, key_head, tile.row, width, keys);
    const A* v = rows_of<T>(a.v, item.batch, key_head, tile.row, width, values);
    multiply<Into::set, false>(z, lanes, k, width, q, lanes, rows, lanes, width);
    scores.finish(z, (A*)nullptr, lanes, tile);
    online(z, rows, lanes, highest, sum, fade);
    if (a.dropout.seed) {
      scores.factors(kept, lanes, tile);
      times(z, kept, rows * lanes);
    }
    multiply<Into::scaled, true>(y, lanes, v, width, z, lanes, width, lanes, rows, fade);
  });
  A* lse = (A*)a.lse + (item.batch * a.heads + item.head) * a.queries + lane.first;
  for (int64_t i = 0; i < lanes; ++i) {
    const bool none = sum[i] == 0;
    if (i < lane.count) lse[i] = none ? kExcluded<A> : highest[i] + (A)log_positive(sum[i]);
    fade[i] = none ? 0 : 1 / sum[i];
  }
  T* to = (T*)a.y + ((item.batch * a.heads + item.head) * a.queries + lane.first) * width;
  rows_from_lanes(to, width, y, lanes, lane.count, width, (const A*)fade);
}

// --- Backward ---

template <class T>
void delta_row(const BlockSparseBackward& a, int64_t row) {
  using A = Accumulate<T>;
  const int64_t head = row / a.queries;
  const T* grad = tokens<T>(a.grad_y, head / a.heads, head % a.heads, row % a.queries);
  const T* y = (const T*)a.y + row * a.width;
  A dot[1];
  sum_vectors<A>(a.width, dot, [&](int64_t i, auto at, Vec<A>* acc) {
    acc[0] += load(grad + i, at) * load(y + i, at);
  });
  ((A*)a.delta)[row] = dot[0] - (a.grad_lse ? ((const A*)a.grad_lse)[row] : 0);
}

// Statistics of a head's queries: delta, and lse, with 0 for a query that sees no key.
template <class A>
struct Statistics {
  const A *lse, *delta;

  Statistics(const BlockSparseBackward& a, int64_t batch, int64_t head)
      : lse((const A*)a.lse + (batch * a.heads + head) * a.queries),
        delta((const A*)a.delta + (batch * a.heads + head) * a.queries) {}

  A base(int64_t query) const { return lse[query] == kExcluded<A> ? 0 : lse[query]; }
};

template <class T>
void grad_q_item(const BlockSparseBackward& a, int64_t index) {
  using A = Accumulate<T>;
  const RowItem item(a, index);
  const Span lane = item.lane;
  if (lane.count <= 0) return;
  const int64_t lanes = lanes_for(lane.count, kLanes<A>), width = a.width;
  const int64_t key_head = a.key_head(item.head);
  Scratch<A> scratch((3 * lanes + 2 * kTile) * width + (4 * kTile + 3) * lanes);
  A *q = scratch, *grad = q + width * lanes, *grad_q = grad + width * lanes;
  A *keys = grad_q + width * lanes, *values = keys + kTile * width;
  A *z = values + kTile * width, *g = z + kTile * lanes, *kept = g + kTile * lanes;
  A *slopes = kept + kTile * lanes, *base = slopes + kTile * lanes, *delta = base + lanes;
  A* scale = delta + lanes;
  lanes_from_rows(q, lanes, tokens<T>(a.q, item.batch, item.head, lane.first), a.q.token,
                  lane.count, width, (A)a.scale);
  lanes_from_rows(grad, lanes, tokens<T>(a.grad_y, item.batch, item.head, lane.first),
                  a.grad_y.token, lane.count, width, (A)1);
  std::fill_n(grad_q, width * lanes, (A)0);
  const Statistics<A> statistics(a, item.batch, item.head);
  for (int64_t i = 0; i < lanes; ++i) {
    base[i] = i < lane.count ? statistics.base(lane.first + i) : 0;
    delta[i] = i < lane.count ? statistics.delta[lane.first + i] : 0;
    scale[i] = (A)a.scale;
  }
  Scores<A, false> scores(a, item.batch, item.head);
  for_tiles(a, a.rows, item.line, lane, a.keys, [&](const Tile& tile) {
    if (!scores.any(tile)) return;
    const int64_t rows = tile.row.count;
    const A* k = rows_of<T>(a.k, item.batch, key_head, tile.row, width, keys);
    const A* v = rows_of<T>(a.v, item.batch, key_head, tile.row, width, values);
    multiply<Into::set, false>(z, lanes, k, width, q, lanes, rows, lanes, width);
    scores.finish(z, slopes, lanes, tile);
    multiply<Into::set, false>(g, lanes, v, width, grad, lanes, rows, lanes, width);
    if (a.dropout.seed) {
      scores.factors(kept, lanes, tile);
      times(g, kept, rows * lanes);
    }
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < lanes; i += kLanes<A>) {
        const int64_t at = r * lanes + i;
        const Vec<A> weight = exp_nonpositive(load(z + at) - load(base + i));
        store(g + at, weight * (load(g + at) - load(delta + i)));
      }
    }
    if (a.softcap != 0) times(g, slopes, rows * lanes);
    multiply<Into::add, true>(grad_q, lanes, k, width, g, lanes, width, lanes, rows);
  });
  T* to = (T*)a.grad_q + ((item.batch * a.heads + item.head) * a.queries + lane.first) * width;
  rows_from_lanes(to, width, grad_q, lanes, lane.count, width, (const A*)scale);
}

// The line of column `which`. Each head orders its lines on its own, so try `slot` first.
const int32_t* line_of(const Lines& lines, int64_t batch, int64_t head, int64_t slot,
                       int64_t which) {
  const int32_t* line = lines.at(batch, head, slot);
  for (int64_t i = 0; line[0] != which; ++i) line = lines.at(batch, head, i);
  return line;
}

template <class T>
void grad_kv_item(const BlockSparseBackward& a, int64_t index) {
  using A = Accumulate<T>;
  const Item item = item_of(a, index, a.key_heads);
  // The local query heads that use this key head.
  const int64_t begin = std::max<int64_t>(item.head * a.group - a.first_head, 0);
  const int64_t end = std::min((item.head + 1) * a.group - a.first_head, a.heads);
  int64_t which = item.slot;
  if (a.columns.lines) {
    which = a.columns.at(item.batch, std::clamp<int64_t>(begin, 0, a.heads - 1), item.slot)[0];
  }
  const Span lane = part_of(a.block, which, item.part, a.keys);
  if (lane.count <= 0) return;
  const int64_t lanes = lanes_for(lane.count, kLanes<A>), width = a.width;
  Scratch<A> scratch((4 * lanes + 2 * kTile) * width + (4 * kTile + 2) * lanes);
  A *k = scratch, *v = k + width * lanes, *grad_k = v + width * lanes;
  A *grad_v = grad_k + width * lanes, *queries = grad_v + width * lanes;
  A *grads = queries + kTile * width, *z = grads + kTile * width, *g = z + kTile * lanes;
  A *kept = g + kTile * lanes, *slopes = kept + kTile * lanes, *scale = slopes + kTile * lanes;
  A* one = scale + lanes;
  lanes_from_rows(k, lanes, tokens<T>(a.k, item.batch, item.head, lane.first), a.k.token,
                  lane.count, width, (A)a.scale);
  lanes_from_rows(v, lanes, tokens<T>(a.v, item.batch, item.head, lane.first), a.v.token,
                  lane.count, width, (A)1);
  std::fill_n(grad_k, 2 * width * lanes, (A)0);
  std::fill_n(scale, lanes, (A)a.scale);
  std::fill_n(one, lanes, (A)1);
  for (int64_t head = begin; head < end; ++head) {
    const int32_t* line =
        a.columns.lines ? line_of(a.columns, item.batch, head, item.slot, which) : nullptr;
    const Statistics<A> statistics(a, item.batch, head);
    Scores<A, true> scores(a, item.batch, head);
    for_tiles(a, a.columns, line, lane, a.queries, [&](const Tile& tile) {
      if (!scores.any(tile)) return;
      const int64_t rows = tile.row.count;
      const A* q = rows_of<T>(a.q, item.batch, head, tile.row, width, queries);
      const A* grad = rows_of<T>(a.grad_y, item.batch, head, tile.row, width, grads);
      multiply<Into::set, false>(z, lanes, q, width, k, lanes, rows, lanes, width);
      scores.finish(z, slopes, lanes, tile);
      multiply<Into::set, false>(g, lanes, grad, width, v, lanes, rows, lanes, width);
      if (a.dropout.seed) {
        scores.factors(kept, lanes, tile);
        times(g, kept, rows * lanes);
      }
      for (int64_t r = 0; r < rows; ++r) {
        const A base = statistics.base(tile.row.first + r);
        const A delta = statistics.delta[tile.row.first + r];
        for (int64_t i = 0; i < lanes; i += kLanes<A>) {
          const int64_t at = r * lanes + i;
          const Vec<A> weight = exp_nonpositive(load(z + at) - base);
          store(z + at, weight);
          store(g + at, weight * (load(g + at) - delta));
        }
      }
      if (a.softcap != 0) times(g, slopes, rows * lanes);
      if (a.dropout.seed) times(z, kept, rows * lanes);
      multiply<Into::add, true>(grad_v, lanes, grad, width, z, lanes, width, lanes, rows);
      multiply<Into::add, true>(grad_k, lanes, q, width, g, lanes, width, lanes, rows);
    });
  }
  const int64_t at = ((item.batch * a.key_heads + item.head) * a.keys + lane.first) * width;
  if (a.grad_k) {
    rows_from_lanes((T*)a.grad_k + at, width, grad_k, lanes, lane.count, width, (const A*)scale);
  }
  if (a.grad_v) {
    rows_from_lanes((T*)a.grad_v + at, width, grad_v, lanes, lane.count, width, (const A*)one);
  }
}

template <class A>
A grad_sink(const BlockSparseBackward& a, int64_t head) {
  const A sink = ((const A*)a.sinks)[head];
  A total = 0;
  for (int64_t batch = 0; batch < a.batch; ++batch) {
    const Statistics<A> statistics(a, batch, head);
    A sum[1];
    sum_vectors<A>(a.queries, sum, [&](int64_t i, auto at, Vec<A>* acc) {
      const Vec<A> lse = load(statistics.lse + i, at, sink);
      acc[0] += exp_nonpositive(sink - lse) * load(statistics.delta + i, at);
    });
    total -= sum[0];
  }
  return total;
}

// call(Type<T>{}, item) for a range of items.
template <class Call>
void for_items(DType dtype, int64_t begin, int64_t end, Call&& call) {
  dispatch(dtype, dtype, [&](auto t, auto) {
    for (int64_t item = begin; item < end; ++item) call(t, item);
  });
}

}  // namespace

// Items are tiles of queries of a head.
TW_EXPORT void block_sparse_forward(const BlockSparseForward& f, int64_t begin, int64_t end) {
  for_items(f.dtype, begin, end,
            [&](auto t, int64_t item) { forward_item<typename decltype(t)::type>(f, item); });
}

// Items are queries.
TW_EXPORT void block_sparse_delta(const BlockSparseBackward& b, int64_t begin, int64_t end) {
  for_items(b.dtype, begin, end,
            [&](auto t, int64_t row) { delta_row<typename decltype(t)::type>(b, row); });
}

// Items are tiles of queries of a head.
TW_EXPORT void block_sparse_grad_q(const BlockSparseBackward& b, int64_t begin, int64_t end) {
  for_items(b.dtype, begin, end,
            [&](auto t, int64_t item) { grad_q_item<typename decltype(t)::type>(b, item); });
}

// Items are tiles of keys of a key head.
TW_EXPORT void block_sparse_grad_kv(const BlockSparseBackward& b, int64_t begin, int64_t end) {
  for_items(b.dtype, begin, end,
            [&](auto t, int64_t item) { grad_kv_item<typename decltype(t)::type>(b, item); });
}

// Items are heads.
TW_EXPORT void block_sparse_grad_sinks(const BlockSparseBackward& b, int64_t begin, int64_t end) {
  for_items(b.dtype, begin, end, [&](auto t, int64_t head) {
    using A = Accumulate<typename decltype(t)::type>;
    ((A*)b.grad_sinks)[head] = grad_sink<A>(b, head);
  });
}
