// Batch normalisation and an activation on the CPU.
//
// Bytes, in tensors of x's size: 3 forward (the statistics read x, the second pass reads x and
// writes y) and 5 backward (the sums read grad_y and x, the gradient reads them again and writes
// grad_x). When the statistics were given, backward is one pass and moves 3. Both backward passes
// compute the activation's derivative: storing it would cost 2 more. Per-column values come from
// L2.
#include "core/batch_norm.h"

#include "cpu/activation.h"
#include "cpu/chunks.h"

namespace {

using namespace torchweld;

// x_hat and z for a vector.
template <class A>
struct Normalized {
  Vec<A> x_hat, z;

  template <class T, class Place>
  Normalized(const Columns<A>& columns, const T* x, int64_t i, Place at) {
    x_hat = norm_normalize(read(x + i, at), load(columns.mean + i, at), load(columns.rstd + i, at));
    z = x_hat * load(columns.weight + i, at) + load(columns.bias + i, at);
  }
};

template <class T, class Act>
void backward_row(const NormalizeActBackward& a, int64_t row, Accumulate<T>* weight_partial,
                  Accumulate<T>* bias_partial, Act act, bool streamed) {
  using A = Accumulate<T>;
  const Columns<A> columns(a.columns, a.width);
  const T* grad_y = (const T*)a.grad_y + row * a.width;
  const T* x = (const T*)a.x + row * a.width;
  const A* mean_g = (const A*)a.mean_g;
  const A* mean_g_x_hat = (const A*)a.mean_g_x_hat;
  T* grad_x = row_of<T>(a.grad_x, row, a.width);
  for_vectors<A>(a.width, [&](int64_t i, auto at) {
    const Normalized<A> here(columns, x, i, at);
    const Vec<A> g = act.gradient(here.z, read(grad_y + i, at));
    if (grad_x) {
      const Vec<A> scale = load(columns.weight + i, at) * load(columns.rstd + i, at);
      // Given statistics have no gradient; a zero times x_hat would make NaN of infinity.
      const Vec<A> gradient = mean_g ? norm_grad_x(g, here.x_hat, scale, load(mean_g + i, at),
                                                   load(mean_g_x_hat + i, at))
                                     : scale * g;
      write(grad_x + i, gradient, at, streamed);
    }
    accumulate(weight_partial, i, g * here.x_hat, at);
    accumulate(bias_partial, i, g, at);
  });
}

}  // namespace

// Chunks of at most 64 rows keep the rounding error of a running mean small.
TW_EXPORT int64_t column_statistics_chunks(int64_t rows) {
  const int64_t chunks = (rows + 63) / 64;
  return chunks > chunks_of(rows) ? chunks : chunks_of(rows);
}

// Welford's running mean and sum of squares for each column of a chunk. Subtracting two sums of
// squares would cancel. Items are chunks of rows.
TW_EXPORT void column_statistics(const ColumnStatistics& a, int64_t begin, int64_t end) {
  dispatch(a.dtype, a.dtype, [&](auto t, auto) {
    using T = typename decltype(t)::type;
    using A = Accumulate<T>;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      A* means = fresh_partial<A>(a.chunk_means, chunk, a.width);
      A* squares = fresh_partial<A>(a.chunk_squares, chunk, a.width);
      const int64_t first = chunk_begin(a.rows, a.chunks, chunk);
      const int64_t last = chunk_begin(a.rows, a.chunks, chunk + 1);
      for (int64_t row = first; row < last; ++row) {
        const T* x = (const T*)a.x + row * a.width;
        const A share = 1 / (A)(row - first + 1);
        for_vectors<A>(a.width, [&](int64_t i, auto at) {
          const Vec<A> value = read(x + i, at), before = load(means + i, at);
          const Vec<A> mean = before + (value - before) * share;
          accumulate(squares, i, (value - before) * (value - mean), at);
          store(means + i, mean, at);
        });
      }
    }
  });
}

// Without rows the results are zeros. Items are columns.
TW_EXPORT void column_statistics_of_chunks(const ColumnStatistics& a, int64_t begin, int64_t end) {
  dispatch(a.dtype, a.dtype, [&](auto t, auto) {
    using A = Accumulate<typename decltype(t)::type>;
    const A share = a.rows ? 1 / (A)a.rows : 0;
    for_vectors<A>(end - begin, [&](int64_t i, auto at) {
      const A* means = (const A*)a.chunk_means + begin + i;
      const A* squares = (const A*)a.chunk_squares + begin + i;
      const auto rows_of = [&](int64_t chunk) {
        return (A)(chunk_begin(a.rows, a.chunks, chunk + 1) - chunk_begin(a.rows, a.chunks, chunk));
      };
      // Average the differences from the first mean: all means may be far from zero.
      const Vec<A> base = load(means, at);
      Vec<A> sum = {}, sum_of_squares = {};
      for (int64_t chunk = 1; chunk < a.chunks; ++chunk) {
        sum += (load(means + chunk * a.width, at) - base) * rows_of(chunk);
      }
      const Vec<A> mean = base + sum * share;
      for (int64_t chunk = 0; chunk < a.chunks; ++chunk) {
        const Vec<A> off = load(means + chunk * a.width, at) - mean;
        sum_of_squares += load(squares + chunk * a.width, at) + off * off * rows_of(chunk);
      }
      store((A*)a.mean + begin + i, mean, at);
      store((A*)a.var + begin + i, sum_of_squares * share, at);
    });
  });
}

// Items are columns.
TW_EXPORT void normalize_columns(const NormalizeColumns& a, int64_t begin, int64_t end) {
  dispatch(a.dtype, a.param_dtype, a.statistics_dtype, [&](auto t, auto p, auto s) {
    using A = Accumulate<typename decltype(t)::type>;
    using P = typename decltype(p)::type;
    using S = typename decltype(s)::type;
    for_vectors<A>(end - begin, [&](int64_t i, auto at) {
      const int64_t column = begin + i;
      const P* weight = a.weight ? (const P*)a.weight + column : nullptr;
      const P* bias = a.bias ? (const P*)a.bias + column : nullptr;
      const Vec<A> var = load((const S*)a.var + column, at);
      A* to = (A*)a.columns + column;
      store(to, load((const S*)a.mean + column, at), at);
      store(to + a.width, 1 / square_root(var + (A)a.eps), at);
      store(to + 2 * a.width, weight ? load(weight, at) : splat<A>(1), at);
      store(to + 3 * a.width, bias ? load(bias, at) : Vec<A>{}, at);
    });
  });
}

// Items are rows.
TW_EXPORT void normalize_act_forward(const NormalizeActForward& a, int64_t begin, int64_t end) {
  dispatch_all(a.activation, a.dtype, a.dtype, [&](auto t, auto, auto act) {
    using T = typename decltype(t)::type;
    using A = Accumulate<T>;
    const Columns<A> columns(a.columns, a.width);
    const bool in_place = a.y == a.x;  // in place, y's lines are already in the caches
    const bool streamed = !in_place && worth_streaming<T>(a.y, a.rows, a.width, end - 1);
    for (int64_t row = begin; row < end; ++row) {
      const T* x = (const T*)a.x + row * a.width;
      T* y = (T*)a.y + row * a.width;
      for_vectors<A>(a.width, [&](int64_t i, auto at) {
        write(y + i, act.value(Normalized<A>(columns, x, i, at).z), at, streamed);
      });
    }
    if (streamed) finish_streams();
  });
}

TW_EXPORT int64_t normalize_act_chunks(int64_t rows) { return chunks_of(rows); }

// Items are chunks of rows.
TW_EXPORT void normalize_act_backward(const NormalizeActBackward& a, int64_t begin, int64_t end) {
  dispatch_all(a.activation, a.dtype, a.dtype, [&](auto t, auto, auto act) {
    using T = typename decltype(t)::type;
    using A = Accumulate<T>;
    const auto first_row = [&](int64_t chunk) { return chunk_begin(a.rows, a.chunks, chunk); };
    const bool streamed =
        a.grad_x && worth_streaming<T>(a.grad_x, a.rows, a.width, first_row(end) - 1);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      A* weight_partial = fresh_partial<A>(a.weight_partials, chunk, a.width);
      A* bias_partial = fresh_partial<A>(a.bias_partials, chunk, a.width);
      for (int64_t row = first_row(chunk); row < first_row(chunk + 1); ++row) {
        backward_row<T>(a, row, weight_partial, bias_partial, act, streamed);
      }
    }
    if (streamed) finish_streams();
  });
}

// Items are columns.
TW_EXPORT void normalize_act_parameter_gradients(const NormalizeActBackward& a, int64_t begin,
                                                 int64_t end) {
  dispatch(a.dtype, a.param_dtype, [&](auto t, auto p) {
    using A = Accumulate<typename decltype(t)::type>;
    using P = typename decltype(p)::type;
    const auto add = [&](void* grad, const void* partials) {
      add_chunks((P*)grad, (const A*)partials, a.chunks, a.width, begin, end);
    };
    add(a.grad_weight, a.weight_partials);
    add(a.grad_bias, a.bias_partials);
  });
}
