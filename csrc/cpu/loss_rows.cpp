// The rows of a cross entropy on the CPU, see core/loss_rows.h.
//
// Bytes: forward reads the logits once, rows x width x size. The gradient reads and writes them
// once. A row is processed in blocks that stay in L1: a block's u are computed once, then summed.
// A row of 131072 floats stays in L2 between its statistics and its gradient where both are wanted.
#include "core/loss_rows.h"

#include "core/dispatch.h"
#include "core/log.h"
#include "cpu/vec.h"

namespace {

using namespace torchweld;

constexpr int64_t kBlock = 2048;
template <class A>
constexpr A kNothing = -__builtin_inff();
template <class A>
constexpr A kNaN = __builtin_nanf("");

// u of a row's logits, and du / dz.
template <class A, bool Capped>
struct Transform {
  A scale, cap, inverse_cap, inverse_temperature;

  Transform(const LossRows& a, int64_t row) {
    const A* inverse = (const A*)a.inverse_temperature;
    inverse_temperature = inverse ? inverse[row] : (A)1;
    cap = (A)a.softcap;
    scale = Capped ? (A)(a.scale / a.softcap) : (A)a.scale * inverse_temperature;
    inverse_cap = Capped ? (A)a.scale * inverse_temperature : scale;
  }
  template <class V>
  V operator()(V z) const {
    if constexpr (Capped) return Tanh::value(z * scale) * (cap * inverse_temperature);
    return z * scale;
  }
  // `u` and the slope together, since both need the hyperbolic tangent.
  template <class V>
  V with_slope(V z, V& slope) const {
    if constexpr (Capped) {
      const V t = Tanh::value(z * scale);
      slope = (1 - t) * (1 + t) * inverse_cap;
      return t * (cap * inverse_temperature);
    }
    slope = V{} + inverse_cap;
    return z * scale;
  }
};

// Whether target `t` is a column of the row.
inline bool is_column(int64_t t, int64_t width) { return t >= 0 && t < width; }

// Whether all targets of a row are ignored, so that nothing depends on it.
inline bool is_ignored(const LossRows& a, int64_t row) {
  const int64_t* target = a.target + row * a.targets;
  for (int64_t k = 0; k < a.targets; ++k) {
    if (target[k] != -1) return false;
  }
  return a.targets > 0;
}

template <class A>
void ignore_row(const LossRows& a, int64_t row) {
  A* statistics = (A*)a.statistics + row * kLossStatistics;
  for (int i = 0; i < kLossStatistics; ++i) statistics[i] = i == kSum;
  for (int64_t k = 0; k < a.targets; ++k) ((A*)a.picked)[row * a.targets + k] = 0;
  if (a.argmax) a.argmax[row] = -1;
}

// Stores u of a block's logits; returns the largest.
template <class T, bool Capped>
Accumulate<T> transform_block(const Transform<Accumulate<T>, Capped>& transform, const T* logits,
                              int64_t count, Accumulate<T>* u) {
  using A = Accumulate<T>;
  // Several, since each waits for its own last comparison.
  constexpr int64_t kAtOnce = 4, kStep = kAtOnce * kLanes<A>;
  Vec<A> lanes[kAtOnce];
  for (Vec<A>& each : lanes) each = splat(kNothing<A>);
  const auto take = [&](int64_t i, auto at, Vec<A>& most) {
    const Vec<A> value = present(transform(load(logits + i, at)), at, kNothing<A>);
    store(u + i, value);
    most = maximum<A>(value, most);
  };
  const int64_t whole = count / kStep * kStep;
  for (int64_t i = 0; i < whole; i += kStep) {
#pragma GCC unroll 4
    for (int64_t n = 0; n < kAtOnce; ++n) take(i + n * kLanes<A>, Whole{}, lanes[n]);
  }
  for_vectors<A>(count - whole, [&](int64_t i, auto at) { take(whole + i, at, lanes[0]); });
  const Vec<A> both = maximum<A>(maximum<A>(lanes[0], lanes[1]), maximum<A>(lanes[2], lanes[3]));
  A highest = both[0];
  for (int64_t k = 1; k < kLanes<A>; ++k) highest = both[k] > highest ? both[k] : highest;
  return highest;
}

// The sums of a row so far. Blocks are added in double, so that errors do not grow with the width.
struct Sums {
  double highest = -__builtin_inf(), sum = 0, entropy = 0, smooth = 0, dot = 0, mass = 0;

  // Moves the base of the exponentials to a new maximum.
  template <class A>
  void raise(A to) {
    if (sum != 0) {
      const double step = highest - to, factor = exp_nonpositive(step);
      entropy = factor == 0 ? 0 : factor * (entropy + step * sum);
      sum *= factor;
    }
    highest = to;
  }
};

template <class T, class Q, bool Capped>
void forward_row(const LossRows& a, int64_t row) {
  using A = Accumulate<T>;
  if (is_ignored(a, row)) return ignore_row<A>(a, row);
  const Transform<A, Capped> transform(a, row);
  const T* logits = (const T*)a.logits + row * a.width;
  const Q* q = row_of<Q>(a.probabilities, row, a.width);
  const A* weight = (const A*)a.weight;
  alignas(64) A u[kBlock + kLanes<A>];
  Sums sums;
  int64_t best = -1;
  for (int64_t begin = 0; begin < a.width; begin += kBlock) {
    const int64_t count = a.width - begin < kBlock ? a.width - begin : kBlock;
    const A highest = transform_block<T, Capped>(transform, logits + begin, count, u);
    if (best < 0 || highest > sums.highest) {
      if (a.argmax) {
        int64_t first = 0;
        while (first < count - 1 && !(u[first] == highest)) ++first;
        best = begin + first;
      }
      if (highest > sums.highest) sums.raise(highest);
    }
    // exp(-inf - 0) is 0, as wanted; exp(-inf - -inf) would be NaN.
    const A base = sums.highest == kNothing<A> ? 0 : (A)sums.highest;
    if (a.entropy) {
      A both[2];
      sum_vectors<A>(count, both, [&](int64_t i, auto at, Vec<A>* acc) {
        const Vec<A> x = present(load(u + i) - base, at, kNothing<A>);
        const Vec<A> e = exp_nonpositive(x);
        acc[0] += e;
        acc[1] += choose<A>(e == 0, Vec<A>{}, e * x);
      });
      sums.sum += both[0];
      sums.entropy += both[1];
    } else {
      A one[1];
      sum_vectors<A>(count, one, [&](int64_t i, auto at, Vec<A>* acc) {
        acc[0] += exp_nonpositive(present(load(u + i) - base, at, kNothing<A>));
      });
      sums.sum += one[0];
    }
    if (a.smooth) {
      A one[1];
      sum_vectors<A>(count, one, [&](int64_t i, auto at, Vec<A>* acc) {
        const Vec<A> x = present(load(u + i), at, (A)0);
        acc[0] += weight ? x * load(weight + begin + i, at) : x;
      });
      sums.smooth += one[0];
    }
    if (q) {
      A both[2];
      sum_vectors<A>(count, both, [&](int64_t i, auto at, Vec<A>* acc) {
        Vec<A> mass = load(q + begin + i, at);
        if (weight) mass *= load(weight + begin + i, at);
        acc[0] += choose<A>(mass == 0, Vec<A>{}, mass * present(load(u + i), at, (A)0));
        acc[1] += mass;
      });
      sums.dot += both[0];
      sums.mass += both[1];
    }
  }
  A* statistics = (A*)a.statistics + row * kLossStatistics;
  statistics[kHighest] = (A)sums.highest;
  statistics[kSum] = (A)sums.sum;
  statistics[kEntropySum] = (A)sums.entropy;
  statistics[kSmooth] = (A)sums.smooth;
  statistics[kDot] = (A)sums.dot;
  statistics[kMass] = (A)sums.mass;
  if (a.argmax) a.argmax[row] = best;
  for (int64_t k = 0; k < a.targets; ++k) {
    const int64_t t = a.target[row * a.targets + k];
    A* picked = (A*)a.picked + row * a.targets + k;
    if (is_column(t, a.width)) {
      *picked = transform(load(logits + t, Part{1}))[0];
    } else {
      *picked = t < 0 ? 0 : kNaN<A>;
    }
  }
}

template <class T, class Q, bool Capped>
void gradient_row(const LossRowsGradient& g, int64_t row) {
  using A = Accumulate<T>;
  const LossRows& a = g.rows;
  T* grad_logits = (T*)g.grad_logits + row * a.width;
  if (is_ignored(a, row)) {
    std::memset((void*)grad_logits, 0, a.width * sizeof(T));
    return;
  }
  const Transform<A, Capped> transform(a, row);
  const T* logits = (const T*)a.logits + row * a.width;
  const Q* q = row_of<Q>(a.probabilities, row, a.width);
  const A* weight = (const A*)a.weight;
  const A* statistics = (const A*)a.statistics + row * kLossStatistics;
  const A* coefficients = (const A*)g.coefficients + row * kLossCoefficients;
  const int64_t* target = a.target + row * a.targets;
  const A* grad_picked = (const A*)g.grad_picked + row * a.targets;
  const A log_sum = statistics[kSum] > 0 ? log_positive(statistics[kSum]) : statistics[kSum];
  const A highest = statistics[kHighest] == kNothing<A> ? 0 : statistics[kHighest];
  const A on_lse = coefficients[kOnLse];
  const A on_entropy = coefficients[kOnEntropy];
  const A on_smooth = coefficients[kOnSmooth], on_dot = coefficients[kOnDot];
  A on_p = coefficients[kOnP] + (on_lse == 0 ? 0 : on_lse * (highest + log_sum));
  if (q) on_p -= on_dot * statistics[kMass];
  for (int64_t k = 0; k < a.targets; ++k) {
    if (target[k] >= a.width) on_p = kNaN<A>;
  }
  alignas(64) A gradient[kBlock + kLanes<A>], slopes[Capped ? kBlock + kLanes<A> : 1];
  const auto derive = [&](int64_t begin, int64_t count, auto plain) {
    for_vectors<A>(count, [&](int64_t i, auto at) {
      Vec<A> slope;
      const Vec<A> u = transform.with_slope(load(logits + begin + i, at), slope);
      const Vec<A> log_p = (u - highest) - log_sum;
      const Vec<A> p = exp_nonpositive(log_p);
      Vec<A> du = p * on_p;
      if constexpr (!plain) {
        if (on_entropy != 0) du += choose<A>(p == 0, Vec<A>{}, p * log_p * on_entropy);
        if (on_smooth != 0)
          du += weight ? load(weight + begin + i, at) * on_smooth : splat(on_smooth);
        if (q) {
          Vec<A> mass = load(q + begin + i, at);
          if (weight) mass *= load(weight + begin + i, at);
          du += mass * on_dot;
        }
      }
      store(gradient + i, du * slope);
      if constexpr (Capped) store(slopes + i, slope);
    });
  };
  const bool plain = on_entropy == 0 && on_smooth == 0 && !q;
  for (int64_t begin = 0; begin < a.width; begin += kBlock) {
    const int64_t count = a.width - begin < kBlock ? a.width - begin : kBlock;
    if (plain) {
      derive(begin, count, std::true_type{});
    } else {
      derive(begin, count, std::false_type{});
    }
    for (int64_t k = 0; k < a.targets; ++k) {
      const int64_t at = target[k] - begin;
      if (target[k] < 0 || at < 0 || at >= count) continue;
      gradient[at] += grad_picked[k] * (Capped ? slopes[at] : transform.inverse_cap);
    }
    for_vectors<A>(count, [&](int64_t i, auto at) {
      store(grad_logits + begin + i, normal_or_zero<A>(load(gradient + i)), at);
    });
  }
}

// call(t, q, capped) with the logits' type, the probabilities' and whether there is a soft cap.
template <class Call>
void with_types(const LossRows& a, Call&& call) {
  dispatch(a.dtype, a.probabilities_dtype, [&](auto t, auto q) {
    if (a.softcap != 0) {
      call(t, q, std::true_type{});
    } else {
      call(t, q, std::false_type{});
    }
  });
}

}  // namespace

// Items are rows.
TW_EXPORT void loss_rows(const LossRows& a, int64_t begin, int64_t end) {
  with_types(a, [&](auto t, auto q, auto capped) {
    for (int64_t row = begin; row < end; ++row) {
      forward_row<typename decltype(t)::type, typename decltype(q)::type, capped.value>(a, row);
    }
  });
}

TW_EXPORT void loss_rows_gradient(const LossRowsGradient& g, int64_t begin, int64_t end) {
  with_types(g.rows, [&](auto t, auto q, auto capped) {
    using T = typename decltype(t)::type;
    using Q = typename decltype(q)::type;
    for (int64_t row = begin; row < end; ++row) {
      if (g.fused) forward_row<T, Q, capped.value>(g.rows, row);
      gradient_row<T, Q, capped.value>(g, row);
    }
  });
}
