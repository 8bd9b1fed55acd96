// bias_act and gated_act on the CPU.
//
// Bytes: bias_act moves 2 x rows x width x size forward (reads x, writes y), and 3 x backward
// (reads grad_y and x, writes grad_x). gated_act moves 3 x forward and 5 x backward. A float32
// element takes about 30 operations. With 16 lanes and two vector operations per cycle, that is
// faster than memory.
#include "core/act.h"

#include "cpu/activation.h"
#include "cpu/chunks.h"

namespace {

using namespace torchweld;

template <class T, class P, class Act>
void bias_act_row(const BiasActForward& a, int64_t row, Act act, bool streamed) {
  using A = Accumulate<T>;
  const T* x = (const T*)a.x + row * a.width;
  const P* bias = (const P*)a.bias;
  T* y = (T*)a.y + row * a.width;
  for_vectors<A>(a.width, [&](int64_t i, auto at) {
    Vec<A> z = read(x + i, at);
    if (bias) z += load(bias + i, at);
    write(y + i, act.value(z), at, streamed);
  });
}

template <class T, class P, class Act>
void bias_act_backward_row(const BiasActBackward& a, int64_t row, Accumulate<T>* partial, Act act,
                           bool streamed) {
  using A = Accumulate<T>;
  const T* grad_y = (const T*)a.grad_y + row * a.width;
  const T* x = (const T*)a.x + row * a.width;
  const P* bias = (const P*)a.bias;
  T* grad_x = (T*)a.grad_x + row * a.width;
  for_vectors<A>(a.width, [&](int64_t i, auto at) {
    Vec<A> z = read(x + i, at);
    if (bias) z += load(bias + i, at);
    const Vec<A> grad = act.gradient(z, read(grad_y + i, at));
    write(grad_x + i, grad, at, streamed);
    accumulate(partial, i, grad, at);
  });
}

}  // namespace

// Items are rows.
TW_EXPORT void bias_act_forward(const BiasActForward& a, int64_t begin, int64_t end) {
  dispatch_all(a.activation, a.dtype, a.param_dtype, [&](auto t, auto p, auto act) {
    using T = typename decltype(t)::type;
    const bool in_place = a.y == a.x;  // in place, y's lines are already in the caches
    const bool streamed = !in_place && worth_streaming<T>(a.y, a.rows, a.width, end - 1);
    for (int64_t row = begin; row < end; ++row) {
      bias_act_row<T, typename decltype(p)::type>(a, row, act, streamed);
    }
    if (streamed) finish_streams();
  });
}

// Items are chunks of rows.
TW_EXPORT void bias_act_backward(const BiasActBackward& a, int64_t begin, int64_t end) {
  dispatch_all(a.activation, a.dtype, a.param_dtype, [&](auto t, auto p, auto act) {
    using T = typename decltype(t)::type;
    using A = Accumulate<T>;
    const auto first_row = [&](int64_t chunk) { return chunk_begin(a.rows, a.chunks, chunk); };
    const bool in_place = a.grad_x == a.grad_y;
    const bool streamed =
        !in_place && worth_streaming<T>(a.grad_x, a.rows, a.width, first_row(end) - 1);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      A* partial = fresh_partial<A>(a.bias_partials, chunk, a.width);
      for (int64_t row = first_row(chunk); row < first_row(chunk + 1); ++row) {
        bias_act_backward_row<T, typename decltype(p)::type>(a, row, partial, act, streamed);
      }
    }
    if (streamed) finish_streams();
  });
}

TW_EXPORT int64_t bias_act_chunks(int64_t rows) { return chunks_of(rows); }

// Items are columns.
TW_EXPORT void bias_act_bias_gradient(const BiasActBackward& a, int64_t begin, int64_t end) {
  dispatch(a.dtype, a.param_dtype, [&](auto t, auto p) {
    using A = Accumulate<typename decltype(t)::type>;
    using P = typename decltype(p)::type;
    add_chunks((P*)a.grad_bias, (const A*)a.bias_partials, a.chunks, a.width, begin, end);
  });
}

// Items are rows.
TW_EXPORT void gated_act_forward(const GatedActForward& a, int64_t begin, int64_t end) {
  dispatch_all(a.activation, a.dtype, a.dtype, [&](auto t, auto, auto act) {
    using T = typename decltype(t)::type;
    using A = Accumulate<T>;
    const bool streamed = worth_streaming<T>(a.y, a.rows, a.width, end - 1);
    for (int64_t row = begin; row < end; ++row) {
      const T* gate = (const T*)a.gate + row * a.gate_pitch;
      const T* up = (const T*)a.up + row * a.up_pitch;
      T* y = (T*)a.y + row * a.width;
      for_vectors<A>(a.width, [&](int64_t i, auto at) {
        write(y + i, act.value(read(gate + i, at)) * read(up + i, at), at, streamed);
      });
    }
    if (streamed) finish_streams();
  });
}

// Items are rows.
TW_EXPORT void gated_act_backward(const GatedActBackward& a, int64_t begin, int64_t end) {
  dispatch_all(a.activation, a.dtype, a.dtype, [&](auto t, auto, auto act) {
    using T = typename decltype(t)::type;
    using A = Accumulate<T>;
    const bool streamed = worth_streaming<T>(a.grad_gate, a.rows, a.width, end - 1) &&
                          worth_streaming<T>(a.grad_up, a.rows, a.width, end - 1);
    for (int64_t row = begin; row < end; ++row) {
      const T* grad_y = (const T*)a.grad_y + row * a.width;
      const T* gate = (const T*)a.gate + row * a.gate_pitch;
      const T* up = (const T*)a.up + row * a.up_pitch;
      T* grad_gate = (T*)a.grad_gate + row * a.width;
      T* grad_up = (T*)a.grad_up + row * a.width;
      for_vectors<A>(a.width, [&](int64_t i, auto at) {
        const Vec<A> grad = read(grad_y + i, at), z = read(gate + i, at);
        write(grad_gate + i, act.gradient(z, grad * read(up + i, at)), at, streamed);
        write(grad_up + i, grad * act.value(z), at, streamed);
      });
    }
    if (streamed) finish_streams();
  });
}
