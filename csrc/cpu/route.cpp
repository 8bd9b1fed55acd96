// A router's choice of experts on the CPU, see core/route.h. Rows are short: a row is scored by
// vectors, and its k best are searched one after another.
#include "core/route.h"

#include "core/act.h"
#include "core/dispatch.h"
#include "core/log.h"
#include "cpu/vec.h"

namespace {

using namespace torchweld;

template <class A>
constexpr A kNothing = -__builtin_inff();
// Keeps a sum of zeros from dividing by zero; too small to change another sum's bits.
template <class A>
constexpr A kTiny = (A)1e-20;

// The place of the best that is not taken, the first of equals; takes it. NaN counts as the largest
// number, as in torch's sort.
template <class A>
int64_t take_best(const A* values, A* taken, int64_t count) {
  int64_t best = -1;
  for (int64_t at = 0; at < count; ++at) {
    if (taken[at] != 0) continue;
    const A one = values[at], other = best < 0 ? 0 : values[best];
    if (best < 0 || one > other || (one != one && other == other)) best = at;
  }
  taken[best] = 1;
  return best;
}

// A row's scores, and what its choice is made by.
template <class A>
struct Row {
  const Route& a;
  A *own, *choice, *taken, *counts;  // [experts] each
  A total, lse, sum;                 // of the exponentials, its logarithm; of the scores

  Row(const Route& route, A* scratch)
      : a(route),
        own(scratch),
        choice(scratch + a.experts),
        taken(scratch + 2 * a.experts),
        counts(scratch + 3 * a.experts) {}

  // Leaves exp(logit - highest) in `choice`.
  template <class T>
  void score(int64_t row) {
    const T* logits = (const T*)a.logits + row * a.experts;
    A highest = kNothing<A>;
    for_vectors<A>(a.experts,
                   [&](int64_t i, auto at) { store(own + i, load(logits + i, at), at); });
    for (int64_t i = 0; i < a.experts; ++i) highest = own[i] > highest ? own[i] : highest;
    const A base = highest == kNothing<A> ? 0 : highest;
    A one[1];
    sum_vectors<A>(a.experts, one, [&](int64_t i, auto at, Vec<A>* acc) {
      const Vec<A> e = exp_nonpositive(present(load(own + i, at) - base, at, kNothing<A>));
      store(choice + i, e, at);
      acc[0] += e;
    });
    total = one[0];
    lse = total == 0 ? kNothing<A> : base + log_positive(total);
    sum = 1;
    if (!a.sigmoid) {
      const A inverse = 1 / total;
      for_vectors<A>(a.experts, [&](int64_t i, auto at) {
        store(own + i, load(choice + i, at) * inverse, at);
      });
      return;
    }
    sum_vectors<A>(a.experts, one, [&](int64_t i, auto at, Vec<A>* acc) {
      const Vec<A> share = present(logistic(load(own + i, at)).value, at, (A)0);
      store(own + i, share, at);
      acc[0] += share;
    });
    sum = one[0] + kTiny<A>;
  }

  void clear(int64_t count) {
    for (int64_t i = 0; i < count; ++i) taken[i] = 0;
  }

  void prepare_choice() {
    const A* bias = (const A*)a.bias;
    for (int64_t i = 0; i < a.experts; ++i) choice[i] = bias ? own[i] + bias[i] : own[i];
    if (a.groups > 1) mask_groups();
    clear(a.experts);
  }

  // Makes all experts outside the best groups the last choice.
  void mask_groups() {
    const int64_t each = a.experts / a.groups;
    const int64_t best = a.best_of_group < each ? a.best_of_group : each;
    clear(a.experts);
    for (int64_t group = 0; group < a.groups; ++group) {
      const int64_t first = group * each;
      counts[group] = 0;
      for (int64_t n = 0; n < best; ++n)
        counts[group] += choice[first + take_best(choice + first, taken + first, each)];
    }
    clear(a.groups);
    for (int64_t n = 0; n < a.top_groups; ++n) take_best(counts, taken, a.groups);
    for (int64_t i = 0; i < a.experts; ++i) {
      if (taken[i / each] == 0) choice[i] = kNothing<A>;
    }
  }
};

struct Block {
  int64_t first, end;
  Block(const Route& a, int64_t at) : first(at * kRouteBlock), end(first + kRouteBlock) {
    if (end > a.rows) end = a.rows;
  }
};

template <class T>
void forward_block(const Route& a, int64_t number) {
  using A = Accumulate<T>;
  Row<A> scores(a, (A*)a.scratch + number * 4 * a.experts);
  A* chosen = (A*)a.sums + number * (2 * a.experts + 2);
  A *shares = chosen + a.experts, *rest = shares + a.experts;
  for (int64_t i = 0; i < 2 * a.experts + 2; ++i) chosen[i] = 0;
  const Block block(a, number);
  for (int64_t row = block.first; row < block.end; ++row) {
    scores.template score<T>(row);
    scores.prepare_choice();
    const A counted = !a.mask || a.mask[row] ? 1 : 0;
    A* weights = (A*)a.weights + row * a.k;
    A sum = kTiny<A>;
    for (int64_t n = 0; n < a.k; ++n) {
      const int64_t expert = take_best(scores.choice, scores.taken, a.experts);
      a.indices[row * a.k + n] = expert;
      weights[n] = scores.own[expert];
      sum += weights[n];
      chosen[expert] += counted;
    }
    for (int64_t n = 0; n < a.k; ++n)
      weights[n] = (a.renormalize ? weights[n] / sum : weights[n]) * (A)a.scale;
    // As a product, so that NaN of a row that does not count is kept, as in eager torch.
    const A share = counted / scores.sum;
    for_vectors<A>(a.experts, [&](int64_t i, auto at) {
      store(shares + i, load(shares + i, at) + load(scores.own + i, at) * share, at);
    });
    rest[0] += scores.lse * scores.lse * counted;
    rest[1] += counted;
  }
}

template <class T>
void gradient_block(const RouteGradient& g, int64_t number) {
  using A = Accumulate<T>;
  const Route& a = g.route;
  Row<A> scores(a, (A*)a.scratch + number * 4 * a.experts);
  A* slope = scores.counts;  // of the scores
  const A *chosen = (const A*)g.counts, tokens = chosen[a.experts];
  const Block block(a, number);
  for (int64_t row = block.first; row < block.end; ++row) {
    scores.template score<T>(row);
    const A counted = !a.mask || a.mask[row] ? 1 : 0;
    const int64_t* indices = a.indices + row * a.k;
    const A* grad = (const A*)g.grad_weights + row * a.k;
    A sum = kTiny<A>, product = 0, balance = 0;
    for (int64_t n = 0; n < a.k; ++n) {
      sum += scores.own[indices[n]];
      product += grad[n] * scores.own[indices[n]];
    }
    const A factor = (A)(g.grad_balance * a.experts) * counted / (tokens * scores.sum);
    for (int64_t i = 0; i < a.experts; ++i) {
      slope[i] = factor * chosen[i];
      balance += slope[i] * scores.own[i];
    }
    if (a.sigmoid) {
      for (int64_t i = 0; i < a.experts; ++i) slope[i] -= balance / scores.sum;
    }
    for (int64_t n = 0; n < a.k; ++n) {
      const A own = a.renormalize ? (grad[n] - product / sum) / sum : grad[n];
      slope[indices[n]] += own * (A)a.scale;
    }
    A mean = 0;
    if (!a.sigmoid) {
      for (int64_t i = 0; i < a.experts; ++i) mean += slope[i] * scores.own[i];
    }
    const A of_z = (A)g.grad_z * 2 * scores.lse * counted / tokens, inverse = 1 / scores.total;
    T* to = (T*)g.grad_logits + row * a.experts;
    for_vectors<A>(a.experts, [&](int64_t i, auto at) {
      const Vec<A> own = load(scores.own + i, at), of = load(slope + i, at);
      const Vec<A> made = a.sigmoid ? of * own * (1 - own) : own * (of - mean);
      store(to + i, made + load(scores.choice + i, at) * (of_z * inverse), at);
    });
  }
}

}  // namespace

// Items are blocks of rows.
TW_EXPORT void route_forward(const Route& a, int64_t begin, int64_t end) {
  dispatch(a.dtype, a.dtype, [&](auto t, auto) {
    for (int64_t at = begin; at < end; ++at) forward_block<typename decltype(t)::type>(a, at);
  });
}

TW_EXPORT void route_gradient(const RouteGradient& g, int64_t begin, int64_t end) {
  dispatch(g.dtype, g.dtype, [&](auto t, auto) {
    for (int64_t at = begin; at < end; ++at) gradient_block<typename decltype(t)::type>(g, at);
  });
}
