// One bit for each element: whether it is >= 0. A block of elements shares one scale, the root of
// their mean square. A set bit stands for the scale, a clear one for minus the scale.
//
// Bit 7 of a byte, the most significant, is the first of its eight elements. Bits past the last
// element are clear and take no part in a scale.
#pragma once

#include <cmath>

#include "core/dtype.h"

TW_NAMESPACE_BEGIN

// Partial sums cover pieces of this many elements. A piece lies within one block.
constexpr int64_t kOneBitPiece = 8192;

// How elements divide into blocks, and blocks into pieces. There is always at least one block, even
// without elements. `block` is a multiple of 8.
struct OneBitShape {
  int64_t size, block;

  TW_HD int64_t blocks() const { return size == 0 ? 1 : (size + block - 1) / block; }
  TW_HD int64_t bytes() const { return (size + 7) / 8; }
  TW_HD int64_t pieces_of_block() const { return (block + kOneBitPiece - 1) / kOneBitPiece; }
  // The elements of a block.
  TW_HD int64_t count(int64_t of_block) const {
    const int64_t left = size - of_block * block;
    return left < block ? left : block;
  }
  // The first piece of a block. Only the last block may have fewer than the others.
  TW_HD int64_t first_piece(int64_t of_block) const {
    if (of_block < blocks()) return of_block * pieces_of_block();
    const int64_t last = of_block - 1;
    return last * pieces_of_block() + (count(last) + kOneBitPiece - 1) / kOneBitPiece;
  }
  TW_HD int64_t pieces() const { return first_piece(blocks()); }
};

// The elements [begin, begin + count) of a piece, and the block that it lies in.
struct OneBitPiece {
  int64_t begin, count, block;

  TW_HD OneBitPiece(const OneBitShape& shape, int64_t piece) {
    const int64_t of_block = shape.pieces_of_block();
    block = piece / of_block;
    const int64_t within = (piece - block * of_block) * kOneBitPiece;
    const int64_t left = shape.count(block) - within;
    begin = block * shape.block + within;
    count = left < kOneBitPiece ? left : kOneBitPiece;
  }
};

TW_HD float one_bit_scale(double sum_of_squares, int64_t count) {
  return count == 0 ? 0.0f : (float)sqrt(sum_of_squares / (double)count);
}

// The bits and scales that workers sent. Their mean can be quantised in place of x.
struct Votes {
  const uint8_t* bits;  // [workers, bytes]
  const float* scale;   // [workers, blocks]
  int64_t workers;
};

struct Quantize1 {
  const void* x;  // dtype; or null to quantise the mean of the votes
  Votes votes;
  const void* error;  // error_dtype, added to the source before quantising; or null
  void* new_error;    // the quantisation error; may be `error`
  uint8_t* bits;
  float* scale;
  double* sums;  // of squares, one per piece
  OneBitShape shape;
  DType dtype, error_dtype;
};

struct Dequantize1 {
  const uint8_t* bits;
  const float* scale;
  void* y;  // dtype
  OneBitShape shape;
  DType dtype;
};

TW_NAMESPACE_END
