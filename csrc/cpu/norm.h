// One row of LayerNorm or RMSNorm, forward and backward, shared by the plain and the residual
// norms. X is the storage type of the normalised row, and T the storage type of y and grad_y.
#pragma once

#include "core/norm.h"
#include "cpu/chunks.h"
#include "cpu/vec.h"

TW_NAMESPACE_BEGIN

template <class A>
struct RowStatistics {
  A mean, rstd;
};

// The statistics of a row, and of the same row rounded to Saved. They are equal unless Saved has
// fewer bits than X.
template <bool Centered, class Saved, class X>
struct Statistics {
  using A = Accumulate<X>;
  static constexpr int kRows = sizeof(Saved) < sizeof(X) ? 2 : 1;
  RowStatistics<A> of[kRows];

  Statistics(const X* x, int64_t width, A eps) {
    A sums[kRows] = {};
    if constexpr (Centered) {
      sum_vectors<A>(width, sums, [&](int64_t i, auto at, Vec<A>* acc) {
        const Vec<A> v = load(x + i, at);
        acc[0] += v;
        if constexpr (kRows == 2) acc[1] += round_trip<Saved>(v);
      });
    }
    for (int n = 0; n < kRows; ++n) of[n].mean = sums[n] / (A)width;
    // Sum the squares of x minus the mean: a difference of two large sums would cancel.
    sum_vectors<A>(width, sums, [&](int64_t i, auto at, Vec<A>* acc) {
      const Vec<A> v = load(x + i, at);
      const auto add = [&](int n, Vec<A> value) {
        const Vec<A> centered = present(value - of[n].mean, at, (A)0);
        acc[n] += centered * centered;
      };
      add(0, v);
      if constexpr (kRows == 2) add(1, round_trip<Saved>(v));
    });
    for (int n = 0; n < kRows; ++n) of[n].rstd = 1 / square_root(sums[n] / (A)width + eps);
  }

  const RowStatistics<A>& exact() const { return of[0]; }
  const RowStatistics<A>& saved() const { return of[kRows - 1]; }
};

// Computes y = finish(i, place, x_hat) from a row x, and the statistics of the row that the backward
// pass reads, which is x as a Saved. Calls prefetch(i) when it writes y's columns from i on.
template <bool Centered, class T, class Saved, class X, class Finish, class Prefetch>
inline void normalize_row_by(const NormForward& a, int64_t row, const X* x, bool streamed,
                             Finish&& finish, Prefetch&& prefetch) {
  using A = Accumulate<T>;
  T* y = (T*)a.y + row * a.width;

  const Statistics<Centered, Saved, X> statistics(x, a.width, (A)a.eps);
  const auto [mean, rstd] = statistics.exact();
  for_vectors<A>(a.width, [&](int64_t i, auto at) {
    const Vec<A> v = finish(i, at, norm_normalize(load(x + i, at), splat(mean), splat(rstd)));
    prefetch(i);
    write(y + i, v, at, streamed);
  });
  if constexpr (Centered) ((A*)a.mean)[row] = statistics.saved().mean;
  ((A*)a.rstd)[row] = statistics.saved().rstd;
}

// The same with y = x_hat * weight + bias.
template <bool Centered, class T, class P, class Saved, class X, class Prefetch>
inline void normalize_row(const NormForward& a, int64_t row, const X* x, bool streamed,
                          Prefetch&& prefetch) {
  const P* weight = (const P*)a.weight;
  const P* bias = (const P*)a.bias;
  const auto finish = [&](int64_t i, auto at, Vec<Accumulate<T>> v) {
    if (weight) v *= load(weight + i, at);
    if (bias) v += load(bias + i, at);
    return v;
  };
  normalize_row_by<Centered, T, Saved>(a, row, x, streamed, finish, prefetch);
}

// Computes the gradient of a row of a.x and passes it to finish(i, place, gradient) in vectors, where
// weigh(i, place, grad_y) is the gradient of x_hat. Adds the row's share of the parameter gradients
// to the chunk's partials.
template <bool Centered, class X, class T, class Weigh, class Finish>
inline void differentiate_row_by(const NormBackward& a, int64_t row, Accumulate<T>* weight_partial,
                                 Accumulate<T>* bias_partial, Weigh&& weigh, Finish&& finish) {
  using A = Accumulate<T>;
  const T* grad_y = (const T*)a.grad_y + row * a.width;
  const X* x = (const X*)a.x + row * a.width;
  const Vec<A> mean = splat(Centered ? ((const A*)a.mean)[row] : 0);
  const Vec<A> rstd = splat(((const A*)a.rstd)[row]);

  A sums[2];  // sums of g and of g * x_hat
  sum_vectors<A>(a.width, sums, [&](int64_t i, auto at, Vec<A>* acc) {
    const Vec<A> g = weigh(i, at, load(grad_y + i, at));
    if constexpr (Centered) acc[0] += g;
    acc[1] += present(g * norm_normalize(load(x + i, at), mean, rstd), at, (A)0);
  });
  const Vec<A> mean_g = splat(sums[0] / (A)a.width);
  const Vec<A> mean_g_x_hat = splat(sums[1] / (A)a.width);

  for_vectors<A>(a.width, [&](int64_t i, auto at) {
    const Vec<A> gradient = load(grad_y + i, at);
    const Vec<A> x_hat = norm_normalize(load(x + i, at), mean, rstd);
    const Vec<A> g = weigh(i, at, gradient);
    __builtin_prefetch(grad_y + a.width + i);  // prefetch the next row while this one is in L1
    __builtin_prefetch(x + a.width + i);
    finish(i, at, norm_grad_x(g, x_hat, rstd, mean_g, mean_g_x_hat));
    accumulate(weight_partial, i, gradient * x_hat, at);
    accumulate(bias_partial, i, gradient, at);
  });
}

// The same with a.weight.
template <bool Centered, class X, class T, class P, class Finish>
inline void differentiate_row(const NormBackward& a, int64_t row, Accumulate<T>* weight_partial,
                              Accumulate<T>* bias_partial, Finish&& finish) {
  const P* weight = (const P*)a.weight;
  const auto weigh = [&](int64_t i, auto at, Vec<Accumulate<T>> gradient) {
    return weight ? gradient * load(weight + i, at) : gradient;
  };
  differentiate_row_by<Centered, X, T>(a, row, weight_partial, bias_partial, weigh, finish);
}

// differentiate(row, weight_partial, bias_partial) for the rows of chunks begin to end.
template <class A, class Row>
inline void for_rows_of_chunks(const NormBackward& a, int64_t begin, int64_t end,
                               Row&& differentiate) {
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    A* weight_partial = fresh_partial<A>(a.weight_partials, chunk, a.width);
    A* bias_partial = fresh_partial<A>(a.bias_partials, chunk, a.width);
    const int64_t last = chunk_begin(a.rows, a.chunks, chunk + 1);
    for (int64_t row = chunk_begin(a.rows, a.chunks, chunk); row < last; ++row) {
      differentiate(row, weight_partial, bias_partial);
    }
  }
}

TW_NAMESPACE_END
