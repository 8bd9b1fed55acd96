// Adaptive norms and gated residuals on the CPU.
//
// Bytes, in units of rows x width x size: an adaptive norm reads x and writes y, 2; backward reads
// grad_y and x and writes grad_x, 3. A gated residual reads x and branch and writes z, 3; backward
// reads grad_y and branch and writes grad_branch, 3. Both in one pass: 4, and 6 backward, where
// grad_z, grad_y, z and branch are read, grad_x and grad_branch written. Modulations stay in L1 or
// L2. A scratch row in L1 or L2 keeps the row of z.
#include "core/modulation.h"

#include "core/dispatch.h"
#include "cpu/norm.h"
#include "cpu/scratch.h"

namespace {

using namespace torchweld;

// A row of a modulation; null if it is absent.
template <class P>
inline const P* part_of(const Modulation& m, int64_t row) {
  return m.data ? (const P*)m.data + row * m.stride : nullptr;
}

// finish(i, place, z) for each vector of a row of z = x + gate * branch.
template <class T, class P, class S, class Finish>
inline void add_gated(const ModulationForward& a, int64_t row, Finish&& finish) {
  const S* x = (const S*)a.x + row * a.width;
  const T* branch = (const T*)a.branch + row * a.width;
  const P* gate = part_of<P>(a.gate, row / a.period);
  for_vectors<Accumulate<T>>(a.width, [&](int64_t i, auto at) {
    finish(i, at, read(x + i, at) + load(gate + i, at) * read(branch + i, at));
  });
}

template <bool Centered>
void forward(const ModulationForward& a, int64_t begin, int64_t end) {
  dispatch(a.dtype, a.param_dtype, a.stream_dtype, [&](auto t, auto p, auto s) {
    using T = typename decltype(t)::type;
    using P = typename decltype(p)::type;
    using S = typename decltype(s)::type;
    using A = Accumulate<T>;
    const bool z_streamed = a.z && worth_streaming<S>(a.z, a.rows, a.width, end - 1);
    const bool y_streamed = worth_streaming<S>(a.y, a.rows, a.width, end - 1);
    Scratch<A> sum(a.width);
    for (int64_t row = begin; row < end; ++row) {
      const P* scale = part_of<P>(a.scale, row / a.period);
      const P* shift = part_of<P>(a.shift, row / a.period);
      const auto modulate = [&](int64_t i, auto at, Vec<A> x_hat) {
        const Vec<A> y = x_hat * ((A)1 + load(scale + i, at));
        return shift ? y + load(shift + i, at) : y;
      };
      if (a.branch) {
        S* z = (S*)a.z + row * a.width;
        add_gated<T, P, S>(a, row, [&](int64_t i, auto at, Vec<A> v) {
          store(sum + i, v);
          write(z + i, v, at, z_streamed);
        });
        normalize_row_by<Centered, S, S>(a, row, (const A*)sum, y_streamed, modulate,
                                         [](int64_t) {});
      } else {
        const S* x = (const S*)a.x + row * a.width;
        normalize_row_by<Centered, S, S>(a, row, x, y_streamed, modulate, [&](int64_t i) {
          __builtin_prefetch(x + a.width + i);  // prefetch the next row while this one is in L1
        });
      }
    }
    if (z_streamed || y_streamed) finish_streams();
  });
}

// The sums of a chunk of rows: its partial sums, or all there is of a row of the gradient.
template <class P, class A>
class Sums {
 public:
  Sums(void* grad, void* partials, int64_t width)
      : grad_((P*)grad),
        partials_((A*)partials),
        width_(width),
        own_(grad && !partials ? width : 0) {}
  // Zeros for this chunk; null if the gradient is not wanted.
  A* begin(int64_t chunk) {
    if (!grad_) return nullptr;
    if (partials_) return fresh_partial<A>(partials_, chunk, width_);
    return fresh_partial<A>(own_, 0, width_);
  }
  void end(int64_t chunk) {
    if (!grad_ || partials_) return;
    P* grad = grad_ + chunk * width_;
    for_vectors<A>(width_, [&](int64_t i, auto at) { store(grad + i, load(own_ + i, at), at); });
  }

 private:
  P* grad_;
  A* partials_;
  int64_t width_;
  Scratch<A> own_;
};

template <bool Centered>
void backward(const ModulationBackward& a, int64_t begin, int64_t end) {
  dispatch(a.dtype, a.param_dtype, a.stream_dtype, [&](auto t, auto p, auto s) {
    using T = typename decltype(t)::type;
    using P = typename decltype(p)::type;
    using S = typename decltype(s)::type;
    using A = Accumulate<T>;
    const auto row_at = [&](int64_t chunk) {  // where a chunk begins
      const int64_t of = chunk % a.chunks_each;
      return chunk / a.chunks_each * a.period + chunk_begin(a.period, a.chunks_each, of);
    };
    const int64_t last = row_at(end) - 1;
    const bool x_streamed = a.grad_x && worth_streaming<S>(a.grad_x, a.rows, a.width, last);
    const bool branch_streamed =
        a.grad_branch && worth_streaming<T>(a.grad_branch, a.rows, a.width, last);
    Sums<P, A> scale_sums(a.grad_weight, a.weight_partials, a.width);
    Sums<P, A> shift_sums(a.grad_bias, a.bias_partials, a.width);
    Sums<P, A> gate_sums(a.grad_gate, a.gate_partials, a.width);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t first = row_at(chunk), after = row_at(chunk + 1);
      A* scale_sum = scale_sums.begin(chunk);
      A* shift_sum = shift_sums.begin(chunk);
      A* gate_sum = gate_sums.begin(chunk);
      const P* gate = part_of<P>(a.gate, chunk / a.chunks_each);
      const P* scale = part_of<P>(a.scale, chunk / a.chunks_each);
      for (int64_t row = first; row < after; ++row) {
        const S* grad_z = row_of<S>(a.grad_z, row, a.width);
        const T* branch = row_of<T>(a.branch, row, a.width);
        S* grad_x = row_of<S>(a.grad_x, row, a.width);
        T* grad_branch = row_of<T>(a.grad_branch, row, a.width);
        const auto finish = [&](int64_t i, auto at, Vec<A> v) {
          if (grad_z) {
            v += load(grad_z + i, at);
            __builtin_prefetch(grad_z + a.width + i);
          }
          if (grad_x) write(grad_x + i, v, at, x_streamed);
          if (gate_sum) {
            accumulate(gate_sum, i, v * load(branch + i, at), at);
            __builtin_prefetch(branch + a.width + i);
          }
          if (grad_branch) write(grad_branch + i, v * load(gate + i, at), at, branch_streamed);
        };
        if (a.grad_y) {
          const auto weigh = [&](int64_t i, auto at, Vec<A> gradient) {
            return gradient * ((A)1 + load(scale + i, at));
          };
          differentiate_row_by<Centered, S, S>(a, row, scale_sum, shift_sum, weigh, finish);
        } else {  // a zero times z would make NaN of infinity
          for_vectors<A>(a.width, [&](int64_t i, auto at) { finish(i, at, Vec<A>{}); });
        }
      }
      scale_sums.end(chunk);
      shift_sums.end(chunk);
      gate_sums.end(chunk);
    }
    if (x_streamed || branch_streamed) finish_streams();
  });
}

}  // namespace

// Items are rows.
TW_EXPORT void adaptive_layer_norm_forward(const ModulationForward& a, int64_t begin, int64_t end) {
  forward<true>(a, begin, end);
}
TW_EXPORT void adaptive_rms_norm_forward(const ModulationForward& a, int64_t begin, int64_t end) {
  forward<false>(a, begin, end);
}
TW_EXPORT void gated_residual_forward(const ModulationForward& a, int64_t begin, int64_t end) {
  dispatch(a.dtype, a.param_dtype, a.stream_dtype, [&](auto t, auto p, auto s) {
    using T = typename decltype(t)::type;
    using P = typename decltype(p)::type;
    using S = typename decltype(s)::type;
    const bool streamed = worth_streaming<S>(a.z, a.rows, a.width, end - 1);
    for (int64_t row = begin; row < end; ++row) {
      S* z = (S*)a.z + row * a.width;
      add_gated<T, P, S>(a, row,
                         [&](int64_t i, auto at, auto v) { write(z + i, v, at, streamed); });
    }
    if (streamed) finish_streams();
  });
}

// Items are chunks of rows.
TW_EXPORT void adaptive_layer_norm_backward(const ModulationBackward& a, int64_t begin,
                                            int64_t end) {
  backward<true>(a, begin, end);
}
// Also the backward pass of a gated residual without a norm.
TW_EXPORT void adaptive_rms_norm_backward(const ModulationBackward& a, int64_t begin, int64_t end) {
  backward<false>(a, begin, end);
}

// Items are columns.
TW_EXPORT void modulation_gradients(const ModulationBackward& a, int64_t begin, int64_t end) {
  dispatch(a.dtype, a.param_dtype, [&](auto t, auto p) {
    using A = Accumulate<typename decltype(t)::type>;
    using P = typename decltype(p)::type;
    const auto add = [&](void* grad, const void* partials) {
      if (!grad) return;
      for (int64_t first = 0; first < a.chunks; first += a.chunks_each) {
        P* row = (P*)grad + first / a.chunks_each * a.width;
        add_chunks(row, (const A*)partials + first * a.width, a.chunks_each, a.width, begin, end);
      }
    };
    add(a.grad_weight, a.weight_partials);
    add(a.grad_bias, a.bias_partials);
    add(a.grad_gate, a.gate_partials);
  });
}

// Enough chunks for any core count, and none of few rows where the modulations' own rows suffice.
TW_EXPORT int64_t modulation_chunks(int64_t modulations, int64_t period) {
  constexpr int64_t kChunks = 64;
  const int64_t each = chunks_of(period);
  const int64_t enough = modulations < kChunks ? kChunks / (modulations < 1 ? 1 : modulations) : 1;
  return each < enough ? each : enough;
}
