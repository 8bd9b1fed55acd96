// Attention over the blocks of a layout, one head at a time.
//
//   s = scale * q . k;  z = softcap * tanh(s / softcap), or s;  z -= slope * distance;
//   z = -inf where the layout, the causal limit or the padding excludes;
//   lse = log(sum exp(z) + exp(sink));  w = exp(z - lse);  y = sum w * kept * v
//
//   delta = grad_y . y - grad_lse;  g = w * (kept * (grad_y . v) - delta) * dz/ds
//   grad_q = scale * sum g * k;  grad_k = scale * sum g * q;  grad_v = sum w * kept * grad_y
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

struct BlockSparse {
  Heads q, k, v;
  const void* sinks;       // [heads], Accumulate<dtype>, or null
  const void* slopes;      // Accumulate<dtype>: [heads] or [batch, heads], or null
  int64_t slopes_batch;    // stride between batches: 0 or heads
  const uint8_t* padding;  // [batch, keys], nonzero: key ignored; or null
  Lines rows, columns;     // `lines` is null if the layout has every block
  const int32_t* masks;    // [masks, block * words]
  int64_t batch, heads, key_heads, queries, keys, width;
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

// y and lse are contiguous.
struct BlockSparseForward : BlockSparse {
  void* y;
  void* lse;  // [batch, heads, queries], Accumulate<dtype>
};

struct BlockSparseBackward : BlockSparse {
  Heads grad_y;
  const void* y;
  const void* lse;
  const void* grad_lse;  // [batch, heads, queries] or null
  void* delta;           // likewise, Accumulate<dtype>
  // Contiguous; null if not wanted.
  void *grad_q, *grad_k, *grad_v;
  void* grad_sinks;  // [heads], Accumulate<dtype>
};

TW_NAMESPACE_END
