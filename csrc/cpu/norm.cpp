// LayerNorm and RMSNorm on the CPU.
//
// Bytes: forward reads x and writes y once, 2 x rows x width x size; backward reads grad_y and x
// and writes grad_x once, 3 x rows x width x size. A row is walked several times but comes from
// memory once: it stays in L1 or L2 between the passes (131072 floats are 512 KiB).
#include "core/norm.h"

#include "core/dispatch.h"
#include "cpu/chunks.h"

namespace {

using namespace torchweld;

template <bool Centered, class T, class P>
void forward_row(const NormForward& a, int64_t row, bool streamed) {
  using A = Accumulate<T>;
  const T* x = (const T*)a.x + row * a.width;
  const P* weight = (const P*)a.weight;
  const P* bias = (const P*)a.bias;
  T* y = (T*)a.y + row * a.width;

  A mean = 0;
  if constexpr (Centered) {
    A sum[1];
    sum_vectors<A>(a.width, sum,
                   [&](int64_t i, auto at, Vec<A>* acc) { acc[0] += load(x + i, at); });
    mean = sum[0] / (A)a.width;
  }
  // The squares of what is left after the mean: the difference of two large sums would cancel.
  A squares[1];
  sum_vectors<A>(a.width, squares, [&](int64_t i, auto at, Vec<A>* acc) {
    const Vec<A> centered = load(x + i, at, mean) - mean;
    acc[0] += centered * centered;
  });
  const A rstd = 1 / square_root(squares[0] / (A)a.width + (A)a.eps);

  for_vectors<A>(a.width, [&](int64_t i, auto at) {
    Vec<A> v = norm_normalize(load(x + i, at), splat(mean), splat(rstd));
    if (weight) v *= load(weight + i, at);
    if (bias) v += load(bias + i, at);
    __builtin_prefetch(x + a.width + i);  // the next row's, while this one is in L1
    write(y + i, v, at, streamed);
  });
  if constexpr (Centered) ((A*)a.mean)[row] = mean;
  ((A*)a.rstd)[row] = rstd;
}

// One row of grad_x; its share of the parameter gradients is added to the chunk's partials.
template <bool Centered, class T, class P>
void backward_row(const NormBackward& a, int64_t row, Accumulate<T>* weight_partial,
                  Accumulate<T>* bias_partial, bool streamed) {
  using A = Accumulate<T>;
  const T* grad_y = (const T*)a.grad_y + row * a.width;
  const T* x = (const T*)a.x + row * a.width;
  const P* weight = (const P*)a.weight;
  T* grad_x = (T*)a.grad_x + row * a.width;
  const Vec<A> mean = splat(Centered ? ((const A*)a.mean)[row] : 0);
  const Vec<A> rstd = splat(((const A*)a.rstd)[row]);

  A sums[2];  // of g and of g * x_hat
  sum_vectors<A>(a.width, sums, [&](int64_t i, auto at, Vec<A>* acc) {
    Vec<A> g = load(grad_y + i, at);
    if (weight) g *= load(weight + i, at);
    if constexpr (Centered) acc[0] += g;
    acc[1] += g * norm_normalize(load(x + i, at), mean, rstd);
  });
  const Vec<A> mean_g = splat(sums[0] / (A)a.width);
  const Vec<A> mean_g_x_hat = splat(sums[1] / (A)a.width);

  for_vectors<A>(a.width, [&](int64_t i, auto at) {
    const Vec<A> gradient = load(grad_y + i, at);
    const Vec<A> x_hat = norm_normalize(load(x + i, at), mean, rstd);
    const Vec<A> g = weight ? gradient * load(weight + i, at) : gradient;
    __builtin_prefetch(grad_y + a.width + i);  // the next row's, while this one is in L1
    __builtin_prefetch(x + a.width + i);
    write(grad_x + i, norm_grad_x(g, x_hat, rstd, mean_g, mean_g_x_hat), at, streamed);
    if (weight_partial) {
      store(weight_partial + i, load(weight_partial + i, at) + gradient * x_hat, at);
    }
    if (bias_partial) store(bias_partial + i, load(bias_partial + i, at) + gradient, at);
  });
}

template <bool Centered>
void forward(const NormForward& a, int64_t begin, int64_t end) {
  dispatch(a.dtype, a.param_dtype, [&](auto t, auto p) {
    using T = typename decltype(t)::type;
    const bool streamed = worth_streaming<T>(a.y, a.rows, a.width, end - 1);
    for (int64_t row = begin; row < end; ++row) {
      forward_row<Centered, T, typename decltype(p)::type>(a, row, streamed);
    }
    if (streamed) finish_streams();
  });
}

template <bool Centered>
void backward(const NormBackward& a, int64_t begin, int64_t end) {
  dispatch(a.dtype, a.param_dtype, [&](auto t, auto p) {
    using T = typename decltype(t)::type;
    using P = typename decltype(p)::type;
    using A = Accumulate<T>;
    const bool streamed =
        worth_streaming<T>(a.grad_x, a.rows, a.width, norm_chunk_begin(a, end) - 1);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      A* weight_partial = a.weight_partials ? (A*)a.weight_partials + chunk * a.width : nullptr;
      A* bias_partial = a.bias_partials ? (A*)a.bias_partials + chunk * a.width : nullptr;
      if (weight_partial) std::memset(weight_partial, 0, a.width * sizeof(A));
      if (bias_partial) std::memset(bias_partial, 0, a.width * sizeof(A));
      for (int64_t row = norm_chunk_begin(a, chunk); row < norm_chunk_begin(a, chunk + 1); ++row) {
        backward_row<Centered, T, P>(a, row, weight_partial, bias_partial, streamed);
      }
    }
    if (streamed) finish_streams();
  });
}

}  // namespace

// Items are rows.
TW_EXPORT void layer_norm_forward(const NormForward& a, int64_t begin, int64_t end) {
  forward<true>(a, begin, end);
}
TW_EXPORT void rms_norm_forward(const NormForward& a, int64_t begin, int64_t end) {
  forward<false>(a, begin, end);
}

// Items are chunks of rows.
TW_EXPORT void layer_norm_backward(const NormBackward& a, int64_t begin, int64_t end) {
  backward<true>(a, begin, end);
}
TW_EXPORT void rms_norm_backward(const NormBackward& a, int64_t begin, int64_t end) {
  backward<false>(a, begin, end);
}

// Items are columns.
TW_EXPORT void norm_parameter_gradients(const NormBackward& a, int64_t begin, int64_t end) {
  dispatch(a.dtype, a.param_dtype, [&](auto t, auto p) {
    using A = Accumulate<typename decltype(t)::type>;
    using P = typename decltype(p)::type;
    add_chunks((P*)a.grad_weight, (const A*)a.weight_partials, a.chunks, a.width, begin, end);
    add_chunks((P*)a.grad_bias, (const A*)a.bias_partials, a.chunks, a.width, begin, end);
  });
}

TW_EXPORT int64_t norm_chunks(int64_t rows, int64_t) { return chunks_of(rows); }

TW_EXPORT int64_t norm_workspace_bytes(int64_t, int64_t) { return 0; }
