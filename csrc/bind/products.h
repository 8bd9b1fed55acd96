// Products of matrices in blocks, each by a GEMM on one thread. Where the GEMM is of float32 and a
// factor of 16 bits, a thread converts panels of it; a 16-bit result is rounded once, at the end.
//
// Buffers of a thread: panels of kConverted numbers, and the float32 sums of a block.
#pragma once

#include "bind/launch.h"

namespace torchweld {

// Numbers of the factors that a thread converts at a time.
constexpr int64_t kConverted = 1 << 18;

// A matrix with any strides.
struct View {
  char* data;
  int64_t size[2], stride[2];

  View transposed() const { return {data, {size[1], size[0]}, {stride[1], stride[0]}}; }
  // `count` rows, or columns, from `first` on.
  View part(int axis, int64_t first, int64_t count, int64_t item) const {
    View view = *this;
    view.data += first * stride[axis] * item;
    view.size[axis] = count;
    return view;
  }
};

// A matrix of the last two dimensions; `at` is its place in the first one, if there are three.
inline View matrix_of(const Tensor& t, int64_t at) {
  const int64_t first = t.dim() - 2;
  View view{(char*)t.mutable_data_ptr(),
            {t.size(first), t.size(first + 1)},
            {t.stride(first), t.stride(first + 1)}};
  if (first) view.data += at * t.stride(0) * t.element_size();
  return view;
}

// out = alpha * left @ right + beta * start, or without start.
struct Block {
  View out, left, right;
  std::optional<View> start;
};

// What all blocks of a product share.
struct Product {
  ScalarType gemm, out, left, right, start;
  Device device;
  double alpha = 1, beta = 1;
};

// The steps of `size`: a power of two of them, nearly equal, so that threads get as much each.
int64_t find_step(int64_t size, int64_t most);

// Threads take blocks in turn. The blocks must not depend on the number of threads: the bits then do
// not either.
void multiply_blocks(const std::vector<Block>& blocks, const Product& product);

}  // namespace torchweld
