// Transposes a 16-bit matrix on the CPU, or copies its lower triangle to the upper one.
//
// Bytes: a transposition reads x and writes y once, 2 x rows x columns x 2; a mirror half as many.
//
// Blocks of 64 x 64 are transposed on the stack, so that every cache line of x is read once and
// every line of y is written once, whole. A direct copy would access each line in pieces. If the
// row stride of x or y is a power of two, those lines would also share one cache set and evict each
// other.
#include "core/transpose.h"

#include <algorithm>
#include <cstring>

#include "core/dispatch.h"

namespace {

using namespace torchweld;

// 8 x 8 tiles fit the registers of every instruction set. Wider registers would need cross-lane
// permutations, and memory is already the bottleneck.
constexpr int64_t kTile = 8;
typedef uint16_t Row __attribute__((vector_size(kTile * sizeof(uint16_t))));

#if defined(__clang__)
#define TW_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define TW_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Row{__VA_ARGS__})
#endif

// Interleave the first, or the second, halves of a and b.
inline Row zip_first(Row a, Row b) { return TW_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
inline Row zip_second(Row a, Row b) { return TW_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }

#undef TW_SHUFFLE

// An element's row and column take three bits each. Every round rotates these six bits by one.
inline void transpose_tile(const uint16_t* x, int64_t x_pitch, uint16_t* y, int64_t y_pitch) {
  Row tile[kTile], next[kTile];
  for (int64_t i = 0; i < kTile; ++i) std::memcpy(&tile[i], x + i * x_pitch, sizeof(Row));
  for (int round = 0; round < 3; ++round) {
    for (int64_t i = 0; i < kTile / 2; ++i) {
      next[2 * i] = zip_first(tile[i], tile[i + kTile / 2]);
      next[2 * i + 1] = zip_second(tile[i], tile[i + kTile / 2]);
    }
    std::memcpy(tile, next, sizeof tile);
  }
  for (int64_t i = 0; i < kTile; ++i) std::memcpy(y + i * y_pitch, &tile[i], sizeof(Row));
}

// Transposes a block. Height and width are compile-time constants if the block is whole. The last
// tile in either direction ends where the block ends, and overlaps the tile before it.
inline void transpose_block(const uint16_t* x, int64_t x_pitch, uint16_t* y, int64_t y_pitch,
                            int64_t height, int64_t width) {
  alignas(64) uint16_t transposed[kTransposeBlock][kTransposeBlock];
  if (height < kTile || width < kTile) {
    for (int64_t row = 0; row < height; ++row) {
      for (int64_t column = 0; column < width; ++column) {
        transposed[column][row] = x[row * x_pitch + column];
      }
    }
  } else {
    for (int64_t i = 0; i < height; i += kTile) {
      const int64_t row = std::min(i, height - kTile);
      for (int64_t j = 0; j < width; j += kTile) {
        const int64_t column = std::min(j, width - kTile);
        transpose_tile(x + row * x_pitch + column, x_pitch, &transposed[column][row],
                       kTransposeBlock);
      }
    }
  }
  for (int64_t column = 0; column < width; ++column) {
    std::memcpy(y + column * y_pitch, transposed[column], height * sizeof(uint16_t));
  }
}

}  // namespace

// Items are blocks of columns.
TW_EXPORT void transpose_16_bits(const Transpose& a, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = kTransposeBlock;
  for (int64_t column = begin * kBlock; column < end * kBlock; column += kBlock) {
    const int64_t width = std::min(kBlock, a.columns - column);
    for (int64_t row = 0; row < a.rows; row += kBlock) {
      const int64_t height = std::min(kBlock, a.rows - row);
      const uint16_t* x = (const uint16_t*)a.x + row * a.columns + column;
      uint16_t* y = (uint16_t*)a.y + column * a.rows + row;
      // The next block lies in other pages, which the hardware prefetcher does not follow.
      for (int64_t i = 0; i < kBlock; ++i) __builtin_prefetch(x + (kBlock + i) * a.columns);
      if (height == kBlock && width == kBlock) {
        transpose_block(x, a.columns, y, a.rows, kBlock, kBlock);
      } else {
        transpose_block(x, a.columns, y, a.rows, height, width);
      }
    }
  }
}

// Items are rows of blocks. Each goes to the column of blocks across the diagonal.
TW_EXPORT void mirror_16_bits(const Mirror& a, int64_t begin, int64_t end) {
  constexpr int64_t kBlock = kTransposeBlock;
  uint16_t* matrix = (uint16_t*)a.matrix;
  for (int64_t row = begin * kBlock; row < end * kBlock; row += kBlock) {
    const int64_t height = std::min(kBlock, a.size - row);
    for (int64_t column = 0; column < row; column += kBlock) {
      transpose_block(matrix + row * a.size + column, a.size, matrix + column * a.size + row,
                      a.size, height, kBlock);
    }
    for (int64_t i = 0; i < height; ++i) {
      for (int64_t j = 0; j < i; ++j) {
        matrix[(row + j) * a.size + row + i] = matrix[(row + i) * a.size + row + j];
      }
    }
  }
}
