// Attention of at most kFewQueries queries, as in decoding, over the blocks of a layout on the CPU.
//
// Keys and values are read once: 2 * width elements for 4 * width operations of a query, so memory
// sets the floor. They are read in the order of their addresses, first the keys of a split and then
// its values, since prefetchers follow long streams. A line of blocks is cut into splits of about
// kSplitKeys keys. Each split is a work item, so that one sequence occupies many threads. It stores
// its maximum, its sum of exponentials and its weighted values; the splits of a query are merged in
// order, and a single one is finished at once. The cut depends only on the layout, so results do
// not depend on the number of threads.
#include "core/block_sparse.h"

#include "core/dispatch.h"
#include "core/exp.h"
#include "core/log.h"
#include "cpu/block_scores.h"
#include "cpu/scratch.h"
#include "cpu/tiles.h"

namespace {

using namespace torchweld;

int64_t round_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

// z[i] = q . k[i] for `count` keys; the rest of the last vector is undefined.
template <class T, class A>
void dot_keys(A* z, const A* q, const T* k, int64_t pitch, int64_t count, int64_t width) {
  for (int64_t i = 0; i < count; i += kLanes<A>) {
    Vec<A> sum[kLanes<A>];
    for (int64_t n = 0; n < kLanes<A>; ++n) {
      const T* key = k + std::min(i + n, count - 1) * pitch;
      Vec<A> products = {};
      for_vectors<A>(width,
                     [&](int64_t x, auto at) { products += load(q + x, at) * load(key + x, at); });
      sum[n] = products;
    }
    detail::transpose_tile<A>(sum);
    Vec<A> total = sum[0];
    for (int64_t n = 1; n < kLanes<A>; ++n) total += sum[n];
    store(z + i, total);
  }
}

// y[x] += the sum over i of weights[i] * v[i][x], for a strip of `strip` vectors, so many that
// additions need not wait for one another.
template <int strip, class T, class A, class Place>
void add_strip(A* y, const A* weights, const T* v, int64_t pitch, int64_t count, Place last) {
  Vec<A> sum[strip];
  for (int n = 0; n < strip; ++n) sum[n] = load(y + n * kLanes<A>);
  for (int64_t i = 0; i < count; ++i) {
    const T* row = v + i * pitch;
#pragma GCC unroll 8
    for (int n = 0; n + 1 < strip; ++n) sum[n] += weights[i] * load(row + n * kLanes<A>);
    sum[strip - 1] += weights[i] * load(row + (strip - 1) * kLanes<A>, last);
  }
  for (int n = 0; n < strip; ++n) store(y + n * kLanes<A>, sum[n]);
}

// The same for rows of `width` elements. y has whole vectors.
template <class T, class A>
void add_rows(A* y, const A* weights, const T* v, int64_t pitch, int64_t count, int64_t width) {
  int64_t x = 0;
  for (; x + 8 * kLanes<A> <= width; x += 8 * kLanes<A>) {
    add_strip<8>(y + x, weights, v + x, pitch, count, Whole{});
  }
  for (; x + 4 * kLanes<A> <= width; x += 4 * kLanes<A>) {
    add_strip<4>(y + x, weights, v + x, pitch, count, Whole{});
  }
  for_vectors<A>(width - x, [&](int64_t n, auto at) {
    add_strip<1>(y + x + n, weights, v + x + n, pitch, count, at);
  });
}

// Rows as accumulators in whole vectors: the tensor's own rows, or a copy in `scratch`.
template <class T, class A>
const A* whole_rows(const Heads& x, int64_t batch, int64_t head, Span span, int64_t width,
                    A* scratch, int64_t& pitch) {
  const T* from = tokens<T>(x, batch, head, span.first);
  if constexpr (sizeof(T) == sizeof(A)) {
    if (width % kLanes<A> == 0) {
      pitch = x.token;
      return from;
    }
  }
  pitch = round_up(width, kLanes<A>);
  for (int64_t i = 0; i < span.count; ++i) {
    for_vectors<A>(width, [&](int64_t n, auto at) {
      store(scratch + i * pitch + n, load(from + i * x.token + n, at));
    });
  }
  return scratch;
}

// The softmax's state of a query within a split: its maximum, its sum, and its weighted values.
template <class A>
int64_t state_size(const BlockSparseForward& a) {
  return round_up(a.value_width, kLanes<A>) + 2;
}

template <class A>
A* state_of(const BlockSparseForward& a, int64_t plane, int64_t split, int64_t query) {
  return (A*)a.states + ((plane * a.splits + split) * a.queries + query) * state_size<A>(a);
}

// Tiles of a split, whose scores lie one after the other: `lanes` for each query.
struct Tiles {
  Span keys[kSplitKeys / kSmallestBlock];
  int64_t count = 0;
};

// The softmax of one query: exponentials replace its scores.
template <class A>
void exponentials(A* z, const Tiles& tiles, int64_t queries, int64_t query, A* state) {
  const auto for_lanes = [&](auto&& body) {
    A* row = z;
    for (int64_t n = 0; n < tiles.count; ++n) {
      const int64_t lanes = round_up(tiles.keys[n].count, kLanes<A>);
      for (int64_t i = 0; i < lanes; i += kLanes<A>) body(row + query * lanes + i);
      row += queries * lanes;
    }
  };
  Vec<A> most = splat(kExcluded<A>), total = {};
  for_lanes([&](const A* at) { most = maximum<A>(most, load(at)); });
  A highest = kExcluded<A>;
  for (int64_t n = 0; n < kLanes<A>; ++n) highest = std::max(highest, most[n]);
  const A base = highest == kExcluded<A> ? 0 : highest;
  for_lanes([&](A* at) {
    const Vec<A> e = exp_nonpositive(load(at) - base);
    store(at, e);
    total += e;
  });
  A sum = 0;
  for (int64_t n = 0; n < kLanes<A>; ++n) sum += total[n];
  state[0] = highest, state[1] = sum;
}

// Writes the result of a query from the states of its splits, which are `pitch` numbers apart.
template <class T, class A = Accumulate<T>>
void write_row(const BlockSparseForward& a, int64_t row, const A* states, int64_t pitch) {
  A highest = a.sinks ? ((const A*)a.sinks)[row / a.queries % a.heads] : kExcluded<A>;
  const A sink = highest;
  for (int64_t n = 0; n < a.splits; ++n) highest = std::max(highest, states[n * pitch]);
  const A base = highest == kExcluded<A> ? 0 : highest;
  const int64_t deep = round_up(a.value_width, kLanes<A>);
  Scratch<A> y(deep);
  std::fill_n((A*)y, deep, (A)0);
  A sum = a.sinks ? exp_nonpositive(splat((A)(sink - base)))[0] : 0;
  for (int64_t n = 0; n < a.splits; ++n) {
    const A* state = states + n * pitch;
    const A share = exp_nonpositive(splat((A)(state[0] - base)))[0];
    sum += state[1] * share;
    for (int64_t i = 0; i < deep; i += kLanes<A>) {
      store(y + i, load(y + i) + load(state + 2 + i) * share);
    }
  }
  const bool none = sum == 0;
  ((A*)a.lse)[row] = none ? kExcluded<A> : base + (A)log_positive(sum);
  const A factor = none ? 0 : 1 / sum;
  T* to = (T*)a.y + row * a.value_width;
  for_vectors<A>(a.value_width,
                 [&](int64_t i, auto at) { store(to + i, load(y + i, at) * factor, at); });
}

// A split of the keys of a head.
template <class T>
class Split {
  using A = Accumulate<T>;

 public:
  Split(const BlockSparseForward& a, int64_t index)
      : a_(a),
        split_(index % a.splits),
        batch_(index / a.splits / a.key_heads),
        key_head_(index / a.splits % a.key_heads),
        deep_(round_up(a.value_width, kLanes<A>)),
        scratch_(a.queries * (a.width + 2 * kTile + kSplitKeys + state_size<A>(a)) +
                 kTile * std::max(a.width, deep_)) {
    q_ = scratch_, beside_ = q_ + a.queries * a.width, kept_ = beside_ + a.queries * kTile;
    z_ = kept_ + a.queries * kTile, only_ = z_ + a.queries * kSplitKeys;
    rows_ = only_ + a.queries * state_size<A>(a);
  }

  // Every head that reads these keys.
  void run() {
    const int64_t first = key_head_ * a_.group - a_.first_head;
    for (int64_t head = std::max<int64_t>(first, 0); head < std::min(first + a_.group, a_.heads);
         ++head) {
      attend(head);
    }
  }

 private:
  static_assert(kSmallestBlock % kLanes<A> == 0);  // so the scores of a split take kSplitKeys

  void attend(int64_t head) {
    const int64_t own = batch_ * a_.heads + head, size = state_size<A>(a_);
    A* states = a_.splits > 1 ? state_of<A>(a_, own, split_, 0) : only_;
    for (int64_t r = 0; r < a_.queries; ++r) {
      const T* from = tokens<T>(a_.q, batch_, head, r);
      for_vectors<A>(a_.width, [&](int64_t x, auto at) {
        store(q_ + r * a_.width + x, load(from + x, at) * (A)a_.scale, at);
      });
    }
    Scores<T, true> scores(a_, batch_, head);
    const Tiles tiles = score_keys(scores, head);
    for (int64_t r = 0; r < a_.queries; ++r) {
      exponentials(z_, tiles, a_.queries, r, states + r * size);
    }
    add_values(scores, tiles, states);
    if (a_.splits > 1) return;
    for (int64_t r = 0; r < a_.queries; ++r) {
      write_row<T>(a_, own * a_.queries + r, states + r * size, 0);
    }
  }

  Tiles score_keys(Scores<T, true>& scores, int64_t head) {
    Tiles tiles;
    const int32_t* line = a_.rows.lines ? a_.rows.at(batch_, head, 0) : nullptr;
    const int64_t count = line ? line[3] - line[1] : a_.columns.count;
    const int64_t last = std::min(count, (split_ + 1) * a_.split_entries);
    const int64_t words = a_.block * std::max<int64_t>(a_.block / 32, 1);
    A* z = z_;
    for (int64_t n = split_ * a_.split_entries; n < last; ++n) {
      const int32_t* entry = line ? a_.rows.entries + 2 * (line[1] + n) : nullptr;
      const bool partial = line && line[1] + n >= line[2];
      const int32_t* bits = partial ? a_.masks + entry[1] * words : nullptr;
      for (int64_t part = 0; part < parts_of(a_.block); ++part) {
        const Span key = part_of(a_.block, entry ? entry[0] : n, part, a_.keys);
        const Tile tile{key, {0, a_.queries}, bits};
        if (key.count <= 0 || !scores.any(tile)) continue;
        const int64_t lanes = round_up(key.count, kLanes<A>);
        multiply_keys(z, lanes, key);
        scores.finish(z, (A*)nullptr, beside_, lanes, tile);
        for (int64_t r = 0; r < a_.queries; ++r) {
          std::fill(z + r * lanes + key.count, z + (r + 1) * lanes, kExcluded<A>);
        }
        tiles.keys[tiles.count++] = key;
        z += a_.queries * lanes;
      }
    }
    return tiles;
  }

  // The products of all queries with the keys of a tile. One query reads keys as they are stored.
  void multiply_keys(A* z, int64_t lanes, Span key) {
    const auto multiply_rows = [&](const auto* k, int64_t pitch) {
      for (int64_t r = 0; r < a_.queries; ++r) {
        dot_keys(z + r * lanes, q_ + r * a_.width, k, pitch, key.count, a_.width);
      }
    };
    if (sizeof(T) == sizeof(A) || a_.queries == 1) {
      multiply_rows(tokens<T>(a_.k, batch_, key_head_, key.first), a_.k.token);
    } else {
      multiply_rows(rows_of<T>(a_.k, batch_, key_head_, key, a_.width, rows_), a_.width);
    }
  }

  void add_values(Scores<T, true>& scores, const Tiles& tiles, A* states) {
    const int64_t size = state_size<A>(a_);
    for (int64_t r = 0; r < a_.queries; ++r) std::fill_n(states + r * size + 2, deep_, (A)0);
    A* z = z_;
    for (int64_t n = 0; n < tiles.count; ++n) {
      const Span key = tiles.keys[n];
      const int64_t lanes = round_up(key.count, kLanes<A>);
      if (a_.dropout.seed) {
        scores.factors(kept_, lanes, Tile{key, {0, a_.queries}, nullptr});
        for (int64_t i = 0; i < a_.queries * lanes; i += kLanes<A>) {
          store(z + i, load(z + i) * load(kept_ + i));
        }
      }
      if (a_.queries == 1) {
        add_rows(states + 2, z, tokens<T>(a_.v, batch_, key_head_, key.first), a_.v.token,
                 key.count, a_.value_width);
      } else {
        int64_t pitch;
        const A* v = whole_rows<T>(a_.v, batch_, key_head_, key, a_.value_width, rows_, pitch);
        multiply<Into::add, false>(states + 2, size, z, lanes, v, pitch, a_.queries, deep_,
                                   key.count);
      }
      z += a_.queries * lanes;
    }
  }

  const BlockSparseForward& a_;
  const int64_t split_, batch_, key_head_, deep_;
  Scratch<A> scratch_;
  A *q_, *beside_, *kept_, *z_, *only_, *rows_;
};

}  // namespace

// Items are splits of the keys of a key head.
TW_EXPORT void block_sparse_few(const BlockSparseForward& f, int64_t begin, int64_t end) {
  dispatch(f.dtype, f.dtype, [&](auto t, auto) {
    for (int64_t i = begin; i < end; ++i) Split<typename decltype(t)::type>(f, i).run();
  });
}

// Items are queries of all heads.
TW_EXPORT void block_sparse_merge(const BlockSparseForward& f, int64_t begin, int64_t end) {
  dispatch(f.dtype, f.dtype, [&](auto t, auto) {
    using T = typename decltype(t)::type;
    using A = Accumulate<T>;
    for (int64_t i = begin; i < end; ++i) {
      const A* states = state_of<A>(f, i / f.queries, 0, i % f.queries);
      write_row<T>(f, i, states, f.queries * state_size<A>(f));
    }
  });
}
