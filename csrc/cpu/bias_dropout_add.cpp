// bias_dropout_add on the CPU.
//
// Bytes: forward reads x and residual and writes y, 3 x rows x width x size. Backward reads grad_y
// and writes grad_x, 2 x rows x width x size, or only reads if grad_x is grad_y.
#include "core/bias_dropout_add.h"

#include "core/dispatch.h"
#include "cpu/chunks.h"
#include "cpu/dropout.h"
#include "cpu/vec.h"

using namespace torchweld;

// Items are rows.
TW_EXPORT void bias_dropout_add_forward(const BiasDropoutAddForward& a, int64_t begin,
                                        int64_t end) {
  dispatch(a.dtype, a.bias_dtype, a.stream_dtype, [&](auto t, auto p, auto s) {
    using T = typename decltype(t)::type;
    using P = typename decltype(p)::type;
    using S = typename decltype(s)::type;
    using A = Accumulate<T>;
    const bool streamed = worth_streaming<S>(a.y, a.rows, a.width, end - 1);
    const P* bias = (const P*)a.bias;
    for (int64_t row = begin; row < end; ++row) {
      const T* x = (const T*)a.x + row * a.width;
      const S* residual = (const S*)a.residual + row * a.width;
      S* y = (S*)a.y + row * a.width;
      with_factors<A>(a.dropout, row, [&](auto&& factor) {
        for_vectors<A>(a.width, [&](int64_t i, auto at) {
          Vec<A> v = read(x + i, at);
          if (bias) v += load(bias + i, at);
          write(y + i, read(residual + i, at) + v * factor(i), at, streamed);
        });
      });
    }
    if (streamed) finish_streams();
  });
}

// Items are chunks of rows.
TW_EXPORT void bias_dropout_add_backward(const BiasDropoutAddBackward& a, int64_t begin,
                                         int64_t end) {
  dispatch(a.dtype, a.bias_dtype, a.stream_dtype, [&](auto t, auto, auto s) {
    using T = typename decltype(t)::type;
    using S = typename decltype(s)::type;
    using A = Accumulate<T>;
    const int64_t final_row = chunk_begin(a.rows, a.chunks, end) - 1;
    const bool streamed = a.grad_x && worth_streaming<T>(a.grad_x, a.rows, a.width, final_row);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      A* partial = fresh_partial<A>(a.partials, chunk, a.width);
      const int64_t last = chunk_begin(a.rows, a.chunks, chunk + 1);
      for (int64_t row = chunk_begin(a.rows, a.chunks, chunk); row < last; ++row) {
        const S* grad_y = (const S*)a.grad_y + row * a.width;
        T* grad_x = row_of<T>(a.grad_x, row, a.width);
        with_factors<A>(a.dropout, row, [&](auto&& factor) {
          for_vectors<A>(a.width, [&](int64_t i, auto at) {
            const Vec<A> gradient = read(grad_y + i, at) * factor(i);
            if (grad_x) write(grad_x + i, gradient, at, streamed);
            accumulate(partial, i, gradient, at);
          });
        });
      }
    }
    if (streamed) finish_streams();
  });
}

// Items are columns.
TW_EXPORT void bias_dropout_add_bias_gradient(const BiasDropoutAddBackward& a, int64_t begin,
                                              int64_t end) {
  dispatch(a.dtype, a.bias_dtype, [&](auto t, auto p) {
    using A = Accumulate<typename decltype(t)::type>;
    using P = typename decltype(p)::type;
    add_chunks((P*)a.grad_bias, (const A*)a.partials, a.chunks, a.width, begin, end);
  });
}

TW_EXPORT int64_t bias_dropout_add_chunks(int64_t rows, int64_t) { return chunks_of(rows); }
