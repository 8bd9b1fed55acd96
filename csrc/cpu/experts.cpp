// What the experts of a mixture compute between their GEMMs, on the CPU.
//
// Bytes: the forward pass reads z and writes the hidden layer. The backward pass reads z and grad,
// and writes grad_z and the hidden layer over grad. The sums read each row once, and read and write
// each token's sum, which stays in the caches.
#include "core/experts.h"

#include "cpu/activation.h"
#include "cpu/vec.h"

namespace {

using namespace torchweld;

// The limits of gated rows, infinite if there are none.
template <class A>
struct Limits {
  A high, offset;

  explicit Limits(const ExpertsAct& a) : high((A)a.limit), offset((A)a.up_offset) {}

  // NaN stays NaN.
  Vec<A> gate(Vec<A> z) const { return choose<A>(z > high, Vec<A>{} + high, z); }
  Vec<A> up(Vec<A> z) const { return choose<A>(z < -high, Vec<A>{} - high, gate(z)) + offset; }
};

template <class T, class Act>
void forward_row(const ExpertsAct& a, int64_t row, Act act) {
  using A = Accumulate<T>;
  const Limits<A> limits(a);
  const T* z = (const T*)a.z + row * a.width * (a.gated ? 2 : 1);
  T* hidden = (T*)a.hidden + row * a.width;
  for_vectors<A>(a.width, [&](int64_t i, auto at) {
    const Vec<A> gate = load(z + i, at);
    if (a.gated) {
      const Vec<A> up = limits.up(load(z + a.width + i, at));
      store(hidden + i, act.value(limits.gate(gate)) * up, at);
    } else {
      store(hidden + i, act.value(gate), at);
    }
  });
}

template <class T, class Act>
void backward_row(const ExpertsAct& a, int64_t row, Act act) {
  using A = Accumulate<T>;
  const Limits<A> limits(a);
  const int64_t begin = row * a.width * (a.gated ? 2 : 1);
  const T* z = (const T*)a.z + begin;
  const T* grad = (const T*)a.grad + row * a.width;
  T* grad_z = (T*)a.grad_z + begin;
  T* hidden = (T*)a.hidden + row * a.width;
  const A scale = a.scale ? ((const A*)a.scale)[row] : 1;
  A sums[1];
  sum_vectors<A>(a.width, sums, [&](int64_t i, auto at, Vec<A>* sum) {
    const Vec<A> from = load(grad + i, at), scaled = from * scale;
    const Vec<A> first = load(z + i, at);
    Vec<A> made;
    if (a.gated) {
      const Vec<A> second = load(z + a.width + i, at);
      const Vec<A> gate = limits.gate(first), up = limits.up(second), value = act.value(gate);
      made = value * up;
      const Vec<A> zero = {};
      store(grad_z + i, choose<A>(first > limits.high, zero, act.gradient(gate, scaled * up)), at);
      const Vec<A> size = magnitude(second);
      store(grad_z + a.width + i, choose<A>(size > limits.high, zero, scaled * value), at);
    } else {
      made = act.value(first);
      store(grad_z + i, act.gradient(first, scaled), at);
    }
    sum[0] += from * made;
    store(hidden + i, made * scale, at);
  });
  ((A*)a.grad_scale)[row] = sums[0];
}

}  // namespace

// Items are rows.
TW_EXPORT void experts_act_forward(const ExpertsAct& a, int64_t begin, int64_t end) {
  dispatch_all(a.activation, a.dtype, a.dtype, [&](auto t, auto, auto act) {
    for (int64_t row = begin; row < end; ++row)
      forward_row<typename decltype(t)::type>(a, row, act);
  });
}

// Items are rows.
TW_EXPORT void experts_act_backward(const ExpertsAct& a, int64_t begin, int64_t end) {
  dispatch_all(a.activation, a.dtype, a.dtype, [&](auto t, auto, auto act) {
    for (int64_t row = begin; row < end; ++row) {
      backward_row<typename decltype(t)::type>(a, row, act);
    }
  });
}

// Items are tokens.
TW_EXPORT void experts_sum(const ExpertsSum& a, int64_t begin, int64_t end) {
  dispatch(a.dtype, a.dtype, [&](auto t, auto) {
    using T = typename decltype(t)::type;
    using A = Accumulate<T>;
    for (int64_t token = begin; token < end; ++token) {
      A* sums = (A*)a.sums + token * a.width;
      for (int64_t k = 0; k < a.top; ++k) {
        const int64_t place = a.places[token * a.top + k] - a.first;
        if (place < 0 || place >= a.count) continue;
        const T* row = (const T*)a.rows + place * a.width;
        const A scale = a.scale ? ((const A*)a.scale)[place] : 1;
        for_vectors<A>(a.width, [&](int64_t i, auto at) {
          store(sums + i, load(sums + i, at) + load(row + i, at) * scale, at);
        });
      }
    }
  });
}
