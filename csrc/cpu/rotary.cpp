// Rotary embeddings with an optional RMSNorm on the CPU.
//
// Bytes: forward reads x and writes y once, backward reads the gradient and writes another, and
// reads x too after a norm. The angles of a token serve all of its heads: they are read once, in any
// dtype and with any strides, and stay in L1.
#include "core/rotary.h"

#include "core/dispatch.h"
#include "cpu/chunks.h"
#include "cpu/scratch.h"
#include "cpu/vec.h"

namespace {

using namespace torchweld;

// Tokens whose angles are in L1 at a time: where tokens lie closer together than heads, as many
// rows of a head are adjacent.
constexpr int64_t kBlock = 16;

template <class A, class F>
void convert(A* to, const F* from, int64_t stride, int64_t count) {
  if (stride == 1) {
    for_vectors<A>(count, [&](int64_t i, auto at) { store(to + i, load(from + i, at), at); });
    return;
  }
  for_vectors<A>(count, [&](int64_t i, auto at) {
    F lanes[kLanes<A>] = {};
    for (int64_t k = 0; k < kLanes<A> && i + k < count; ++k) lanes[k] = from[(i + k) * stride];
    store(to + i, load(lanes), at);
  });
}

// Copies a row of this dtype to accumulators.
template <class A>
void convert(A* to, const void* from, DType dtype, int64_t offset, int64_t stride, int64_t count) {
  if constexpr (sizeof(A) == 8) {
    convert(to, (const double*)from + offset, stride, count);
  } else if (dtype == DType::f32) {
    convert(to, (const float*)from + offset, stride, count);
  } else if (dtype == DType::bf16) {
    convert(to, (const BFloat16*)from + offset, stride, count);
  } else {
    convert(to, (const Half*)from + offset, stride, count);
  }
}

template <class A>
Vec<A> swap_pairs(Vec<A> v) {
  A lane[kLanes<A>], swapped[kLanes<A>];
  std::memcpy(lane, &v, sizeof v);
  for (int64_t i = 0; i < kLanes<A>; i += 2) swapped[i] = lane[i + 1], swapped[i + 1] = lane[i];
  std::memcpy(&v, swapped, sizeof v);
  return v;
}

// The factors of a token: the first and the second elements of its pairs, times `own` and `other`.
// With interleaved pairs own and other are [2 * pairs], else the second elements follow the first.
template <class A>
struct Angles {
  A* own;
  A* other;
};

template <class A>
class Rotation {
 public:
  Rotation(const Rotary& a, bool transposed)
      : a_(a),
        transposed_(transposed),
        stride_(2 * a.pairs + kLanes<A>),
        factors_(kBlock * 2 * stride_),
        raw_(4 * (a.pairs + kLanes<A>)) {}

  // Reads the angles of a token into place t of the block.
  void prepare(int64_t t, int64_t batch, int64_t token) {
    const int64_t n = a_.pairs;
    A* part[4];  // cos and sin of the first elements, then of the second
    for (int p = 0; p < 4; ++p) part[p] = raw_ + p * (n + kLanes<A>);
    for (int k = 0; k < 2; ++k) {
      const int64_t* stride = a_.table_stride[k];
      int64_t at = batch * stride[0] + token * stride[1];
      if (a_.positions) {
        at =
            a_.positions[batch * a_.position_stride[0] + token * a_.position_stride[1]] * stride[1];
      }
      const int64_t step = a_.full && a_.interleaved ? 2 * stride[2] : stride[2];
      const int64_t second = !a_.full ? 0 : a_.interleaved ? stride[2] : n * stride[2];
      convert(part[k], a_.table[k], a_.table_dtype, at, step, n);
      if (a_.full) convert(part[2 + k], a_.table[k], a_.table_dtype, at + second, step, n);
    }
    if (!a_.full) part[2] = part[0], part[3] = part[1];
    const Angles<A> to = angles(t);
    const A* minus = transposed_ ? part[3] : part[1];
    const A* plus = transposed_ ? part[1] : part[3];
    const A sign = transposed_ ? -1 : 1;
    const int64_t step = a_.interleaved ? 2 : 1, second = a_.interleaved ? 1 : n;
    for (int64_t i = 0; i < n; ++i) {
      to.own[i * step] = part[0][i];
      to.own[i * step + second] = part[2][i];
      to.other[i * step] = -sign * minus[i];
      to.other[i * step + second] = sign * plus[i];
    }
  }

  // y = the rotated x; write(y + i, vector, place) stores. x and y may be the same.
  template <class X, class Y, class Write>
  void apply(int64_t t, const X* x, Y* y, Write&& write) const {
    const Angles<A> by = angles(t);
    const int64_t n = a_.pairs;
    const auto copy = [&](int64_t begin, int64_t end) {
      for_vectors<A>(end - begin, [&](int64_t i, auto at) {
        write(y + begin + i, load(x + begin + i, at), at);
      });
    };
    if (a_.interleaved) {
      for_vectors<A>(2 * n, [&](int64_t i, auto at) {
        const Vec<A> v = load(x + i, at);
        write(y + i, v * load(by.own + i, at) + swap_pairs<A>(v) * load(by.other + i, at), at);
      });
      copy(2 * n, a_.width);
      return;
    }
    for_vectors<A>(n, [&](int64_t i, auto at) {
      const Vec<A> first = load(x + i, at), second = load(x + a_.distance + i, at);
      write(y + i, first * load(by.own + i, at) + second * load(by.other + i, at), at);
      write(y + a_.distance + i,
            second * load(by.own + n + i, at) + first * load(by.other + n + i, at), at);
    });
    copy(n, a_.distance);
    copy(a_.distance + n, a_.width);
  }

 private:
  Angles<A> angles(int64_t t) const {
    A* own = all_ + t * 2 * stride_;
    return {own, own + stride_};
  }

  const Rotary& a_;
  const bool transposed_;
  const int64_t stride_;
  Scratch<A> factors_, raw_;
  A* const all_ = factors_;
};

int64_t locate(const int64_t (&stride)[3], int64_t batch, int64_t token, int64_t head) {
  return batch * stride[0] + token * stride[1] + head * stride[2];
}

// The norm's weight as accumulators, 1 added where the op says so; ones if there is none.
template <class A>
void read_weight(const Rotary& a, const RotaryStream& stream, A* weight) {
  const int64_t count = (a.across ? stream.heads : 1) * a.width;
  if (!stream.weight) {
    for_vectors<A>(count, [&](int64_t i, auto at) { store(weight + i, splat((A)1), at); });
    return;
  }
  convert(weight, stream.weight, a.param_dtype, 0, 1, count);
  if (!a.plus_one) return;
  for_vectors<A>(count, [&](int64_t i, auto at) {
    store(weight + i, load(weight + i, at) + splat((A)1), at);
  });
}

// 1 / sqrt(mean of squares + eps) of a row, or of all rows of a token if `across`.
template <class A, class T>
A reciprocal_root(const Rotary& a, const T* x, int64_t rows, int64_t stride) {
  A total = 0;
  for (int64_t row = 0; row < rows; ++row) {
    A sums[1];
    sum_vectors<A>(a.width, sums, [&](int64_t i, auto at, Vec<A>* acc) {
      const Vec<A> v = load(x + row * stride + i, at);
      acc[0] += v * v;
    });
    total += sums[0];
  }
  return 1 / square_root(total / (A)(rows * a.width) + (A)a.eps);
}

template <class T, class A>
Vec<A> rounded_to(Vec<A> v, bool wanted) {
  return wanted ? round_trip<T>(v) : v;
}

template <class T, class A>
void normalize(const Rotary& a, const T* x, const A* weight, A rstd, A* to) {
  const bool before = a.rounded > 1, after = a.rounded > 0;
  for_vectors<A>(a.width, [&](int64_t i, auto at) {
    const Vec<A> x_hat = rounded_to<T, A>(load(x + i, at) * splat(rstd), before);
    store(to + i, rounded_to<T, A>(x_hat * load(weight + i, at), after), at);
  });
}

// row(t, batch, token, head) for the rows of the tokens begin to end, whose angles are in place t.
// Rows that are close in memory follow each other.
template <class Row>
void for_rows(const Rotary& a, const int64_t (&stride)[3], int64_t begin, int64_t end,
              int64_t heads, Row&& row) {
  const auto visit = [&](int64_t token, int64_t head) {
    row(token - begin, token / a.tokens, token % a.tokens, head);
  };
  if (stride[2] <= stride[1]) {
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t head = 0; head < heads; ++head) visit(token, head);
    }
  } else {
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t token = begin; token < end; ++token) visit(token, head);
    }
  }
}

template <class T>
bool worth_streaming_result(const Rotary& a, const RotaryStream& s, int64_t last) {
  constexpr int64_t kUnit = kLanes<Accumulate<T>>;
  for (int64_t stride : s.result_stride) {
    if (stride % kUnit) return false;
  }
  if (!a.interleaved && (a.pairs % kUnit || a.distance % kUnit)) return false;
  if (a.interleaved && 2 * a.pairs % kUnit) return false;
  const int64_t rows = a.batch * a.tokens * s.heads;
  const int64_t at = locate(s.result_stride, last / a.tokens, last % a.tokens, s.heads - 1);
  return worth_streaming<T>(s.result, rows, a.width, at / a.width);
}

template <class T>
void forward(const Rotary& a, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  Rotation<A> rotation(a, /*transposed=*/false);
  Scratch<A> normalized(a.norm ? a.width : 0);
  const auto weights_of = [&](int n) {
    return a.norm && n < a.count ? (a.across ? a.streams[n].heads : 1) * a.width : 0;
  };
  Scratch<A> first(weights_of(0)), second(weights_of(1));
  A* weights[Rotary::kStreams] = {first, second};
  bool streamed[Rotary::kStreams] = {};
  for (int n = 0; n < a.count; ++n) {
    if (a.norm) read_weight(a, a.streams[n], weights[n]);
    streamed[n] = worth_streaming_result<T>(a, a.streams[n], end - 1);
  }
  for (int64_t block = begin; block < end; block += kBlock) {
    const int64_t last = block + kBlock < end ? block + kBlock : end;
    for (int64_t token = block; token < last; ++token) {
      rotation.prepare(token - block, token / a.tokens, token % a.tokens);
    }
    for (int n = 0; n < a.count; ++n) {
      const RotaryStream& s = a.streams[n];
      const auto write_result = [&](T* to, Vec<A> v, auto at) { write(to, v, at, streamed[n]); };
      A rstd = 0;
      const auto row = [&](int64_t t, int64_t batch, int64_t token, int64_t head) {
        const T* x = (const T*)s.x + locate(s.x_stride, batch, token, head);
        T* y = (T*)s.result + locate(s.result_stride, batch, token, head);
        if (!a.norm) return rotation.apply(t, x, y, write_result);
        if (!a.across || head == 0) {
          rstd = reciprocal_root<A>(a, x, a.across ? s.heads : 1, s.x_stride[2]);
          ((A*)s.rstd)[locate(s.rstd_stride, batch, token, head)] = rstd;
        }
        const A* weight = weights[n] + (a.across ? head * a.width : 0);
        normalize(a, x, weight, rstd, (A*)normalized);
        rotation.apply(t, (const A*)normalized, y, write_result);
      };
      // A norm across heads takes a token's rows one after another.
      const int64_t adjacent[3] = {0, 1, 0};
      for_rows(a, a.across ? adjacent : s.x_stride, block, last, s.heads, row);
    }
  }
  if (streamed[0] || streamed[1]) finish_streams();
}

// The gradients of a group of rows that a norm was taken over, one row or all heads of a token.
template <class T>
class NormGradients {
  using A = Accumulate<T>;

 public:
  NormGradients(const Rotary& a, const RotaryStream& s)
      : a_(a),
        s_(s),
        rows_(a.across ? s.heads : 1),
        weight_(rows_ * a.width),
        rotated_(rows_ * a.width) {
    read_weight(a, s, (A*)weight_);
  }

  // The group begins at this head.
  void run(const Rotation<A>& rotation, int64_t t, int64_t batch, int64_t token, int64_t head,
           A* partial) {
    const A rstd = ((const A*)s_.rstd)[locate(s_.rstd_stride, batch, token, head)];
    A projected = 0;
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t at = locate(s_.grad_stride, batch, token, head + row);
      A* rotated = rotated_ + row * a_.width;
      rotation.apply(t, (const T*)s_.grad + at, rotated,
                     [](A* to, Vec<A> v, auto place) { store(to, v, place); });
      const T* x = x_at(batch, token, head + row);
      A sums[1];
      sum_vectors<A>(a_.width, sums, [&](int64_t i, auto at, Vec<A>* acc) {
        const Vec<A> g = load(rotated + i, at) * load(weight_ + row * a_.width + i, at);
        acc[0] += present(g * (load(x + i, at) * splat(rstd)), at, (A)0);
      });
      projected += sums[0];
    }
    const Vec<A> mean = splat(projected / (A)(rows_ * a_.width));
    for (int64_t row = 0; row < rows_; ++row) {
      const T* x = x_at(batch, token, head + row);
      T* result = (T*)s_.result + locate(s_.result_stride, batch, token, head + row);
      const int64_t first = row * a_.width;
      for_vectors<A>(a_.width, [&](int64_t i, auto at) {
        const Vec<A> u = load(rotated_ + first + i, at), x_hat = load(x + i, at) * splat(rstd);
        const Vec<A> g = u * load(weight_ + first + i, at);
        accumulate(partial, first + i, u * x_hat, at);
        store(result + i, splat(rstd) * (g - x_hat * mean), at);
      });
    }
  }

 private:
  const T* x_at(int64_t batch, int64_t token, int64_t head) const {
    return (const T*)s_.x + locate(s_.x_stride, batch, token, head);
  }

  const Rotary& a_;
  const RotaryStream& s_;
  const int64_t rows_;
  Scratch<A> weight_, rotated_;
};

template <class T>
void backward(const Rotary& a, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  Rotation<A> rotation(a, /*transposed=*/true);
  const auto blocks = [&](int64_t from, int64_t to, auto&& run) {
    for (int64_t block = from; block < to; block += kBlock) {
      const int64_t last = block + kBlock < to ? block + kBlock : to;
      for (int64_t token = block; token < last; ++token) {
        rotation.prepare(token - block, token / a.tokens, token % a.tokens);
      }
      run(block, last);
    }
  };
  const int64_t tokens = a.batch * a.tokens;
  const int64_t from = chunk_begin(tokens, a.chunks, begin),
                to = chunk_begin(tokens, a.chunks, end);
  if (!a.norm) {
    bool streamed[Rotary::kStreams] = {};
    for (int n = 0; n < a.count && from < to; ++n) {
      streamed[n] = worth_streaming_result<T>(a, a.streams[n], to - 1);
    }
    blocks(from, to, [&](int64_t block, int64_t last) {
      for (int n = 0; n < a.count; ++n) {
        const RotaryStream& s = a.streams[n];
        const auto row = [&](int64_t t, int64_t batch, int64_t token, int64_t head) {
          const T* grad = (const T*)s.grad + locate(s.grad_stride, batch, token, head);
          T* result = (T*)s.result + locate(s.result_stride, batch, token, head);
          rotation.apply(t, grad, result,
                         [&](T* p, Vec<A> v, auto at) { write(p, v, at, streamed[n]); });
        };
        for_rows(a, s.grad_stride, block, last, s.heads, row);
      }
    });
    if (streamed[0] || streamed[1]) finish_streams();
    return;
  }
  NormGradients<T> gradients[] = {{a, a.streams[0]}, {a, a.streams[a.count - 1]}};
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    A* partials[Rotary::kStreams] = {};
    for (int n = 0; n < a.count; ++n) {
      const RotaryStream& s = a.streams[n];
      partials[n] = fresh_partial<A>(s.partials, chunk, (a.across ? s.heads : 1) * a.width);
    }
    const int64_t first = chunk_begin(tokens, a.chunks, chunk);
    blocks(first, chunk_begin(tokens, a.chunks, chunk + 1), [&](int64_t block, int64_t last) {
      for (int n = 0; n < a.count; ++n) {
        const RotaryStream& s = a.streams[n];
        const int64_t groups = a.across ? (s.heads > 0) : s.heads;
        for_rows(a, s.x_stride, block, last, groups,
                 [&](int64_t t, int64_t batch, int64_t token, int64_t head) {
                   gradients[n].run(rotation, t, batch, token, head, partials[n]);
                 });
      }
    });
  }
}

template <class Call>
void for_dtype(DType dtype, Call&& call) {
  dispatch(dtype, dtype, [&](auto t, auto p) {
    using T = typename decltype(t)::type;
    if constexpr (std::is_same_v<T, typename decltype(p)::type>) call(t);
  });
}

}  // namespace

// Items are tokens.
TW_EXPORT void rotary_forward(const Rotary& a, int64_t begin, int64_t end) {
  for_dtype(a.dtype, [&](auto t) { forward<typename decltype(t)::type>(a, begin, end); });
}

// Items are chunks of tokens.
TW_EXPORT void rotary_backward(const Rotary& a, int64_t begin, int64_t end) {
  for_dtype(a.dtype, [&](auto t) { backward<typename decltype(t)::type>(a, begin, end); });
}

// Items are columns of the weights, the first stream's before the second's.
TW_EXPORT void rotary_parameter_gradients(const Rotary& a, int64_t begin, int64_t end) {
  dispatch(a.dtype, a.param_dtype, [&](auto t, auto p) {
    using A = Accumulate<typename decltype(t)::type>;
    using P = typename decltype(p)::type;
    int64_t before = 0;
    for (int n = 0; n < a.count; ++n) {
      const RotaryStream& s = a.streams[n];
      const int64_t columns = (a.across ? s.heads : 1) * a.width;
      const int64_t first = begin > before ? begin - before : 0;
      const int64_t last = end - before < columns ? end - before : columns;
      if (s.grad_weight && first < last) {
        add_chunks((P*)s.grad_weight, (const A*)s.partials, a.chunks, columns, first, last);
      }
      before += columns;
    }
  });
}

TW_EXPORT int64_t rotary_chunks(int64_t rows) { return chunks_of(rows); }
