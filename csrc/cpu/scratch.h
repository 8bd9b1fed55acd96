// A buffer for one row of intermediate results.
#pragma once

#include <new>

#include "cpu/vec.h"

TW_NAMESPACE_BEGIN

// A row of accumulators with room for one more vector at its end.
template <class A>
class Scratch {
 public:
  explicit Scratch(int64_t width)
      : data_((A*)::operator new((width + kLanes<A>)*sizeof(A), kAlignment)) {}
  ~Scratch() { ::operator delete(data_, kAlignment); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  operator A*() { return data_; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  A* data_;
};

TW_NAMESPACE_END
