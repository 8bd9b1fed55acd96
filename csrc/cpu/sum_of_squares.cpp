// The sum of the squares of gradients on the CPU. It reads each gradient once.
#include "cpu/optim.h"

namespace {

using namespace torchweld;

// The sum of the squares of the elements of blocks [begin, end).
template <class T>
double squares(const GradSquares& a, int64_t begin, int64_t end) {
  double sum = 0;
  int64_t at = step_tensor(a.tensors, a.count, begin);
  for (int64_t block = begin; block < end; ++block) {
    while (block >= a.tensors[at + 1].first_block) ++at;
    const StepTensor& t = a.tensors[at];
    const QuantBlock here = quant_block(block - t.first_block, t.width);
    const T* grad = (const T*)t.grad + here.begin;
    Vec<double> sums[2] = {};
    for_vectors<float>(here.count,
                       [&](int64_t i, auto place) { add_squares(sums, load(grad + i, place)); });
    sum += total(sums);
  }
  return sum;
}

}  // namespace

// Items are pieces of kSquarePiece blocks.
TW_EXPORT void grad_squares(const GradSquares& a, int64_t begin, int64_t end) {
  dispatch(a.dtype, a.dtype, [&](auto t, auto) {
    using T = typename decltype(t)::type;
    if constexpr (sizeof(T) <= sizeof(float)) {
      const int64_t blocks = a.tensors[a.count].first_block;
      for (int64_t piece = begin; piece < end; ++piece) {
        const int64_t first = piece * kSquarePiece, last = first + kSquarePiece;
        a.sums[piece] = squares<T>(a, first, last < blocks ? last : blocks);
      }
    }
  });
}
