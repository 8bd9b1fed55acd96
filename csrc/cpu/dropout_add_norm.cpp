// dropout_add_layer_norm and dropout_add_rms_norm on the CPU.
//
// Bytes: forward reads x and residual and writes z and y once, 4 x rows x width x size. Backward
// reads grad_y, z and grad_z and writes grad_residual and grad_x, 5 x rows x width x size, or 4 if
// the last two are the same tensor. A scratch row in L1 or L2 keeps the row of z.
#include "core/dropout_add_norm.h"

#include "core/dispatch.h"
#include "cpu/dropout.h"
#include "cpu/norm.h"
#include "cpu/scratch.h"

namespace {

using namespace torchweld;

template <bool Centered>
void forward(const DropoutAddNormForward& a, int64_t begin, int64_t end) {
  dispatch(a.dtype, a.param_dtype, a.stream_dtype, a.y_dtype, [&](auto t, auto p, auto s, auto y) {
    using T = typename decltype(t)::type;
    using P = typename decltype(p)::type;
    using S = typename decltype(s)::type;
    using Y = typename decltype(y)::type;
    using A = Accumulate<T>;
    const bool z_streamed = worth_streaming<S>(a.z, a.rows, a.width, end - 1);
    const bool y_streamed = worth_streaming<Y>(a.y, a.rows, a.width, end - 1);
    Scratch<A> sum(a.width);
    for (int64_t row = begin; row < end; ++row) {
      const T* x = (const T*)a.x + row * a.width;
      const S* residual = row_of<S>(a.residual, row, a.width);
      S* z = (S*)a.z + row * a.width;
      with_factors<A>(a.dropout, row, [&](auto&& factor) {
        for_vectors<A>(a.width, [&](int64_t i, auto at) {
          Vec<A> v = load(x + i, at) * factor(i);
          if (residual) v += load(residual + i, at);
          store(sum + i, v);
          write(z + i, v, at, z_streamed);
        });
      });
      normalize_row<Centered, Y, P, S>(a, row, (const A*)sum, y_streamed, [&](int64_t i) {
        __builtin_prefetch(x + a.width + i);  // prefetch the next row while this one is in L1
        if (residual) __builtin_prefetch(residual + a.width + i);
      });
    }
    if (z_streamed || y_streamed) finish_streams();
  });
}

template <bool Centered>
void backward(const DropoutAddNormBackward& a, int64_t begin, int64_t end) {
  dispatch(a.dtype, a.param_dtype, a.stream_dtype, a.y_dtype, [&](auto t, auto p, auto s, auto y) {
    using T = typename decltype(t)::type;
    using P = typename decltype(p)::type;
    using S = typename decltype(s)::type;
    using Y = typename decltype(y)::type;
    using A = Accumulate<T>;
    const int64_t last = chunk_begin(a.rows, a.chunks, end) - 1;
    const bool x_streamed = a.grad_x && worth_streaming<T>(a.grad_x, a.rows, a.width, last);
    const bool residual_streamed =
        a.grad_residual && worth_streaming<S>(a.grad_residual, a.rows, a.width, last);
    for_rows_of_chunks<A>(a, begin, end, [&](int64_t row, A* weight_partial, A* bias_partial) {
      const S* grad_z = row_of<S>(a.grad_z, row, a.width);
      S* grad_residual = row_of<S>(a.grad_residual, row, a.width);
      T* grad_x = row_of<T>(a.grad_x, row, a.width);
      with_factors<A>(a.dropout, row, [&](auto&& factor) {
        const auto finish = [&](int64_t i, auto at, Vec<A> v) {
          if (grad_z) {
            v += load(grad_z + i, at);
            __builtin_prefetch(grad_z + a.width + i);
          }
          if (grad_residual) write(grad_residual + i, v, at, residual_streamed);
          if (grad_x) write(grad_x + i, v * factor(i), at, x_streamed);
        };
        if (a.grad_y) {
          differentiate_row<Centered, S, Y, P>(a, row, weight_partial, bias_partial, finish);
        } else {  // a zero times z would make NaN of infinity
          for_vectors<A>(a.width, [&](int64_t i, auto at) { finish(i, at, Vec<A>{}); });
        }
      });
    });
    if (x_streamed || residual_streamed) finish_streams();
  });
}

}  // namespace

// Items are rows.
TW_EXPORT void dropout_add_layer_norm_forward(const DropoutAddNormForward& a, int64_t begin,
                                              int64_t end) {
  forward<true>(a, begin, end);
}
TW_EXPORT void dropout_add_rms_norm_forward(const DropoutAddNormForward& a, int64_t begin,
                                            int64_t end) {
  forward<false>(a, begin, end);
}

// Items are chunks of rows.
TW_EXPORT void dropout_add_layer_norm_backward(const DropoutAddNormBackward& a, int64_t begin,
                                               int64_t end) {
  backward<true>(a, begin, end);
}
TW_EXPORT void dropout_add_rms_norm_backward(const DropoutAddNormBackward& a, int64_t begin,
                                             int64_t end) {
  backward<false>(a, begin, end);
}
