// Attention of at most kFewQueries queries, as in decoding, over the blocks of a layout on the CPU.
//
// Keys and values are read once: 2 * width elements for 4 * width operations of a query, so memory
// sets the floor. A line of blocks is cut into splits of about kSplitKeys keys. Each split is a
// work item, so that one sequence occupies many threads. It stores its maximum, its sum of
// exponentials and its weighted values; the splits of a query are merged in order. The cut depends
// only on the layout, so results do not depend on the number of threads.
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
    Vec<A> sum[kLanes<A>] = {};
    const T* key[kLanes<A>];
    for (int64_t n = 0; n < kLanes<A>; ++n) key[n] = k + std::min(i + n, count - 1) * pitch;
    for_vectors<A>(width, [&](int64_t x, auto at) {
      const Vec<A> left = load(q + x, at);
#pragma GCC unroll 16
      for (int64_t n = 0; n < kLanes<A>; ++n) sum[n] += left * load(key[n] + x, at);
    });
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
void add_values(A* y, const A* weights, const T* v, int64_t pitch, int64_t count, int64_t width) {
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
A* state_of(const BlockSparseForward& a, int64_t plane, int64_t split, int64_t query) {
  const int64_t size = round_up(a.value_width, kLanes<A>) + 2;
  return (A*)a.states + ((plane * a.splits + split) * a.queries + query) * size;
}

// The online softmax of one row: exponentials replace its scores.
template <class A>
void take_row(A* z, int64_t lanes, A* state, int64_t deep) {
  Vec<A> most = load(z);
  for (int64_t i = kLanes<A>; i < lanes; i += kLanes<A>) most = maximum<A>(most, load(z + i));
  A highest = state[0];
  for (int64_t n = 0; n < kLanes<A>; ++n) highest = std::max(highest, most[n]);
  const A base = highest == kExcluded<A> ? 0 : highest;
  const A fade = exp_nonpositive(splat((A)(state[0] - base)))[0];
  Vec<A> total = {};
  for (int64_t i = 0; i < lanes; i += kLanes<A>) {
    const Vec<A> e = exp_nonpositive(load(z + i) - base);
    store(z + i, e);
    total += e;
  }
  A sum = state[1] * fade;
  for (int64_t n = 0; n < kLanes<A>; ++n) sum += total[n];
  if (fade != 1) {
    A* y = state + 2;
    for (int64_t i = 0; i < deep; i += kLanes<A>) store(y + i, load(y + i) * fade);
  }
  state[0] = highest, state[1] = sum;
}

template <class T>
void split_item(const BlockSparseForward& a, int64_t index) {
  using A = Accumulate<T>;
  const int64_t split = index % a.splits, plane = index / a.splits;
  const int64_t batch = plane / a.key_heads, key_head = plane % a.key_heads;
  const int64_t width = a.width, deep = round_up(a.value_width, kLanes<A>);
  const int64_t begin = std::max<int64_t>(key_head * a.group - a.first_head, 0);
  const int64_t end = std::min((key_head + 1) * a.group - a.first_head, a.heads);
  const int64_t size = deep + 2;
  Scratch<A> scratch(a.queries * (width + 3 * kTile) + kTile * (width + deep + kLanes<A>));
  A *q = scratch, *z = q + a.queries * width, *kept = z + a.queries * kTile;
  A *beside = kept + a.queries * kTile, *keys = beside + a.queries * kTile;
  A* values = keys + kTile * width;
  for (int64_t head = begin; head < end; ++head) {
    const int64_t own = batch * a.heads + head;
    for (int64_t r = 0; r < a.queries; ++r) {
      const T* from = tokens<T>(a.q, batch, head, r);
      for_vectors<A>(width, [&](int64_t x, auto at) {
        store(q + r * width + x, load(from + x, at) * (A)a.scale, at);
      });
    }
    A* states = state_of<A>(a, own, split, 0);
    for (int64_t r = 0; r < a.queries; ++r) {
      A* state = states + r * size;
      std::fill_n(state + 1, size - 1, (A)0);
      state[0] = kExcluded<A>;
    }
    const int32_t* line = a.rows.lines ? a.rows.at(batch, head, 0) : nullptr;
    const int64_t count = line ? line[3] - line[1] : a.columns.count;
    const int64_t last = std::min(count, (split + 1) * a.split_entries);
    const int64_t words = a.block * std::max<int64_t>(a.block / 32, 1);
    Scores<T, true> scores(a, batch, head);
    for (int64_t n = split * a.split_entries; n < last; ++n) {
      const int32_t* entry = line ? a.rows.entries + 2 * (line[1] + n) : nullptr;
      const bool partial = line && line[1] + n >= line[2];
      const int32_t* bits = partial ? a.masks + entry[1] * words : nullptr;
      for (int64_t part = 0; part < parts_of(a.block); ++part) {
        const Span key = part_of(a.block, entry ? entry[0] : n, part, a.keys);
        const Tile tile{key, {0, a.queries}, bits};
        if (key.count <= 0 || !scores.any(tile)) continue;
        const int64_t lanes = round_up(key.count, kLanes<A>);
        const bool one = a.queries == 1;  // reads keys and values as they are stored
        if (one) {
          dot_keys(z, q, tokens<T>(a.k, batch, key_head, key.first), a.k.token, key.count, width);
        } else {
          int64_t pitch = a.k.token;
          const A* k;
          if constexpr (sizeof(T) == sizeof(A)) {
            k = tokens<T>(a.k, batch, key_head, key.first);
          } else {
            k = rows_of<T>(a.k, batch, key_head, key, width, keys);
            pitch = width;
          }
          for (int64_t r = 0; r < a.queries; ++r) {
            dot_keys(z + r * lanes, q + r * width, k, pitch, key.count, width);
          }
        }
        scores.finish(z, (A*)nullptr, beside, lanes, tile);
        for (int64_t r = 0; r < a.queries; ++r) {
          std::fill(z + r * lanes + key.count, z + (r + 1) * lanes, kExcluded<A>);
          take_row(z + r * lanes, lanes, states + r * size, deep);
        }
        if (a.dropout.seed) {
          scores.factors(kept, lanes, tile);
          for (int64_t i = 0; i < a.queries * lanes; i += kLanes<A>) {
            store(z + i, load(z + i) * load(kept + i));
          }
        }
        if (one) {
          add_values(states + 2, z, tokens<T>(a.v, batch, key_head, key.first), a.v.token,
                     key.count, a.value_width);
        } else {
          int64_t pitch;
          const A* v = whole_rows<T>(a.v, batch, key_head, key, a.value_width, values, pitch);
          multiply<Into::add, false>(states + 2, size, z, lanes, v, pitch, a.queries, deep,
                                     key.count);
        }
      }
    }
  }
}

template <class T>
void merge_item(const BlockSparseForward& a, int64_t row) {
  using A = Accumulate<T>;
  const int64_t plane = row / a.queries, query = row % a.queries;
  A highest = a.sinks ? ((const A*)a.sinks)[plane % a.heads] : kExcluded<A>;
  const A sink = highest;
  for (int64_t n = 0; n < a.splits; ++n) {
    highest = std::max(highest, state_of<A>(a, plane, n, query)[0]);
  }
  const A base = highest == kExcluded<A> ? 0 : highest;
  const int64_t deep = round_up(a.value_width, kLanes<A>);
  Scratch<A> y(deep);
  std::fill_n((A*)y, deep, (A)0);
  A sum = a.sinks ? exp_nonpositive(splat((A)(sink - base)))[0] : 0;
  for (int64_t n = 0; n < a.splits; ++n) {
    const A* state = state_of<A>(a, plane, n, query);
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

}  // namespace

// Items are splits of the keys of a key head.
TW_EXPORT void block_sparse_few(const BlockSparseForward& f, int64_t begin, int64_t end) {
  dispatch(f.dtype, f.dtype, [&](auto t, auto) {
    for (int64_t i = begin; i < end; ++i) split_item<typename decltype(t)::type>(f, i);
  });
}

// Items are queries of all heads.
TW_EXPORT void block_sparse_merge(const BlockSparseForward& f, int64_t begin, int64_t end) {
  dispatch(f.dtype, f.dtype, [&](auto t, auto) {
    for (int64_t i = begin; i < end; ++i) merge_item<typename decltype(t)::type>(f, i);
  });
}
