// The bits of core/rounding.h, a vector of Philox counters at a time.
#pragma once

#include <cstring>

#include "core/rounding.h"
#include "cpu/philox.h"

TW_NAMESPACE_BEGIN

// The random bits of `count` local elements from `first` on. They must be requested in ascending
// order.
class RoundingBits {
 public:
  RoundingBits(const Rounding& rounding, int64_t first, int64_t count)
      : rounding_(rounding), first_(first), count_(count) {}

  // 16 bits per lane, from element i on; arbitrary bits past the last element.
  detail::U32 operator()(int64_t i) {
    if (i >= end_) fill(i);
    return detail::widen(bits_ + (i - begin_));
  }

 private:
  static constexpr int64_t kAtOnce = kRoundedAtOnce * detail::kWide;
  static constexpr int64_t kFilled = 256;

  __attribute__((noinline)) void fill(int64_t i) {
    const int64_t left = count_ - i, count = left < kFilled ? left : kFilled;
    begin_ = i;
    end_ = i + count;
    const int64_t run = rounding_.run;
    for (int64_t done = 0; done < count;) {
      const int64_t at = first_ + i + done, to_end = run - at % run;
      const int64_t together = to_end < count - done ? to_end : count - done;
      fill_run(bits_ + done, rounding_.elements(at), together);
      done += together;
    }
  }

  // Fills in the bits of `count` contiguous elements of the whole tensor.
  void fill_run(uint16_t* to, int64_t element, int64_t count) {
    const detail::U64 step = detail::U64{} + rounding_.step;
    const detail::U64 parameter = detail::U64{} + rounding_.parameter;
    const int64_t skew = element % kRoundedAtOnce;
    uint16_t bits[kFilled + 2 * kAtOnce];
    for (int64_t done = 0; done < skew + count; done += kAtOnce) {
      const auto group = detail::count_from((uint64_t)(element + done) / kRoundedAtOnce);
      const auto words = detail::philox_in_order(group, group >> 32, step, parameter, 0);
      std::memcpy(bits + done, &words, sizeof words);
    }
    std::memcpy(to, bits + skew, count * sizeof *to);
  }

  const Rounding& rounding_;
  const int64_t first_, count_;
  int64_t begin_ = 0, end_ = 0;
  uint16_t bits_[kFilled + kLanes<float>];
};

TW_NAMESPACE_END
