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
#include <utility>

#include "core/dispatch.h"
#include "core/exp.h"
#include "core/log.h"
#include "cpu/block_products.h"

namespace {

using namespace torchweld;

// --- Forward ---

// The scale's two factors: one for set_scores, the other for the weights. They take it if all that
// happens to scores in between is that some are excluded.
template <class Products, class A, class Scores>
std::pair<A, A> split_scale(const Scores& scores, A scale) {
  const bool is_late = Products::kScalesLate && scores.only_excludes() && scale > 0;
  return is_late ? std::pair<A, A>{1, scale} : std::pair<A, A>{scale, 1};
}

template <class T, class Products>
void forward_item(const BlockSparseForward& a, int64_t index) {
  using A = Accumulate<T>;
  const RowItem item(a, index);
  const Span lane = item.lane;
  if (lane.count <= 0) return;
  const int64_t lanes = padded_to(lane.count, kLanes<A>);
  const int64_t width = a.width, deep = a.value_width, key_head = a.key_head(item.head);
  Scratch<A> scratch((lanes + kTile) * (width + deep) + (2 * kTile + 4) * lanes);
  A *q = scratch, *y = q + width * lanes, *keys = y + deep * lanes, *values = keys + kTile * width;
  A *z = values + kTile * deep, *kept = z + kTile * lanes, *highest = kept + kTile * lanes;
  A *sum = highest + lanes, *fade = sum + lanes;
  Products products(deep, lanes);
  Products::turn_side(q, lanes, tokens<T>(a.q, item.batch, item.head, lane.first), a.q.token,
                      lane.count, width, (A)a.scale);
  std::fill_n(y, deep * lanes, (A)0);
  const A sink = a.sinks ? ((const A*)a.sinks)[item.head] : kExcluded<A>;
  std::fill_n(highest, lanes, sink);
  std::fill_n(sum, lanes, a.sinks ? 1 + 0 * std::max<A>(sink, 0) : (A)0);  // an infinite sink: NaN
  const Softmax<A> softmax{highest, sum, fade};
  Scores<T, false> scores(a, item.batch, item.head);
  const auto [early, late] = split_scale<Products>(scores, (A)a.scale);
  for_tiles(a, a.rows, item.line, lane, a.keys, [&](const Tile& tile) {
    if (!scores.any(tile)) return;
    const auto k =
        Products::rows({a.k, a.turned_k, item.batch, key_head, a.block, tile.row, width}, keys);
    const auto v =
        Products::rows({a.v, a.turned_v, item.batch, key_head, a.block, tile.row, deep}, values);
    Products::set_scores(z, lanes, k, q, early);
    scores.finish(z, (A*)nullptr, kept, lanes, tile);
    if (a.dropout.seed) scores.factors(kept, lanes, tile);
    products.attend(y, lanes, v, z, late, a.dropout.seed ? kept : nullptr, softmax);
  });
  A* lse = (A*)a.lse + (item.batch * a.heads + item.head) * a.queries + lane.first;
  for (int64_t i = 0; i < lanes; ++i) {
    const bool none = sum[i] == 0;
    if (i < lane.count) lse[i] = none ? kExcluded<A> : highest[i] * late + (A)log_positive(sum[i]);
    fade[i] = none ? 0 : 1 / sum[i];
  }
  T* to = (T*)a.y + ((item.batch * a.heads + item.head) * a.queries + lane.first) * deep;
  rows_from_lanes(to, deep, y, lanes, lane.count, deep, (const A*)fade);
}

// --- Backward ---

template <class T>
void delta_row(const BlockSparseBackward& a, int64_t row) {
  using A = Accumulate<T>;
  const int64_t head = row / a.queries;
  const T* grad = tokens<T>(a.grad_y, head / a.heads, head % a.heads, row % a.queries);
  const T* y = (const T*)a.y + row * a.value_width;
  A dot[1];
  sum_vectors<A>(a.value_width, dot, [&](int64_t i, auto at, Vec<A>* acc) {
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

// `sums` receives the gradients of the bias, or is null.
template <class T, class Products>
void grad_q_item(const BlockSparseBackward& a, const RowItem& item, Accumulate<T>* sums) {
  using A = Accumulate<T>;
  const Span lane = item.lane;
  if (lane.count <= 0) return;
  const int64_t lanes = padded_to(lane.count, kLanes<A>);
  const int64_t width = a.width, deep = a.value_width, key_head = a.key_head(item.head);
  Scratch<A> scratch((2 * lanes + kTile) * width + (lanes + kTile) * deep + kTile * kTile +
                     (4 * kTile + 3) * lanes);
  A *q = scratch, *grad = q + width * lanes, *grad_q = grad + deep * lanes;
  A *keys = grad_q + width * lanes, *values = keys + kTile * width;
  A *z = values + kTile * deep, *g = z + kTile * lanes, *kept = g + kTile * lanes;
  A *slopes = kept + kTile * lanes, *base = slopes + kTile * lanes, *delta = base + lanes;
  A *scale = delta + lanes, *turned = scale + lanes;
  const BiasGradient<A> bias(a, sums);
  Products products(width, lanes);
  Products::turn_side(q, lanes, tokens<T>(a.q, item.batch, item.head, lane.first), a.q.token,
                      lane.count, width, (A)a.scale);
  Products::turn_side(grad, lanes, tokens<T>(a.grad_y, item.batch, item.head, lane.first),
                      a.grad_y.token, lane.count, deep, (A)1);
  std::fill_n(grad_q, width * lanes, (A)0);
  const Statistics<A> statistics(a, item.batch, item.head);
  for (int64_t i = 0; i < lanes; ++i) {
    base[i] = i < lane.count ? statistics.base(lane.first + i) : 0;
    delta[i] = i < lane.count ? statistics.delta[lane.first + i] : 0;
    scale[i] = (A)a.scale;
  }
  Scores<T, false> scores(a, item.batch, item.head);
  const auto [early, late] = split_scale<Products>(scores, (A)a.scale);
  for_tiles(a, a.rows, item.line, lane, a.keys, [&](const Tile& tile) {
    if (!scores.any(tile)) return;
    const int64_t rows = tile.row.count;
    const auto k =
        Products::rows({a.k, a.turned_k, item.batch, key_head, a.block, tile.row, width}, keys);
    const auto v =
        Products::rows({a.v, a.turned_v, item.batch, key_head, a.block, tile.row, deep}, values);
    Products::set_scores(z, lanes, k, q, early);
    scores.finish(z, slopes, kept, lanes, tile);
    Products::set_scores(g, lanes, v, grad, 1);
    if (a.dropout.seed) {
      scores.factors(kept, lanes, tile);
      times(g, kept, rows * lanes);
    }
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < lanes; i += kLanes<A>) {
        const int64_t at = r * lanes + i;
        const Vec<A> weight = Products::weight(load(z + at), late, load(base + i));
        store(g + at, weight * (load(g + at) - load(delta + i)));
      }
    }
    if (sums) bias.add(g, turned, lanes, tile);
    if (!a.grad_q) return;
    if (a.softcap != 0) times(g, slopes, rows * lanes);
    products.add(grad_q, lanes, k, g);
  });
  if (!a.grad_q) return;
  T* to = (T*)a.grad_q + ((item.batch * a.heads + item.head) * a.queries + lane.first) * width;
  rows_from_lanes(to, width, grad_q, lanes, lane.count, width, (const A*)scale);
}

// Groups of items that add to the same gradients of a bias, so one thread takes a whole group.
template <class T, class Products>
void grad_q_group(const BlockSparseBackward& a, int64_t index) {
  using A = Accumulate<T>;
  A* const grads = (A*)a.grad_bias;
  if (!grads) {
    grad_q_item<T, Products>(a, RowItem(a, index), nullptr);
    return;
  }
  if (a.bias_row) {  // a part of a head's tiles
    const int64_t tiles = a.rows.count * parts_of(a.block) * a.batch;
    A* sums = grads + index * a.distances;
    std::fill_n(sums, a.distances, (A)0);
    for (int64_t at = index / a.heads; at < tiles; at += a.bias_parts) {
      grad_q_item<T, Products>(a, RowItem(a, at * a.heads + index % a.heads), sums);
    }
    return;
  }
  const int64_t head = index % a.bias_heads, batch = index / a.bias_heads % a.bias_batches;
  const int64_t each = a.bias_heads * a.bias_batches;
  const RowItem first(a, (index / each * a.batch + batch) * a.heads + head);
  A* sums = grads + (batch * a.bias_heads + head) * a.queries * a.keys;
  for (int64_t b = batch; b < (a.bias_batches > 1 ? batch + 1 : a.batch); ++b) {
    for (int64_t h = head; h < (a.bias_heads > 1 ? head + 1 : a.heads); ++h) {
      grad_q_item<T, Products>(a, RowItem(a, first, b, h), sums);
    }
  }
}

// Adds up the sums of all parts for a row of a table by distance.
template <class A>
void add_parts(const BlockSparseBackward& a, int64_t row) {
  A* to = (A*)a.bias_sums + row * a.distances;
  std::fill_n(to, a.distances, (A)0);
  const int64_t first = a.bias_heads > 1 ? row : 0, end = a.bias_heads > 1 ? row + 1 : a.heads;
  for (int64_t part = 0; part < a.bias_parts; ++part) {
    for (int64_t head = first; head < end; ++head) {
      const A* from = (const A*)a.grad_bias + (part * a.heads + head) * a.distances;
      for (int64_t i = 0; i < a.distances; ++i) to[i] += from[i];
    }
  }
}

template <class T, class Products>
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
  const int64_t lanes = padded_to(lane.count, kLanes<A>);
  const int64_t width = a.width, deep = a.value_width;
  Scratch<A> scratch((2 * lanes + kTile) * (width + deep) + (4 * kTile + 2) * lanes);
  A *k = scratch, *v = k + width * lanes, *grad_k = v + deep * lanes;
  A *grad_v = grad_k + width * lanes, *queries = grad_v + deep * lanes;
  A *grads = queries + kTile * width, *z = grads + kTile * deep, *g = z + kTile * lanes;
  A *kept = g + kTile * lanes, *slopes = kept + kTile * lanes, *scale = slopes + kTile * lanes;
  A* one = scale + lanes;
  Products products(std::max(width, deep), lanes);
  Products::turn_side(k, lanes, tokens<T>(a.k, item.batch, item.head, lane.first), a.k.token,
                      lane.count, width, (A)a.scale);
  Products::turn_side(v, lanes, tokens<T>(a.v, item.batch, item.head, lane.first), a.v.token,
                      lane.count, deep, (A)1);
  std::fill_n(grad_k, (width + deep) * lanes, (A)0);
  std::fill_n(scale, lanes, (A)a.scale);
  std::fill_n(one, lanes, (A)1);
  for (int64_t head = begin; head < end; ++head) {
    const int32_t* line =
        a.columns.lines ? line_of(a.columns, item.batch, head, item.slot, which) : nullptr;
    const Statistics<A> statistics(a, item.batch, head);
    Scores<T, true> scores(a, item.batch, head);
    const auto [early, late] = split_scale<Products>(scores, (A)a.scale);
    for_tiles(a, a.columns, line, lane, a.queries, [&](const Tile& tile) {
      if (!scores.any(tile)) return;
      const int64_t rows = tile.row.count;
      const auto q =
          Products::rows({a.q, a.turned_q, item.batch, head, a.block, tile.row, width}, queries);
      const auto grad = Products::rows(
          {a.grad_y, a.turned_grad, item.batch, head, a.block, tile.row, deep}, grads);
      Products::set_scores(z, lanes, q, k, early);
      scores.finish(z, slopes, kept, lanes, tile);
      Products::set_scores(g, lanes, grad, v, 1);
      if (a.dropout.seed) {
        scores.factors(kept, lanes, tile);
        times(g, kept, rows * lanes);
      }
      for (int64_t r = 0; r < rows; ++r) {
        const Vec<A> base = splat(statistics.base(tile.row.first + r));
        const A delta = statistics.delta[tile.row.first + r];
        for (int64_t i = 0; i < lanes; i += kLanes<A>) {
          const int64_t at = r * lanes + i;
          const Vec<A> weight = Products::weight(load(z + at), late, base);
          store(z + at, weight);
          store(g + at, weight * (load(g + at) - delta));
        }
      }
      if (a.softcap != 0) times(g, slopes, rows * lanes);
      if (a.dropout.seed) times(z, kept, rows * lanes);
      products.add(grad_v, lanes, grad, z);
      products.add(grad_k, lanes, q, g);
    });
  }
  const int64_t at = (item.batch * a.key_heads + item.head) * a.keys + lane.first;
  if (a.grad_k) {
    rows_from_lanes((T*)a.grad_k + at * width, width, grad_k, lanes, lane.count, width,
                    (const A*)scale);
  }
  if (a.grad_v) {
    rows_from_lanes((T*)a.grad_v + at * deep, deep, grad_v, lanes, lane.count, deep, (const A*)one);
  }
}

template <class A>
A grad_sink(const BlockSparseBackward& a, int64_t head) {
  const A sink = ((const A*)a.sinks)[head];
  if (sink == kExcluded<A>) return 0;  // a query that sees no key has this as its lse too
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

// Calls call(Type<T>{}, item) for a range of items.
template <class Call>
void for_items(DType dtype, int64_t begin, int64_t end, Call&& call) {
  dispatch(dtype, dtype, [&](auto t, auto) {
    for (int64_t item = begin; item < end; ++item) call(t, item);
  });
}

// Calls call(Type<T>{}, Type<Products>{}, item) for a range of items.
template <class Call>
void for_tiled_items(const BlockSparse& a, int64_t begin, int64_t end, Call&& call) {
  dispatch(a.dtype, a.dtype, [&](auto t, auto) {
    with_products<typename decltype(t)::type>(a, [&](auto products) {
      for (int64_t item = begin; item < end; ++item) call(t, products, item);
    });
  });
}

}  // namespace

// Items are tiles of queries of a head.
TW_EXPORT void block_sparse_forward(const BlockSparseForward& f, int64_t begin, int64_t end) {
  for_tiled_items(f, begin, end, [&](auto t, auto products, int64_t item) {
    forward_item<typename decltype(t)::type, typename decltype(products)::type>(f, item);
  });
}

// Items are queries.
TW_EXPORT void block_sparse_delta(const BlockSparseBackward& b, int64_t begin, int64_t end) {
  for_items(b.dtype, begin, end,
            [&](auto t, int64_t row) { delta_row<typename decltype(t)::type>(b, row); });
}

// Items are tiles of queries of a head, or groups of them.
TW_EXPORT void block_sparse_grad_q(const BlockSparseBackward& b, int64_t begin, int64_t end) {
  for_tiled_items(b, begin, end, [&](auto t, auto products, int64_t item) {
    grad_q_group<typename decltype(t)::type, typename decltype(products)::type>(b, item);
  });
}

// Items are rows of a table by distance.
TW_EXPORT void block_sparse_grad_distances(const BlockSparseBackward& b, int64_t begin,
                                           int64_t end) {
  for_items(b.dtype, begin, end, [&](auto t, int64_t row) {
    add_parts<Accumulate<typename decltype(t)::type>>(b, row);
  });
}

// Items are tiles of keys of a key head.
TW_EXPORT void block_sparse_grad_kv(const BlockSparseBackward& b, int64_t begin, int64_t end) {
  for_tiled_items(b, begin, end, [&](auto t, auto products, int64_t item) {
    grad_kv_item<typename decltype(t)::type, typename decltype(products)::type>(b, item);
  });
}

// Items are heads.
TW_EXPORT void block_sparse_grad_sinks(const BlockSparseBackward& b, int64_t begin, int64_t end) {
  for_items(b.dtype, begin, end, [&](auto t, int64_t head) {
    using A = Accumulate<typename decltype(t)::type>;
    ((A*)b.grad_sinks)[head] = grad_sink<A>(b, head);
  });
}

// The pitch of turned tiles, or 0 if kernels with these arguments need none.
TW_EXPORT int64_t block_sparse_turned_pitch(const BlockSparse& a) { return turned_pitch(a); }

// Whether attention in bfloat16 uses the tile registers of this processor.
TW_EXPORT bool block_sparse_has_tiles() { return has_tiles(); }
