// LayerNorm and RMSNorm on the CPU.
//
// Bytes: forward reads x and writes y once, 2 x rows x width x size. Backward reads grad_y and x
// and writes grad_x once, 3 x rows x width x size. Several passes walk over a row, but only the
// first reads memory: then the row stays in L1 or L2 (131072 floats are 512 KiB).
#include "cpu/norm.h"

#include "core/dispatch.h"

namespace {

using namespace torchweld;

template <bool Centered>
void forward(const NormForward& a, int64_t begin, int64_t end) {
  dispatch(a.dtype, a.param_dtype, [&](auto t, auto p) {
    using T = typename decltype(t)::type;
    using P = typename decltype(p)::type;
    const bool streamed = worth_streaming<T>(a.y, a.rows, a.width, end - 1);
    for (int64_t row = begin; row < end; ++row) {
      const T* x = (const T*)a.x + row * a.width;
      const T* next = x + a.width;  // prefetch the next row while this one is in L1
      normalize_row<Centered, T, P, T>(a, row, x, streamed,
                                       [&](int64_t i) { __builtin_prefetch(next + i); });
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
    const int64_t last = chunk_begin(a.rows, a.chunks, end) - 1;
    const bool streamed = worth_streaming<T>(a.grad_x, a.rows, a.width, last);
    for_rows_of_chunks<A>(a, begin, end, [&](int64_t row, A* weight_partial, A* bias_partial) {
      T* grad_x = (T*)a.grad_x + row * a.width;
      differentiate_row<Centered, T, T, P>(
          a, row, weight_partial, bias_partial,
          [&](int64_t i, auto at, Vec<A> v) { write(grad_x + i, v, at, streamed); });
    });
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
    const auto add = [&](void* grad, const void* partials) {
      add_chunks((P*)grad, (const A*)partials, a.chunks, a.width, begin, end);
    };
    add(a.grad_weight, a.weight_partials);
    add(a.grad_bias, a.bias_partials);
  });
}

TW_EXPORT int64_t norm_chunks(int64_t rows, int64_t) { return chunks_of(rows); }

TW_EXPORT int64_t norm_workspace_bytes(int64_t, int64_t) { return 0; }
