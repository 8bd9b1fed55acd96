// Softmax with scale, mask and dropout on the CPU.
//
// Bytes: forward reads the scores and writes y, 2 x rows x width x size, and reads the mask if
// there is one. Backward reads grad_y and y (or the scores, with dropout) and writes grad_scores, 3
// x rows x width x size. Each row is read from memory once. A scratch row in L1 or L2 keeps its
// exponentials and, in the backward pass, the gradients that dropout kept.
#include "core/softmax.h"

#include <type_traits>

#include "core/dispatch.h"
#include "core/exp.h"
#include "cpu/dropout.h"
#include "cpu/scratch.h"
#include "cpu/vec.h"

namespace {

using namespace torchweld;

template <class A>
constexpr A kExcluded = -__builtin_inff();

// --- Masks: turn a scaled score into a masked one ---

struct Unmasked {
  template <class V, class Place>
  V operator()(V z, int64_t, Place) const {
    return z;
  }
};

template <class A>
struct Boolean {
  const uint8_t* mask;
  int64_t stride;

  template <class Place>
  Vec<A> operator()(Vec<A> z, int64_t i, Place at) const {
    return choose<A>(included(i, at), z, splat(kExcluded<A>));
  }
  Bits<A> included(int64_t i, Whole) const {
    if (!stride) return Bits<A>{} - (*mask != 0);
    Bits<A> bits;  // a plain loop: gcc widens it better than it converts vectors of bytes
    for (int64_t k = 0; k < kLanes<A>; ++k) bits[k] = -(mask[i + k] != 0);
    return bits;
  }
  Bits<A> included(int64_t i, Part part) const {
    Bits<A> bits = {};
    for (int64_t k = 0; k < part.count; ++k) bits[k] = -(mask[(i + k) * stride] != 0);
    return bits;
  }
};

template <class A, class M>
struct Additive {
  const M* mask;
  int64_t stride;

  template <class Place>
  Vec<A> operator()(Vec<A> z, int64_t i, Place at) const {
    if (stride) return z + load(mask + i, at);
    return z + load(mask, Part{1})[0];
  }
};

// call(mask) with the mask for a row.
template <class T, class Call>
void with_mask(const ScoreMask& mask, int64_t row, Call&& call) {
  using A = Accumulate<T>;
  if (mask.kind == MaskKind::none) return call(Unmasked{});
  const int64_t at = mask.rows(row);
  if (mask.kind == MaskKind::boolean) {
    return call(Boolean<A>{(const uint8_t*)mask.data + at, mask.stride});
  }
  dispatch(mask.dtype, mask.dtype, [&](auto m, auto) {
    using M = typename decltype(m)::type;
    if constexpr (std::is_same_v<M, T> || (std::is_same_v<M, float> && sizeof(T) == 2)) {
      call(Additive<A, M>{(const M*)mask.data + at, mask.stride});
    }
  });
}

// --- Rows ---

// The largest z of a row's visible keys.
template <class T, class Mask>
Accumulate<T> highest_score(const T* scores, Accumulate<T> scale, const Mask& masked,
                            int64_t keys) {
  using A = Accumulate<T>;
  Vec<A> lanes[2] = {splat(kExcluded<A>), splat(kExcluded<A>)};  // two shorten the dependency chain
  int64_t turn = 0;
  for_vectors<A>(keys, [&](int64_t i, auto at) {
    const Vec<A> z = present(masked(load(scores + i, at) * scale, i, at), at, kExcluded<A>);
    Vec<A>& lane = lanes[turn++ & 1];
    lane = maximum<A>(z, lane);
  });
  const Vec<A> both = maximum<A>(lanes[0], lanes[1]);
  A highest = kExcluded<A>;
  for (int64_t k = 0; k < kLanes<A>; ++k) highest = both[k] > highest ? both[k] : highest;
  // exp(-inf - 0) is 0, as wanted; exp(-inf - -inf) would be NaN.
  return highest == kExcluded<A> ? 0 : highest;
}

// Fills the row from column `begin` to its end.
template <class T>
void fill(T* row, int64_t begin, int64_t width, Accumulate<T> value, bool streamed) {
  using A = Accumulate<T>;
  constexpr int64_t kStep = kLanes<A>;
  const int64_t boundary = (begin + kStep - 1) / kStep * kStep;
  const int64_t whole = boundary < width ? boundary : width;
  if (begin < whole) store(row + begin, splat(value), Part{whole - begin});
  for_vectors<A>(width - whole,
                 [&](int64_t i, auto at) { write(row + whole + i, splat(value), at, streamed); });
}

template <class T>
void forward_row(const SoftmaxForward& a, int64_t row, Accumulate<T>* scratch, bool streamed) {
  using A = Accumulate<T>;
  const T* scores = (const T*)a.scores + row * a.width;
  T* y = (T*)a.y + row * a.width;
  const int64_t keys = visible_keys(a.causal, row, a.width);
  const A scale = (A)a.scale;
  A highest = 0;
  A sum[1];
  with_mask<T>(a.mask, row, [&](auto&& masked) {
    highest = highest_score(scores, scale, masked, keys);
    sum_vectors<A>(keys, sum, [&](int64_t i, auto at, Vec<A>* acc) {
      const Vec<A> z = masked(load(scores + i, at) * scale, i, at);
      const Vec<A> e = exp_nonpositive(present(z, at, kExcluded<A>) - highest);
      store(scratch + i, e);
      acc[0] += e;
    });
  });
  const A inverse = softmax_inverse(sum[0], a.mask, a.causal);
  with_factors<A>(a.dropout, row, [&](auto&& factor) {
    for_vectors<A>(keys, [&](int64_t i, auto at) {
      __builtin_prefetch(scores + a.width + i);  // prefetch the next row while this one is in L1
      write(y + i, load(scratch + i) * inverse * factor(i), at, streamed);
    });
  });
  fill(y, keys, a.width, 0 * inverse, streamed);  // NaN if the row is NaN
  if (a.statistics) {
    ((A*)a.statistics)[2 * row] = highest;
    ((A*)a.statistics)[2 * row + 1] = inverse;
  }
}

// Computes the gradient from y.
template <class T>
void backward_row_of_y(const SoftmaxBackward& a, int64_t row, bool streamed) {
  using A = Accumulate<T>;
  const T* grad_y = (const T*)a.grad_y + row * a.width;
  const T* y = (const T*)a.y + row * a.width;
  T* grad_scores = (T*)a.grad_scores + row * a.width;
  const int64_t keys = visible_keys(a.causal, row, a.width);
  A dot[1];
  sum_vectors<A>(keys, dot, [&](int64_t i, auto at, Vec<A>* acc) {
    acc[0] += load(grad_y + i, at) * load(y + i, at);
  });
  for_vectors<A>(keys, [&](int64_t i, auto at) {
    __builtin_prefetch(grad_y + a.width + i);
    __builtin_prefetch(y + a.width + i);
    const Vec<A> gradient = load(y + i, at) * (load(grad_y + i, at) - dot[0]);
    write(grad_scores + i, gradient * (A)a.scale, at, streamed);
  });
  fill(grad_scores, keys, a.width, (A)0, streamed);
}

// Computes the gradient from the scores: y lacks the dropped elements.
template <class T>
void backward_row_of_scores(const SoftmaxBackward& a, int64_t row, Accumulate<T>* softmax,
                            Accumulate<T>* g, bool streamed) {
  using A = Accumulate<T>;
  const T* grad_y = (const T*)a.grad_y + row * a.width;
  const T* scores = (const T*)a.scores + row * a.width;
  T* grad_scores = (T*)a.grad_scores + row * a.width;
  const A highest = ((const A*)a.statistics)[2 * row];
  const A inverse = ((const A*)a.statistics)[2 * row + 1];
  const int64_t keys = inverse == 0 ? 0 : visible_keys(a.causal, row, a.width);
  DropoutFactors<A> kept(a.dropout, row);
  A dot[1];
  with_mask<T>(a.mask, row, [&](auto&& masked) {
    sum_vectors<A>(keys, dot, [&](int64_t i, auto at, Vec<A>* acc) {
      const Vec<A> z = masked(load(scores + i, at) * (A)a.scale, i, at);
      const Vec<A> s = exp_nonpositive(present(z, at, kExcluded<A>) - highest) * inverse;
      const Vec<A> gradient = load(grad_y + i, at) * kept(i);
      store(softmax + i, s);
      store(g + i, gradient);
      acc[0] += s * gradient;
    });
  });
  for_vectors<A>(keys, [&](int64_t i, auto at) {
    __builtin_prefetch(grad_y + a.width + i);
    __builtin_prefetch(scores + a.width + i);
    const Vec<A> gradient = load(softmax + i) * (load(g + i) - dot[0]);
    write(grad_scores + i, gradient * (A)a.scale, at, streamed);
  });
  fill(grad_scores, keys, a.width, (A)0, streamed);
}

}  // namespace

// Items are rows.
TW_EXPORT void softmax_dropout_forward(const SoftmaxForward& a, int64_t begin, int64_t end) {
  dispatch(a.dtype, a.dtype, [&](auto t, auto) {
    using T = typename decltype(t)::type;
    const bool streamed = worth_streaming<T>(a.y, a.rows, a.width, end - 1);
    Scratch<Accumulate<T>> scratch(a.width);
    for (int64_t row = begin; row < end; ++row) {
      forward_row<T>(a, row, scratch, streamed);
    }
    if (streamed) finish_streams();
  });
}

TW_EXPORT void softmax_dropout_backward(const SoftmaxBackward& a, int64_t begin, int64_t end) {
  dispatch(a.dtype, a.dtype, [&](auto t, auto) {
    using T = typename decltype(t)::type;
    using A = Accumulate<T>;
    const bool streamed = worth_streaming<T>(a.grad_scores, a.rows, a.width, end - 1);
    const int64_t width = a.y ? 0 : a.width;
    Scratch<A> softmax(width), g(width);
    for (int64_t row = begin; row < end; ++row) {
      if (a.y) {
        backward_row_of_y<T>(a, row, streamed);
      } else {
        backward_row_of_scores<T>(a, row, softmax, g, streamed);
      }
    }
    if (streamed) finish_streams();
  });
}
