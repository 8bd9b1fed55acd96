// Adafactor on the CPU: passes over all elements, with passes over the averages in between.
#include "cpu/optim.h"

#include <type_traits>

#include "core/adafactor.h"
#include "cpu/chunks.h"

namespace {

using namespace torchweld;

// A chunk of one of a tensor's matrices.
struct Chunk {
  const FactoredTensor* tensor;
  int64_t matrix, chunk;
  int64_t first_row() const { return chunk_begin(tensor->height, tensor->chunks, chunk); }
  int64_t last_row() const { return chunk_begin(tensor->height, tensor->chunks, chunk + 1); }
};

// body(index, Chunk) for the chunks [begin, end), counted over all tensors.
template <class Body>
void for_chunks(const Adafactor& a, int64_t begin, int64_t end, Body&& body) {
  const FactoredTensor* t = a.tensors;
  for (int64_t at = begin; at < end; ++at) {
    while (at >= t->first_block + t->matrices * t->chunks) ++t;
    const int64_t here = at - t->first_block;
    body(at, Chunk{t, here / t->chunks, here % t->chunks});
  }
}

// body(row of the matrix, the row's first element in the tensor, number of elements)
template <class Body>
void for_rows(const Chunk& c, int64_t elements, Body&& body) {
  for (int64_t row = c.first_row(); row < c.last_row(); ++row) {
    const int64_t begin = (c.matrix * c.tensor->height + row) * c.tensor->columns;
    const int64_t left = elements - begin;
    body(row, begin, left < c.tensor->columns ? left : c.tensor->columns);
  }
}

// Sums g^2 over each row and each column of a chunk.
template <class T>
void sum_squares(const Adafactor& a, const Chunk& c) {
  const FactoredTensor& t = *c.tensor;
  const int64_t width = t.columns;
  double* partial =
      fresh_partial<double>(t.column_partials + c.matrix * t.chunks * width, c.chunk, width);
  double* rows = t.row_sums + c.matrix * t.height;
  const float factor = (float)a.grad_factor.read();
  for_rows(c, t.width, [&](int64_t row, int64_t begin, int64_t) {
    const T* grad = (const T*)t.grad + begin;
    Vec<double> sums[2] = {};
    for_vectors<float>(width, [&](int64_t i, auto place) {
      const F32 g = present(load(grad + i, place) * factor, place, 0.0f);
      add_squares(sums, g);
      double* into = partial + i;
      if constexpr (std::is_same_v<decltype(place), Whole>) {
        Vec<double> half[2] = {load(into), load(into + kLanes<double>)};
        add_squares(half, g);
        store(into, half[0]);
        store(into + kLanes<double>, half[1]);
      } else {
        for (int64_t lane = 0; lane < place.count; ++lane) into[lane] += (double)g[lane] * g[lane];
      }
    });
    rows[row] = total(sums);
  });
}

void add_columns(const Adafactor& /*a*/, const FactoredTensor& t, int64_t matrix) {
  const int64_t width = t.columns;
  const double* partials = t.column_partials + matrix * t.chunks * width;
  add_chunks(t.column_sums + matrix * width, partials, t.chunks, width, 0, width);
}

// Updates averages with new means, each given as the sum of `elements` squares.
void take_in(const Adafactor& a, const FactoredTensor& t, float* averages, const double* sums,
             int64_t count, int64_t elements) {
  for (int64_t i = 0; i < count; ++i) {
    averages[i] = take_in_mean(a.settings, t.rate, averages[i], sums[i], elements);
  }
}

void average_matrix(const Adafactor& a, const FactoredTensor& t, int64_t matrix) {
  const int64_t row = matrix * t.height, column = matrix * t.columns;
  float* rows = (float*)t.moment[0] + row;
  take_in(a, t, rows, t.row_sums + row, t.height, t.whole_columns);
  take_in(a, t, (float*)t.moment[1] + column, t.column_sums + column, t.columns, t.whole_height);
  double sum = 0;
  for (int64_t i = 0; i < t.height; ++i) sum += rows[i];
  t.average_sums[matrix] = sum;
}

// The scales of rows and columns that turn a gradient into a direction.
void scale_matrix(const Adafactor& a, const FactoredTensor& t, int64_t matrix) {
  const int64_t row = matrix * t.height, column = matrix * t.columns;
  const float* rows = (float*)t.moment[0] + row;
  const float* columns = (float*)t.moment[1] + column;
  const float scale =
      square_root(adafactor_mean(a.settings, t.average_sums[matrix], t.whole_height));
  for (int64_t i = 0; i < t.height; ++i) t.row_scales[row + i] = scale / square_root(rows[i]);
  for (int64_t i = 0; i < t.columns; ++i) t.column_scales[column + i] = 1 / square_root(columns[i]);
}

// body(a, tensor, its matrix) for the matrices [begin, end), counted over all tensors.
template <class Body>
void for_matrices(const Adafactor& a, int64_t begin, int64_t end, Body&& body) {
  const FactoredTensor* t = a.tensors;
  for (int64_t at = begin; at < end; ++at) {
    while (at >= t->first_matrix + t->matrices) ++t;
    body(a, *t, at - t->first_matrix);
  }
}

// The update directions of a row's elements, from element `begin` of the tensor on. A vector's
// updated averages go to `variance`.
template <bool Factored>
class Direction {
 public:
  Direction(const Adafactor& a, const Chunk& c, int64_t row, int64_t begin)
      : direction_(a.settings, c.tensor->rate) {
    const FactoredTensor& t = *c.tensor;
    if constexpr (Factored) {
      row_scale_ = t.row_scales[c.matrix * t.height + row];
      of_elements_ = t.column_scales + c.matrix * t.columns;
    } else {
      of_elements_ = (float*)t.moment[0] + begin;
    }
  }
  template <class Place>
  F32 operator()(F32 g, int64_t i, Place place, F32* variance) const {
    const F32 v = load(of_elements_ + i, place);
    if constexpr (Factored) {
      return direction_.scale_by_factors(g, row_scale_, v);
    } else {
      *variance = v;
      return direction_.scale_by_average(g, *variance);
    }
  }
  template <class Place>
  void keep(int64_t i, F32 variance, Place place) const {
    if constexpr (!Factored) store(of_elements_ + i, variance, place);
  }

 private:
  const AdafactorDirection direction_;
  float* of_elements_;
  float row_scale_;
};

template <class Param, bool Factored>
void measure_chunk(const Adafactor& a, const Chunk& c, double (&squares)[2]) {
  Vec<double> of_params[2] = {}, of_directions[2] = {};
  const float factor = (float)a.grad_factor.read();
  for_rows(c, c.tensor->width, [&](int64_t row, int64_t begin, int64_t count) {
    const auto* grad = (const typename Param::Storage*)c.tensor->grad + begin;
    const Param param(*c.tensor, begin, count);
    const Direction<Factored> direction(a, c, row, begin);
    for_vectors<float>(count, [&](int64_t i, auto place) {
      F32 variance;
      add_squares(of_params, param.get(i, place));
      const F32 u = direction(load(grad + i, place) * factor, i, place, &variance);
      add_squares(of_directions, present(u, place, 0.0f));
    });
  });
  squares[0] = total(of_params);
  squares[1] = total(of_directions);
}

template <class Param, bool Factored>
void step_chunk(const Adafactor& a, const Chunk& c) {
  const FactoredTensor& t = *c.tensor;
  const float factor = (float)a.grad_factor.read(), decay = t.decay, length = t.length;
  const float beta1 = (float)a.settings.beta1, taken = 1 - beta1;
  for_rows(c, t.width, [&](int64_t row, int64_t begin, int64_t count) {
    const auto* grad = (const typename Param::Storage*)t.grad + begin;
    float* momentum = t.moment[2] ? (float*)t.moment[2] + begin : nullptr;
    Param param(t, begin, count);
    const Direction<Factored> direction(a, c, row, begin);
    for_vectors<float>(count, [&](int64_t i, auto place) {
      F32 variance;
      F32 step = direction(load(grad + i, place) * factor, i, place, &variance) * length;
      if (momentum) {
        step = load(momentum + i, place) * beta1 + step * taken;
        store(momentum + i, step, place);
      }
      direction.keep(i, variance, place);
      param.set(i, param.get(i, place) * decay - step, place);
    });
  });
}

// call(std::true_type{}) for matrices, call(std::false_type{}) for vectors.
template <class Call>
void with_kind(const Adafactor& a, Call&& call) {
  a.factored ? call(std::true_type{}) : call(std::false_type{});
}

}  // namespace

// The number of row chunks and column slices that a matrix is summed in.
TW_EXPORT int64_t adafactor_chunks(int64_t height) { return chunks_of(height); }
TW_EXPORT int64_t adafactor_slices(int64_t /*columns*/) { return 1; }

// Items are chunks of matrices.
TW_EXPORT void adafactor_sum(const Adafactor& a, int64_t begin, int64_t end) {
  dispatch(a.dtype, a.dtype, [&](auto t, auto) {
    using T = typename decltype(t)::type;
    if constexpr (sizeof(T) <= sizeof(float)) {
      for_chunks(a, begin, end, [&](int64_t, const Chunk& c) { sum_squares<T>(a, c); });
    }
  });
}

// Items are matrices.
TW_EXPORT void adafactor_add(const Adafactor& a, int64_t begin, int64_t end) {
  for_matrices(a, begin, end, add_columns);
}
TW_EXPORT void adafactor_average(const Adafactor& a, int64_t begin, int64_t end) {
  for_matrices(a, begin, end, average_matrix);
}
TW_EXPORT void adafactor_scale(const Adafactor& a, int64_t begin, int64_t end) {
  for_matrices(a, begin, end, scale_matrix);
}

// Items are chunks.
TW_EXPORT void adafactor_measure(const Adafactor& a, int64_t begin, int64_t end) {
  with_params(a, [&](auto param) {
    with_kind(a, [&](auto factored) {
      for_chunks(a, begin, end, [&](int64_t at, const Chunk& c) {
        measure_chunk<typename decltype(param)::type, decltype(factored)::value>(a, c,
                                                                                 a.squares[at]);
      });
    });
  });
}

// Items are tensors.
TW_EXPORT void adafactor_add_squares(const Adafactor& a, int64_t begin, int64_t end) {
  for (const FactoredTensor* t = a.tensors + begin; t < a.tensors + end; ++t) {
    t->squares[0] = t->squares[1] = 0;
    for (int64_t at = t->first_block; at < t->first_block + t->matrices * t->chunks; ++at) {
      for (int k = 0; k < 2; ++k) t->squares[k] += a.squares[at][k];
    }
  }
}
TW_EXPORT void adafactor_find_lengths(const Adafactor& a, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) set_lengths(a, a.tensors[i]);
}

// Items are chunks.
TW_EXPORT void adafactor_step(const Adafactor& a, int64_t begin, int64_t end) {
  with_written_params(a, [&](auto param) {
    with_kind(a, [&](auto factored) {
      for_chunks(a, begin, end, [&](int64_t, const Chunk& c) {
        step_chunk<typename decltype(param)::type, decltype(factored)::value>(a, c);
      });
    });
  });
}
