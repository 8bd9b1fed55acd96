// Shared by the bindings of ops with rows, masks and dropout: builds a RowMap from sizes and
// strides, and a Dropout from an op's arguments.
#pragma once

#include "bind/tensor.h"
#include "core/dropout.h"

namespace torchweld {

inline Sizes leading_sizes(const Tensor& x, size_t trailing) {
  const size_t rank = x.sizes().size();
  return Sizes(x.sizes().data(), rank > trailing ? rank - trailing : 0);
}

inline int64_t product(Sizes sizes) {
  int64_t n = 1;
  for (int64_t size : sizes) n *= size;
  return n;
}

// A map for rows of these sizes and strides, or nullopt if too many dimensions remain after
// merging.
inline std::optional<RowMap> row_map(Sizes sizes, const std::vector<int64_t>& strides,
                                     int64_t offset) {
  RowMap map;
  map.offset = offset;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 1) continue;
    const int last = map.dims - 1;
    if (map.dims > 0 && map.stride[last] == sizes[i] * strides[i]) {
      map.size[last] *= sizes[i];
      map.stride[last] = strides[i];
      continue;
    }
    if (map.dims == RowMap::kDims) return std::nullopt;
    map.size[map.dims] = sizes[i];
    map.stride[map.dims++] = strides[i];
  }
  return map;
}

// The position of x in a whole tensor of sizes `whole`. Without sizes and offset x is the whole
// tensor.
struct Place {
  Shape whole, offset;

  Place(const OptionalShape& whole, const OptionalShape& offset)
      : whole(whole.value_or(Shape{})), offset(offset.value_or(Shape{})) {}

  void check(const Tensor& x) const {
    const Sizes sizes = x.sizes();
    STD_TORCH_CHECK(whole.size() == offset.size(), "shard: sizes and offsets differ in length");
    STD_TORCH_CHECK(whole.empty() || whole.size() == sizes.size(), "shard is not of input's rank");
    for (size_t i = 0; i < whole.size(); ++i) {
      STD_TORCH_CHECK(offset[i] >= 0 && offset[i] + sizes[i] <= whole[i],
                      "shard: input does not fit into the whole");
    }
  }
};

// The dropout of an op whose rows are the last `trailing` dimensions of x. Only the last of these
// may be sharded.
inline Dropout dropout_of(const Tensor& x, size_t trailing, double p, const OptionalTensor& seed,
                          const Place& place) {
  STD_TORCH_CHECK(p >= 0 && p <= 1, "p is not between 0 and 1");
  place.check(x);
  Dropout dropout;
  if (p == 0) return dropout;
  STD_TORCH_CHECK(seed, "p is not 0 but there is no seed");
  STD_TORCH_CHECK(
      seed->scalar_type() == ScalarType::Long && seed->numel() == 1 && same_device(*seed, x),
      "seed is not one int64 on the device of input");
  dropout.seed = (const int64_t*)seed->const_data_ptr();
  dropout.threshold = (uint32_t)std::min(std::nearbyint(p * 0x1p16), 65535.0);
  dropout.scale = p == 1 ? 0 : 0x1p16 / (0x1p16 - dropout.threshold);
  const Sizes leading = leading_sizes(x, trailing);
  const Sizes whole =
      place.whole.empty() ? x.sizes() : Sizes(place.whole.data(), place.whole.size());
  std::vector<int64_t> strides(leading.size());
  int64_t stride = 1, first = 0;
  for (size_t i = leading.size(); i-- > 0; stride *= whole[i]) {
    strides[i] = stride;
    if (!place.offset.empty()) first += place.offset[i] * stride;
  }
  for (size_t i = leading.size(); i < whole.size(); ++i) {
    STD_TORCH_CHECK(i + 1 == whole.size() || whole[i] == x.sizes()[i],
                    "shard: of the columns' dimensions only the last may be a part");
  }
  if (!place.offset.empty()) dropout.column = place.offset.back();
  const auto rows = row_map(leading, strides, first);
  STD_TORCH_CHECK(rows, "shard: input is a part in too many dimensions");
  dropout.rows = *rows;
  return dropout;
}

}  // namespace torchweld
