// block_sparse_attention for torch; the schemas are in python/torchweld/ops.
#include "core/block_sparse.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "bind/dropout.h"
#include "bind/launch.h"

TW_KERNEL(block_sparse_forward, BlockSparseForward);
TW_KERNEL(block_sparse_few, BlockSparseForward);
TW_KERNEL(block_sparse_merge, BlockSparseForward);
TW_KERNEL(block_sparse_delta, BlockSparseBackward);
TW_KERNEL(block_sparse_grad_q, BlockSparseBackward);
TW_KERNEL(block_sparse_grad_kv, BlockSparseBackward);
TW_KERNEL(block_sparse_grad_distances, BlockSparseBackward);
TW_KERNEL(block_sparse_grad_sinks, BlockSparseBackward);
TW_FUNCTION(int64_t, block_sparse_turned_pitch, const torchweld::BlockSparse&);

namespace torchweld {
namespace {

// Sizes and strides of [*, length, width], padded to four dimensions with leading ones.
struct Four {
  int64_t size[4] = {1, 1, 1, 1}, stride[4] = {0, 0, 0, 0};

  explicit Four(const Tensor& x) {
    const size_t rank = x.sizes().size();
    STD_TORCH_CHECK(rank >= 1 && rank <= 4,
                    "block_sparse_attention: tensors need 1 to 4 dimensions");
    for (size_t i = 0; i < rank; ++i) {
      size[4 - rank + i] = x.sizes()[i];
      stride[4 - rank + i] = x.strides()[i];
    }
  }
};

// The tensor, or a copy of it in which the elements of a token are contiguous.
Tensor adjacent(const Tensor& x) {
  const size_t rank = x.sizes().size();
  const bool is = rank > 0 && (x.sizes()[rank - 1] < 2 || x.strides()[rank - 1] == 1);
  return is ? x : copy_contiguous(x);
}

Heads heads_of(const Tensor& x) {
  const Four four(x);
  return {data(x), four.stride[0], four.stride[1], four.stride[2]};
}

// The integers of a list. Replaces the list by a copy if it is not contiguous.
const int32_t* integers(Tensor& x, const Tensor& like) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Int && same_device(x, like),
                  "the layout's lists are not int32 on the device of q");
  x = make_contiguous(x);
  return (const int32_t*)data(x);
}

// Whether every head has each of `count` lines once, and every line's entries exist, with partners
// below `partners` and masks below `masks`. Otherwise a kernel would access memory out of bounds.
// The check takes a nanosecond per block; the block's products take some microseconds.
bool are_sound(const Lines& lines, int64_t entries, int64_t partners, int64_t masks) {
  std::vector<uint8_t> seen(lines.count);
  for (int64_t head = 0; head < lines.batches * lines.heads; ++head) {
    std::fill(seen.begin(), seen.end(), 0);
    for (int64_t slot = 0; slot < lines.count; ++slot) {
      const int32_t* line = lines.lines + 4 * (head * lines.count + slot);
      const int64_t which = line[0], begin = line[1], partial = line[2], end = line[3];
      if (which < 0 || which >= lines.count || seen[which]++) return false;
      if (begin < 0 || partial < begin || end < partial || end > entries) return false;
      bool sound = true;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t partner = lines.entries[2 * i], mask = lines.entries[2 * i + 1];
        sound &= (partner >= 0) & (partner < partners);
        sound &= (i < partial) | ((mask >= 0) & (mask < masks));
      }
      if (!sound) return false;
    }
  }
  return true;
}

Lines lines_of(Tensor& lines, Tensor& entries, const Tensor& q, int64_t count, int64_t partners,
               int64_t masks) {
  const Sizes sizes = lines.sizes();
  const Four four(q);
  STD_TORCH_CHECK(sizes.size() == 4 && (sizes[0] == 1 || sizes[0] == four.size[0]) &&
                      (sizes[1] == 1 || sizes[1] == four.size[1]) && sizes[2] == count &&
                      sizes[3] == 4,
                  "the layout's lines are not those of q and k");
  STD_TORCH_CHECK(entries.sizes().size() == 2 && entries.sizes()[1] == 2,
                  "the layout's entries are not pairs");
  const Lines result{integers(lines, q), integers(entries, q), sizes[0], sizes[1], count};
  STD_TORCH_CHECK(are_sound(result, entries.sizes()[0], partners, masks),
                  "the layout's lists refer to blocks or masks that do not exist");
  return result;
}

// The arguments of both directions, and the tensors that own the memory.
struct Arguments {
  Tensor q, k, v;
  OptionalTensor sinks, bias, slopes, padding, rows, row_entries, columns, column_entries, masks;

  void fill(BlockSparse& a, int64_t row, int64_t block, int64_t group, double scale, bool causal,
            double softcap, double p, const OptionalTensor& seed, const Place& place) {
    a.dtype = dtype_of(q);
    a.dropout = dropout_at(q, p, seed, place);
    const Four query(q), key(k), value(v);
    for (int i = 0; i < 3; ++i) {
      STD_TORCH_CHECK(key.size[i] == value.size[i], "k and v differ before their widths");
    }
    STD_TORCH_CHECK(query.size[0] == key.size[0] && query.size[3] == key.size[3],
                    "k does not fit q in batch or width");
    for (const Tensor& x : {k, v}) {
      STD_TORCH_CHECK(x.scalar_type() == q.scalar_type() && same_device(x, q),
                      "k and v are not of q's dtype and device");
    }
    STD_TORCH_CHECK(block == 16 || block == 32 || block == 64 || block == 128,
                    "block is not one of 16, 32, 64, 128");
    a.block = block, a.group = group, a.scale = scale, a.causal = causal, a.softcap = softcap;
    a.batch = query.size[0], a.heads = query.size[1], a.queries = query.size[2];
    a.width = query.size[3], a.value_width = value.size[3];
    a.key_heads = key.size[1], a.keys = key.size[2];
    check_heads(a, q, place);
    a.ahead = ahead_of(a, place.offset);
    a.q = heads_of(q), a.k = heads_of(k), a.v = heads_of(v);
    fill_lists(a);
    fill_beside(a);
    fill_bias(a, row);
  }

 private:
  // The last offset is the first key.
  static Dropout dropout_at(const Tensor& q, double p, const OptionalTensor& seed, Place place) {
    const int64_t first_key = place.offset.empty() ? 0 : place.offset.back();
    STD_TORCH_CHECK(first_key >= 0 && first_key % 8 == 0,
                    "shard: the first key is not a multiple of 8");
    if (!place.offset.empty()) place.offset.back() = 0;
    Dropout dropout = dropout_of(q, 1, p, seed, place);
    dropout.column = first_key;
    return dropout;
  }

  // The last query is aligned with the last key; `offset` shifts either.
  static int64_t ahead_of(const BlockSparse& a, const Shape& offset) {
    const size_t rank = offset.size();
    const int64_t query = rank > 1 ? offset[rank - 2] : 0, key = rank > 0 ? offset[rank - 1] : 0;
    return a.keys - a.queries + query - key;
  }

  static void check_heads(BlockSparse& a, const Tensor& q, const Place& place) {
    STD_TORCH_CHECK(a.group > 0, "group is not positive");
    const size_t rank = q.sizes().size();
    STD_TORCH_CHECK(place.whole.empty() || place.whole.back() == a.width,
                    "shard: q is split along its width");
    a.first_head = 0;
    if (a.heads == a.key_heads * a.group) return;
    if (rank > 2 && !place.offset.empty()) a.first_head = place.offset[rank - 3];
    STD_TORCH_CHECK(!place.whole.empty() && a.first_head + a.heads <= a.key_heads * a.group,
                    "the heads of q are not a multiple of those of k");
  }

  void fill_lists(BlockSparse& a) {
    a.rows.count = (a.queries + a.block - 1) / a.block;
    a.columns.count = (a.keys + a.block - 1) / a.block;
    a.masks = nullptr;
    if (!rows) return;
    STD_TORCH_CHECK(row_entries && columns && column_entries && masks, "the layout lacks lists");
    const int64_t words = a.block < 32 ? 1 : a.block / 32;
    STD_TORCH_CHECK(masks->sizes().size() == 2 && masks->sizes()[1] == a.block * words,
                    "the layout's masks do not fit its block size");
    a.rows = lines_of(*rows, *row_entries, q, a.rows.count, a.columns.count, masks->sizes()[0]);
    a.masks = integers(*masks, q);
  }

  void fill_beside(BlockSparse& a) {
    a.sinks = a.slopes = nullptr;
    a.padding = nullptr;
    a.slopes_batch = 0;
    const ScalarType wide = accumulate_type(a.dtype);
    if (sinks) {
      STD_TORCH_CHECK(sinks->numel() == a.heads && same_device(*sinks, q), "sinks is not [heads]");
      sinks = make_contiguous(as_type(*sinks, wide));
      a.sinks = data(sinks);
    }
    if (slopes) {
      const bool each = slopes->sizes().size() == 4;
      STD_TORCH_CHECK(slopes->numel() == a.heads * (each ? a.batch : 1) && same_device(*slopes, q),
                      "alibi_slopes is not [heads] or [batch, heads]");
      slopes = make_contiguous(as_type(*slopes, wide));
      a.slopes = data(slopes);
      a.slopes_batch = each ? a.heads : 0;
    }
    if (padding) {
      STD_TORCH_CHECK(padding->scalar_type() == ScalarType::Bool && same_device(*padding, q) &&
                          padding->numel() == a.batch * a.keys,
                      "key_padding_mask is not [batch, keys] booleans");
      padding = make_contiguous(padding);
      a.padding = (const uint8_t*)data(padding);
    }
  }

  // If `row` is not 0 the bias has a number per distance, else per pair.
  void fill_bias(BlockSparse& a, int64_t row) {
    a.bias = nullptr;
    a.bias_batch = a.bias_head = a.bias_query = 0;
    a.bias_row = bias ? row : 0;
    if (!bias) return;
    STD_TORCH_CHECK(row >= 0 && same_device(*bias, q), "bias is not on the device of q");
    const Four four(*bias);
    const bool shares_batch = four.size[0] == 1, shares_head = four.size[1] == 1;
    STD_TORCH_CHECK(
        (shares_batch || four.size[0] == a.batch) && (shares_head || four.size[1] == a.heads),
        "bias is not for this batch and these heads");
    if (row) {
      STD_TORCH_CHECK(shares_batch && four.size[2] == 1 && four.size[3] == distances(a),
                      "bias is not [heads, distances]");
      STD_TORCH_CHECK(row >= a.keys || a.queries <= a.keys,
                      "a bias on a plane takes no more queries than keys");
      bias = make_contiguous(as_type(*bias, accumulate_type(a.dtype)));
      a.bias_head = shares_head ? 0 : four.size[3];
    } else {
      STD_TORCH_CHECK(four.size[2] == a.queries && four.size[3] == a.keys &&
                          bias->scalar_type() == q.scalar_type(),
                      "bias is not [batch, heads, queries, keys] of q's dtype");
      bias = adjacent(*bias);
      const Four dense(*bias);
      a.bias_batch = shares_batch ? 0 : dense.stride[0];
      a.bias_head = shares_head ? 0 : dense.stride[1];
      a.bias_query = dense.stride[2];
    }
    a.bias = data(bias);
  }

 public:
  // The columns, which only the backward pass reads.
  void fill_columns(BlockSparse& a) {
    if (!rows) return;
    a.columns =
        lines_of(*columns, *column_entries, q, a.columns.count, a.rows.count, masks->sizes()[0]);
  }

  // The number of distances between queries and keys, and so of a bias's numbers.
  static int64_t distances(const BlockSparse& a) {
    if (a.bias_row >= a.keys) return std::max<int64_t>(a.queries + a.keys - 1, 0);
    return 2 * (a.keys - 1 + (a.keys - 1) / a.bias_row * (a.bias_row - 1)) + 1;
  }
};

// The number of tiles of at most 64 tokens in so many blocks.
int64_t tiles_of(const BlockSparse& a, int64_t blocks) {
  return blocks * (a.block > 64 ? a.block / 64 : 1);
}
int64_t tiles(const BlockSparse& a, int64_t blocks, int64_t heads) {
  return tiles_of(a, blocks) * a.batch * heads;
}

// Room for the turned tiles of x, if kernels turn tiles and more than one of `others` may use one.
// `owners` keeps the memory.
TurnedTiles share_tiles(const BlockSparse& a, const Tensor& x, int64_t others,
                        std::vector<Tensor>& owners) {
  const int64_t pitch = others > 1 ? block_sparse_turned_pitch(a) : 0;
  if (pitch == 0) return {};
  const Four four(x);
  const int64_t heads = four.size[1], each = tiles_of(a, (four.size[2] + a.block - 1) / a.block);
  const int64_t sizes[] = {a.batch * heads * each, four.size[3], pitch};
  const Tensor room = empty(x, Sizes(sizes, 3), x.scalar_type());
  const Tensor state = empty(x, Sizes(sizes, 1), ScalarType::Byte);
  std::memset(state.mutable_data_ptr(), 0, sizes[0]);
  owners.insert(owners.end(), {room, state});
  return {room.mutable_data_ptr(), (uint8_t*)state.mutable_data_ptr(), heads, each, pitch};
}

int64_t elements(const BlockSparse& a) {
  return a.batch * a.heads * a.queries * (std::max(a.width, a.value_width) + 1);
}

// The most bytes for sums by distance. Long tables have fewer parts, but enough for many threads.
constexpr int64_t kSumsBytes = 16 << 20;
constexpr int64_t kFewestParts = 16;

// Allocates the gradient of a bias, and the sums for it. `items` is the number of tiles of queries
// of all heads; it becomes the number of groups that the kernel takes.
Tensor prepare_grad_bias(BlockSparseBackward& a, const Tensor& bias, const Tensor& q,
                         ScalarType wide, int64_t& items, Tensor& sums) {
  const Four four(bias);
  a.bias_batches = four.size[0], a.bias_heads = four.size[1];
  Tensor grads = empty(q, bias.sizes(), wide);
  if (!a.bias_row) {
    torch::stable::fill_(grads, 0);
    a.grad_bias = grads.mutable_data_ptr();
    items = items / std::max<int64_t>(a.batch * a.heads, 1) * a.bias_batches * a.bias_heads;
    return grads;
  }
  a.distances = four.size[3];
  const int64_t each = items / std::max<int64_t>(a.heads, 1);
  const int64_t row = std::max<int64_t>(a.heads * a.distances * 8, 1);
  a.bias_parts = std::min(each, std::max(kFewestParts, kSumsBytes / row));
  const int64_t shape[] = {a.bias_parts, a.heads, a.distances};
  sums = empty(q, Sizes(shape, 3), wide);
  a.grad_bias = sums.mutable_data_ptr();
  a.bias_sums = grads.mutable_data_ptr();
  items = a.bias_parts * a.heads;
  return grads;
}

void attend_few(BlockSparseForward& a, const Tensor& like) {
  int64_t longest = a.columns.count;
  if (a.rows.lines) {
    longest = 0;
    for (int64_t i = 0; i < a.rows.batches * a.rows.heads * a.rows.count; ++i) {
      longest = std::max<int64_t>(longest, a.rows.lines[4 * i + 3] - a.rows.lines[4 * i + 1]);
    }
  }
  a.split_entries = kSplitKeys / a.block;
  a.splits = std::max<int64_t>((longest + a.split_entries - 1) / a.split_entries, 1);
  const int64_t rows = a.batch * a.heads * a.queries;
  const int64_t work = rows * std::min(longest * a.block, a.keys) * (a.width + a.value_width) / 8;
  if (a.splits == 1) {
    launch_queue(block_sparse_few, a, a.batch * a.key_heads, work);
    return;
  }
  const int64_t room[] = {rows * a.splits, (a.value_width + 15) / 16 * 16 + 2};
  const Tensor states = empty(like, Sizes(room, 2), accumulate_type(a.dtype));
  a.states = states.mutable_data_ptr();
  launch_queue(block_sparse_few, a, a.batch * a.key_heads * a.splits, work);
  launch(block_sparse_merge, a, like, rows, a.splits * a.value_width);
}

std::tuple<Tensor, Tensor> block_sparse(
    Tensor q, Tensor k, Tensor v, OptionalTensor sinks, OptionalTensor bias, OptionalTensor rows,
    OptionalTensor row_entries, OptionalTensor columns, OptionalTensor column_entries,
    OptionalTensor masks, OptionalTensor padding, OptionalTensor slopes, int64_t bias_row,
    int64_t block, int64_t group, double scale, bool causal, double softcap, double p,
    OptionalTensor seed, OptionalShape whole, OptionalShape offset) {
  Arguments tensors{adjacent(q), adjacent(k), adjacent(v), sinks,   bias,           slopes,
                    padding,     rows,        row_entries, columns, column_entries, masks};
  BlockSparseForward args{};
  tensors.fill(args, bias_row, block, group, scale, causal, softcap, p, seed, Place{whole, offset});
  const Sizes leading = leading_sizes(q, 1);
  Shape sizes(leading.begin(), leading.end());
  sizes.push_back(args.value_width);
  Tensor y = empty(q, Sizes(sizes.data(), sizes.size()), q.scalar_type());
  Tensor lse = empty(q, leading, accumulate_type(args.dtype));
  args.y = y.mutable_data_ptr();
  args.lse = lse.mutable_data_ptr();
  if (args.queries <= kFewQueries) {
    attend_few(args, q);
  } else {
    std::vector<Tensor> owners;
    args.turned_v = share_tiles(args, v, args.rows.count * group, owners);
    launch_queue(block_sparse_forward, args, tiles(args, args.rows.count, args.heads),
                 elements(args));
  }
  return {y, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> block_sparse_grads(
    OptionalTensor grad_y, OptionalTensor grad_lse, Tensor q, Tensor k, Tensor v,
    OptionalTensor sinks, OptionalTensor bias, OptionalTensor rows, OptionalTensor row_entries,
    OptionalTensor columns, OptionalTensor column_entries, OptionalTensor masks,
    OptionalTensor padding, OptionalTensor slopes, int64_t bias_row, int64_t block, int64_t group,
    double scale, bool causal, double softcap, double p, OptionalTensor seed, OptionalShape whole,
    OptionalShape offset, Tensor y, Tensor lse, bool need_q, bool need_k, bool need_v,
    bool need_sinks, bool need_bias) {
  Arguments tensors{adjacent(q), adjacent(k), adjacent(v), sinks,   bias,           slopes,
                    padding,     rows,        row_entries, columns, column_entries, masks};
  BlockSparseBackward args{};
  tensors.fill(args, bias_row, block, group, scale, causal, softcap, p, seed, Place{whole, offset});
  tensors.fill_columns(args);
  const ScalarType wide = accumulate_type(args.dtype);
  const Sizes leading = leading_sizes(q, 1);
  Shape sizes(leading.begin(), leading.end());
  sizes.push_back(args.value_width);
  const Sizes like_y(sizes.data(), sizes.size());
  STD_TORCH_CHECK(same_sizes(y.sizes(), like_y) && y.scalar_type() == q.scalar_type() &&
                      same_sizes(lse.sizes(), leading) && lse.scalar_type() == wide,
                  "y and lse are not those of the forward pass");
  if (!grad_y) {
    grad_y = empty(q, like_y, q.scalar_type());
    torch::stable::fill_(*grad_y, 0);
  }
  STD_TORCH_CHECK(same_sizes(grad_y->sizes(), like_y) && grad_y->scalar_type() == q.scalar_type() &&
                      same_device(*grad_y, q),
                  "grad_y does not fit what the forward pass saved");
  const Tensor grad = adjacent(*grad_y), saved = make_contiguous(y),
               statistics = make_contiguous(lse);
  if (grad_lse) {
    STD_TORCH_CHECK(same_sizes(grad_lse->sizes(), leading) && grad_lse->scalar_type() == wide,
                    "grad_lse does not fit what the forward pass saved");
    grad_lse = make_contiguous(grad_lse);
  }
  args.grad_y = heads_of(grad);
  args.y = data(saved);
  args.lse = data(statistics);
  args.grad_lse = data(grad_lse);
  Tensor delta = empty(q, leading, wide);
  args.delta = delta.mutable_data_ptr();
  launch(block_sparse_delta, args, q, args.batch * args.heads * args.queries, args.value_width);

  const auto like = [&](const Tensor& x, bool need, void*& to) {
    Tensor result = need ? empty(x, x.sizes(), x.scalar_type()) : nothing(x);
    to = need ? result.mutable_data_ptr() : nullptr;
    return result;
  };
  Tensor grad_q = like(q, need_q, args.grad_q), grad_k = like(k, need_k, args.grad_k);
  Tensor grad_v = like(v, need_v, args.grad_v), grad_sinks = nothing(q);
  need_bias = need_bias && bias;
  Tensor grad_bias = nothing(q), sums = nothing(q);
  int64_t groups = tiles(args, args.rows.count, args.heads);
  if (need_bias) grad_bias = prepare_grad_bias(args, *bias, q, wide, groups, sums);
  if (need_q || need_bias) {
    std::vector<Tensor> owners;
    if (need_q) args.turned_k = share_tiles(args, k, args.rows.count * group, owners);
    launch_queue(block_sparse_grad_q, args, groups, elements(args));
  }
  if (need_bias) {
    if (args.bias_row) {
      launch(block_sparse_grad_distances, args, q, args.bias_heads,
             args.bias_parts * args.distances);
    }
    grad_bias = as_type(grad_bias, bias->scalar_type());
  }
  if (need_k || need_v) {
    std::vector<Tensor> owners;
    args.turned_q = share_tiles(args, q, args.columns.count, owners);
    args.turned_grad = share_tiles(args, grad, args.columns.count, owners);
    launch_queue(block_sparse_grad_kv, args, tiles(args, args.columns.count, args.key_heads),
                 elements(args));
  }
  if (sinks && need_sinks) {
    Tensor sums = empty(q, sinks->sizes(), wide);
    args.grad_sinks = sums.mutable_data_ptr();
    launch(block_sparse_grad_sinks, args, q, args.heads, args.batch * args.queries);
    grad_sinks = as_type(sums, sinks->scalar_type());
  }
  return {grad_q, grad_k, grad_v, grad_sinks, grad_bias};
}

}  // namespace

TW_IMPLEMENT(m) {
  m.impl(TW_OVERLOAD("block_sparse_attention"), TW_BOX(&block_sparse));
  m.impl(TW_OVERLOAD("block_sparse_attention_backward"), TW_BOX(&block_sparse_grads));
}

}  // namespace torchweld
