// Makes the layouts of a parameter and its state equal, since a step walks through their storage
// together.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

#include "bind/tensor.h"

namespace torchweld {

using Tensors = std::vector<Tensor>;

// Whether the elements fill their storage without gaps, in any order of the dimensions.
inline bool is_dense(Sizes sizes, Sizes strides) {
  std::vector<std::pair<int64_t, int64_t>> steps;  // (stride, size)
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1) steps.push_back({strides[d], sizes[d]});
  }
  std::sort(steps.begin(), steps.end());
  int64_t filled = 1;
  for (const auto& [stride, size] : steps) {
    if (stride != filled) return false;
    filled *= size;
  }
  return true;
}

// Replaces tensors by contiguous copies if a parameter and its state differ in layout.
class Packing {
 public:
  // Packs parameter i and its state. With `in_any_order` any dense layout is accepted if all
  // tensors share it.
  void pack(Tensors& params, Tensors& grads, Tensors& masters, Tensors& moments,
            Tensors& companions, size_t i, bool in_any_order) {
    const auto with_each = [&](auto&& act) {
      act(params[i]);
      act(grads[i]);
      if (!masters.empty()) act(masters[i]);
      if (!companions.empty()) act(companions[i]);
      for (size_t at = i; at < moments.size(); at += params.size()) act(moments[at]);
    };
    bool contiguous = true;
    with_each([&](const Tensor& t) { contiguous &= t.is_contiguous(); });
    if (contiguous) return;
    if (in_any_order && is_dense(params[i].sizes(), params[i].strides())) {
      bool alike = true;
      with_each([&](const Tensor& t) { alike &= same_sizes(t.strides(), params[i].strides()); });
      if (alike) return;
    }
    with_each([&](Tensor& t) {
      if (t.is_contiguous()) return;
      const Tensor copy = copy_contiguous(t);
      if (&t != &grads[i]) copies_.push_back({t, copy});
      t = copy;
    });
  }
  // Copies the step's results back.
  void write_back() {
    for (auto& [original, copy] : copies_) torch::stable::copy_(original, copy);
  }

 private:
  std::vector<std::pair<Tensor, Tensor>> copies_;
};

}  // namespace torchweld
