// Attention over the blocks of a layout, one head at a time.
//
//   s = scale * q . k;  z = softcap * tanh(s / softcap), or s;  z += bias - slope * distance;
//   z = -inf where the layout, the causal limit or the padding excludes;
//   lse = log(sum exp(z) + exp(sink));  w = exp(z - lse);  y = sum w * kept * v
//
//   delta = grad_y . y - grad_lse;  grad_bias = w * (kept * (grad_y . v) - delta)
//   g = grad_bias * dz/ds;  grad_q = scale * sum g * k;  grad_k = scale * sum g * q
//   grad_v = sum w * kept * grad_y
//   grad_sink = -sum exp(sink - lse) * delta
//
// kept is 0 where an element is dropped, else 1 / (1 - p). Dropout rows are the rows of the scores
// [batch, heads, queries, keys]. A query that sees no key has y = 0 and lse = -inf. Distances are
// between the tokens' numbers in the whole tensor.
#pragma once

#include "core/dropout.h"

TW_NAMESPACE_BEGIN

// [batch, heads, tokens, width]. The elements of a token are contiguous. Strides are in elements.
struct Heads {
  const void* data = nullptr;
  int64_t batch = 0, head = 0, token = 0;
};

// The lines of a layout: see python/torchweld/sparse/lists.py.
struct Lines {
  const int32_t* lines = nullptr;    // [batches, heads, count, 4]
  const int32_t* entries = nullptr;  // [entries, 2]
  int64_t batches = 1, heads = 1;
  int64_t count = 0;

  // Line `slot` of a head: {block row or column, begin, first partial entry, end}.
  TW_HD const int32_t* at(int64_t batch, int64_t head, int64_t slot) const {
    const int64_t own = (batches > 1 ? batch : 0) * heads + (heads > 1 ? head : 0);
    return lines + 4 * (own * count + slot);
  }
};

// Room for a tensor's tiles with their tokens along the rows, which work items share: the first item
// that needs a tile makes it. Without room each item makes its own.
struct TurnedTiles {
  void* data = nullptr;      // [batch, heads, tiles, width, pitch], the tensor's dtype
  uint8_t* state = nullptr;  // [batch, heads, tiles]: 0 at first
  int64_t heads = 0, tiles = 0, pitch = 0;
};

struct BlockSparse {
  Heads q, k, v;
  TurnedTiles turned_k, turned_v;
  const void* sinks;       // [heads], Accumulate<dtype>, or null
  const void* slopes;      // Accumulate<dtype>: [heads] or [batch, heads], or null
  int64_t slopes_batch;    // stride between batches: 0 or heads
  const uint8_t* padding;  // [batch, keys], nonzero: key ignored; or null
  // dtype [*, *, queries, keys] with these strides, if bias_row is 0; else Accumulate<dtype> [*,
  // distances], see cpu/block_bias.h; or null. A stride of 0 shares it.
  const void* bias;
  int64_t bias_batch, bias_head, bias_query;
  int64_t bias_row;      // tokens in a row of the plane in which distances are taken
  Lines rows, columns;   // `lines` is null if the layout has every block
  const int32_t* masks;  // [masks, block * words]
  int64_t batch, heads, key_heads, queries, keys;
  int64_t width, value_width;  // of keys, and of values
  int64_t block, group;
  int64_t first_head;  // of q, in the numbering that `group` divides
  int64_t ahead;       // number of the first query minus that of the first key, for slopes
  double scale, softcap;
  bool causal;
  DType dtype;
  Dropout dropout;

  // The key head of a query head.
  TW_HD int64_t key_head(int64_t head) const { return (head + first_head) / group; }
};

// A kernel of its own serves so few queries. It splits lines by this number of keys.
constexpr int64_t kFewQueries = 15, kSplitKeys = 1024;
constexpr int64_t kSmallestBlock = 16;

// y and lse are contiguous.
struct BlockSparseForward : BlockSparse {
  void* y;
  void* lse;  // [batch, heads, queries], Accumulate<dtype>
  // For few queries: how a line's entries are split, and the states that several splits store.
  int64_t splits, split_entries;
  void* states;
};

struct BlockSparseBackward : BlockSparse {
  Heads grad_y;
  TurnedTiles turned_q, turned_grad;
  const void* y;
  const void* lse;
  const void* grad_lse;  // [batch, heads, queries] or null
  void* delta;           // likewise, Accumulate<dtype>
  // Contiguous; null if not wanted.
  void *grad_q, *grad_k, *grad_v;
  void* grad_sinks;  // [heads], Accumulate<dtype>
  // Accumulate<dtype>: [*, *, queries, keys], zero before; or sums [bias_parts, heads, distances]
  // of parts of a head's tiles, which are added up in order.
  void* grad_bias;
  int64_t bias_batches, bias_heads, bias_parts, distances;
  void* bias_sums;  // [bias_heads, distances]
};

TW_NAMESPACE_END
