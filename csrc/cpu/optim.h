// The loop of every optimizer on the CPU, and the codecs that it is instantiated for.
//
// A step with two moments reads a parameter, its gradient and both moments, and writes all but the
// gradient. A float32 parameter then moves 28 bytes with float32 moments, 20 with bfloat16 moments,
// and 16 and 1/16 with 8-bit moments.
#pragma once

#include "core/dispatch.h"
#include "core/optim.h"
#include "cpu/quant8.h"
#include "cpu/rounding.h"

TW_NAMESPACE_BEGIN

// Elements [begin, begin + count) of a tensor, which are its blocks [first, first + blocks). If
// moments are stored in blocks, a span is one block, or several narrow rows of one block each.
struct Span {
  int64_t first, begin, count, blocks;
  const SplitRows* split;  // null, or the split of the rows: then the span is a piece
};
inline Span make_span(const StepTensor& t, int64_t first, int64_t last) {
  const int64_t begin = quant_block(first, t.width).begin;
  const QuantBlock end = quant_block(last - 1, t.width);
  return {first, begin, end.begin + end.count - begin, last - first, nullptr};
}
// The span of blocks [first, last), counted over all tensors, of tensor number `at`. If rows are
// split, it is one piece.
template <class Rule>
Span make_span(const Step<Rule>& a, int64_t at, int64_t first, int64_t last) {
  const StepTensor& t = a.tensors[at];
  first -= t.first_block, last -= t.first_block;
  if (!a.splits) return make_span(t, first, last);
  const QuantBlock piece = piece_of(a.splits[at], first, t.width);
  return {first, piece.begin, piece.count, 1, &a.splits[at]};
}

// --- Moments ------------------------------------------------------------------------------------

// A moment's elements in a span: enter() the span, get() and set() its vectors, then measure() and
// leave().
template <class T>
class PlainMoment {
 public:
  static constexpr bool kInBlocks = false;
  void enter(const StepTensor& t, int moment, bool /*is_signed*/, const Span& span) {
    values_ = (T*)t.moment[moment] + span.begin;
  }
  template <class Place>
  F32 get(int64_t i, Place place) const {
    return read(values_ + i, place);
  }
  template <class Place>
  void set(int64_t i, F32 v, Place place) {
    store(values_ + i, v, place);
  }
  void measure() {}
  void leave() {}

 private:
  T* values_;
};

// Encodes a block once all its elements, and so its absmax, are known. Narrow rows are encoded
// together.
class BlockMoment {
 public:
  static constexpr bool kInBlocks = true;
  void enter(const StepTensor& t, int moment, bool is_signed, const Span& span) {
    codes_ = (uint8_t*)t.moment[moment] + span.begin;
    absmax_ = t.absmax[moment] + span.first;
    count_ = span.count;
    rows_ = span.blocks;
    width_ = t.width;
    is_signed_ = is_signed;
    scale_ = splat(rows_ == 1 ? *absmax_ : 1.0f);
    decode_block(old_.at, codes_, count_, is_signed);
    if (rows_ > 1) scale_rows(old_, absmax_, rows_, width_);
    largest_ = {};
    if (span.split) absmax_ = span.split->new_absmax[moment] + span.first;
  }
  template <class Place>
  F32 get(int64_t i, Place place) const {
    return present(load(old_.at + i) * scale_, place, 0.0f);  // code 0 may stand for another value
  }
  template <class Place>
  void set(int64_t i, F32 v, Place place) {
    largest_.add(present(v, place, 0.0f));  // lanes past the end of a row are not measured
    store(new_.at + i, v, place);
  }
  void measure() {
    if (rows_ > 1) return measure_rows(absmax_, new_, rows_, width_);
    *absmax_ = largest_.value();
  }
  void leave() {
    if (rows_ > 1) {
      const auto encode = is_signed_ ? encode_rows<true> : encode_rows<false, true>;
      return encode(codes_, new_, absmax_, rows_, width_);
    }
    const auto encode = is_signed_ ? encode_block<true> : encode_block<false, true>;
    encode(codes_, new_.at, count_, *absmax_);
  }

 private:
  F32 scale_;
  Largest largest_;
  BlockRoom old_, new_;
  uint8_t* codes_;
  float* absmax_;
  int64_t count_, rows_, width_;
  bool is_signed_;
};

// --- Parameters ---------------------------------------------------------------------------------

// Elements [begin, begin + count) of a parameter.
template <class T>
struct PlainParam {
  using Storage = T;
  T* param;
  PlainParam(const StepTensor& t, int64_t begin, int64_t /*count*/) : param((T*)t.param + begin) {}
  template <class Place>
  F32 get(int64_t i, Place place) const {
    return read(param + i, place);
  }
  template <class Place>
  void set(int64_t i, F32 v, Place place) {
    store(param + i, v, place);
  }
};

template <class T>
struct MasteredParam {
  using Storage = T;
  T* param;
  float* master;
  MasteredParam(const StepTensor& t, int64_t begin, int64_t /*count*/)
      : param((T*)t.param + begin), master((float*)t.master + begin) {}
  template <class Place>
  F32 get(int64_t i, Place place) const {
    return read(master + i, place);
  }
  template <class Place>
  void set(int64_t i, F32 v, Place place) {
    store(master + i, v, place);
    store(param + i, v, place);
  }
};

// The upper or lower halves of floats.
inline U32 halves(const uint16_t* p, Whole) { return detail::widen(p); }
inline U32 halves(const uint16_t* p, Part part) {
  uint16_t lanes[kLanes<float>];
  load_part(lanes, p, part);
  return detail::widen(lanes);
}
inline void set_halves(uint16_t* p, U32 v, Whole) { detail::narrow(p, v); }
inline void set_halves(uint16_t* p, U32 v, Part part) {
  uint16_t lanes[kLanes<float>];
  detail::narrow(lanes, v);
  store_part(p, lanes, part);
}

struct RemainderParam {
  using Storage = BFloat16;
  uint16_t* param;
  uint16_t* remainder;
  RemainderParam(const StepTensor& t, int64_t begin, int64_t /*count*/)
      : param((uint16_t*)t.param + begin), remainder((uint16_t*)t.master + begin) {}
  template <class Place>
  F32 get(int64_t i, Place place) const {
    return (F32)complete(halves(param + i, place), halves(remainder + i, place));
  }
  template <class Place>
  void set(int64_t i, F32 v, Place place) {
    const U32 bits = v != v ? U32{} + 0x7fc00000u : (U32)v;
    set_halves(param + i, round_to_nearest_half(bits), place);
    set_halves(remainder + i, (bits & 0xffffu), place);
  }
};

struct ShortRemainderParam {
  using Storage = BFloat16;
  uint16_t* param;
  uint8_t* remainder;
  ShortRemainderParam(const StepTensor& t, int64_t begin, int64_t /*count*/)
      : param((uint16_t*)t.param + begin), remainder((uint8_t*)t.master + begin) {}
  template <class Place>
  F32 get(int64_t i, Place place) const {
    return (F32)complete_24(halves(param + i, place), load_codes(remainder + i, place));
  }
  template <class Place>
  void set(int64_t i, F32 v, Place place) {
    const U32 bits = v != v ? U32{} + 0x7fc000u : round_to_24((U32)v);
    set_halves(param + i, half_of_24(bits), place);
    store_codes(remainder + i, bits & 0xffu, place);
  }
};

class RoundedParam {
 public:
  using Storage = BFloat16;
  RoundedParam(const StepTensor& t, int64_t begin, int64_t count)
      : param_((uint16_t*)t.param + begin), bits_(*(const Rounding*)t.master, begin, count) {}
  template <class Place>
  F32 get(int64_t i, Place place) const {
    return read((const BFloat16*)param_ + i, place);
  }
  template <class Place>
  void set(int64_t i, F32 v, Place place) {
    set_halves(param_ + i, round_randomly((U32)v, bits_(i)), place);
  }

 private:
  uint16_t* param_;
  RoundingBits bits_;
};

// --- The loop -----------------------------------------------------------------------------------

inline I32 is_sound(F32 last_moment) { return (I32)(magnitude_bits(last_moment) < kInfinityBits); }

// The numbers of a step that all its tensors share.
struct SharedNumbers {
  float grad_factor, average_rate;
  explicit SharedNumbers(const AnyStep& a)
      : grad_factor((float)a.grad_factor.read()), average_rate((float)a.average_rate.read()) {}
};

template <class Param, class Moment, bool OnlyAbsmaxes = false, class Rule>
void step_span(const StepTensor& t, const Rule& rule, const SharedNumbers& now, const Span& span) {
  constexpr int N = Rule::kMoments;
  const auto* grad = (const typename Param::Storage*)t.grad + span.begin;
  Param param(t, span.begin, span.count);
  float* companion = t.companion ? t.companion + span.begin : nullptr;
  Moment moments[N > 0 ? N : 1];
  for (int k = 0; k < N; ++k) moments[k].enter(t, k, Rule::kSigned[k], span);
  for_vectors<float>(span.count, [&](int64_t i, auto place) {
    const F32 before = param.get(i, place), g = read(grad + i, place) * now.grad_factor;
    F32 p = before, m[N > 0 ? N : 1];
    for (int k = 0; k < N; ++k) m[k] = moments[k].get(i, place);
    if constexpr (kHasCompanion<Rule>) {
      F32 z = read(companion + i, place);
      const F32 was = z;
      rule(p, g, m, z);
      if constexpr (Moment::kInBlocks) z = is_sound(m[N - 1]) ? z : was;
      if constexpr (!OnlyAbsmaxes) store(companion + i, z, place);
    } else {
      rule(p, g, m);
    }
    if constexpr (Moment::kInBlocks) skip_unless<N>(is_sound(m[N - 1]), p, before, m);
    for (int k = 0; k < N; ++k) moments[k].set(i, m[k], place);
    if constexpr (OnlyAbsmaxes) return;
    param.set(i, p, place);
    if constexpr (!kHasCompanion<Rule>) {
      if (companion) {
        const F32 average = read(companion + i, place);
        // The parameter as it is stored.
        store(companion + i, average + (param.get(i, place) - average) * now.average_rate, place);
      }
    }
  });
  // A split block's absmax is already the maximum over all devices.
  if (OnlyAbsmaxes || !span.split) {
    for (int k = 0; k < N; ++k) moments[k].measure();
  }
  if constexpr (OnlyAbsmaxes) return;
  for (int k = 0; k < N; ++k) moments[k].leave();
}

// Compute the step, but write only the block's sums of squares.
template <class Param, class Moment, class Rule>
void measure_block(const StepTensor& t, const Rule& rule, float grad_factor, const Span& span,
                   double (&squares)[2]) {
  constexpr int N = Rule::kMoments;
  const auto* grad = (const typename Param::Storage*)t.grad + span.begin;
  const Param param(t, span.begin, span.count);
  Moment moments[N > 0 ? N : 1];
  for (int k = 0; k < N; ++k) moments[k].enter(t, k, Rule::kSigned[k], span);
  Vec<double> of_params[2] = {}, of_steps[2] = {};
  for_vectors<float>(span.count, [&](int64_t i, auto place) {
    const F32 p = param.get(i, place);
    F32 m[N > 0 ? N : 1];
    for (int k = 0; k < N; ++k) m[k] = moments[k].get(i, place);
    F32 step = rule.direction(p, read(grad + i, place) * grad_factor, m);
    if constexpr (Moment::kInBlocks && N > 0) step = is_sound(m[N - 1]) ? step : F32{};
    add_squares(of_params, p);
    add_squares(of_steps, present(step, place, 0.0f));
  });
  squares[0] = total(of_params);
  squares[1] = total(of_steps);
}

template <class Param, class Moment, class Rule>
void measure_blocks(const Step<Rule>& a, int64_t begin, int64_t end) {
  const float grad_factor = (float)a.grad_factor.read();
  int64_t at = step_tensor(a.tensors, a.count, begin);
  for (int64_t block = begin; block < end; ++block) {
    while (block >= a.tensors[at + 1].first_block) ++at;
    const Span span = make_span(a, at, block, block + 1);
    measure_block<Param, Moment>(a.tensors[at], a.rules[at], grad_factor, span, a.squares[block]);
  }
}

template <class Param, class Moment, class Rule>
void step_blocks(const Step<Rule>& a, int64_t begin, int64_t end) {
  const SharedNumbers now(a);
  for (int64_t at = step_tensor(a.tensors, a.count, begin); begin < end; ++at) {
    const StepTensor& t = a.tensors[at];
    const int64_t next = a.tensors[at + 1].first_block;
    const int64_t stop = next < end ? next : end;
    const int64_t at_once = !Moment::kInBlocks ? stop - begin
                            : a.splits         ? 1
                                               : rows_at_once(t.width);
    while (begin < stop) {
      const int64_t last = begin + at_once < stop ? begin + at_once : stop;
      const Span span = make_span(a, at, begin, last);
      begin = last;
      if constexpr (Moment::kInBlocks) {
        if (a.only_absmaxes) {
          step_span<Param, Moment, true>(t, a.rules[at], now, span);
          continue;
        }
      }
      step_span<Param, Moment>(t, a.rules[at], now, span);
    }
  }
}

// --- Codecs -------------------------------------------------------------------------------------

// call(Type<Moment>{})
template <class Rule, class Call>
void with_moments(const Step<Rule>& a, Call&& call) {
  if constexpr (Rule::kMoments == 0) {
    return call(Type<PlainMoment<float>>{});
  } else {
    switch (a.state) {
      case StateCodec::f32:
        return call(Type<PlainMoment<float>>{});
      case StateCodec::bf16:
        return call(Type<PlainMoment<BFloat16>>{});
      case StateCodec::blocks:
        return call(Type<BlockMoment>{});
    }
  }
}

// call(Type<Param>{}). Float32 parameters are their own masters. Only bfloat16 parameters have
// remainders.
template <class Args, class Call>
void with_params(const Args& a, Call&& call) {
  if (a.param == ParamCodec::remainder) return call(Type<RemainderParam>{});
  if (a.param == ParamCodec::short_remainder) return call(Type<ShortRemainderParam>{});
  const bool mastered = a.param == ParamCodec::master;
  switch (a.dtype) {
    case DType::f32:
      return call(Type<PlainParam<float>>{});
    case DType::bf16:
      return mastered ? call(Type<MasteredParam<BFloat16>>{}) : call(Type<PlainParam<BFloat16>>{});
    case DType::f16:
      return mastered ? call(Type<MasteredParam<Half>>{}) : call(Type<PlainParam<Half>>{});
    case DType::f64:
      return;
  }
}

// The same for parameters that are written. Only these are rounded.
template <class Args, class Call>
void with_written_params(const Args& a, Call&& call) {
  if (a.param == ParamCodec::rounded) return call(Type<RoundedParam>{});
  with_params(a, call);
}

// Steps the blocks [begin, end), counted over all tensors.
template <class Rule>
void step(const Step<Rule>& a, int64_t begin, int64_t end) {
  with_written_params(a, [&](auto param) {
    with_moments(a, [&](auto moment) {
      step_blocks<typename decltype(param)::type, typename decltype(moment)::type>(a, begin, end);
    });
  });
}
// Measures the step of these blocks without taking it.
template <class Rule>
void measure(const Step<Rule>& a, int64_t begin, int64_t end) {
  with_params(a, [&](auto param) {
    with_moments(a, [&](auto moment) {
      measure_blocks<typename decltype(param)::type, typename decltype(moment)::type>(a, begin,
                                                                                      end);
    });
  });
}

TW_NAMESPACE_END
