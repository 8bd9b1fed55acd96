// Shared by the bindings of ops with an activation.
#pragma once

#include "core/act.h"

#include <string>

#include "bind/launch.h"

namespace torchweld {

inline Activation activation_of(const std::string& activation, const std::string& approximate) {
#define TW_NAMED(Act, name, form) \
  if (activation == name && approximate == form) return Activation::Act;
  TW_ACTIVATIONS(TW_NAMED)
#undef TW_NAMED
  STD_TORCH_CHECK(false, "activation is unknown, or does not have this approximate");
}

// The last size is the width; the others form the rows.
struct Matrix {
  int64_t rows = 1, width;

  explicit Matrix(const Tensor& x) {
    STD_TORCH_CHECK(x.dim() > 0, "a tensor has no dimensions");
    width = x.sizes()[x.dim() - 1];
    for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.sizes()[i];
  }
  // Zero if the rows are empty, so that no kernel is launched.
  int64_t items(int64_t n) const { return width == 0 ? 0 : n; }
};

inline void check_like(const Tensor& t, const Tensor& x, const char* message) {
  STD_TORCH_CHECK(
      same_device(t, x) && t.scalar_type() == x.scalar_type() && same_sizes(t.sizes(), x.sizes()),
      message);
}

}  // namespace torchweld
