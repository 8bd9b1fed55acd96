// cuBLASLt on the CPU. It computes directly from the descriptors that csrc/cuda passes, and rejects
// what cuBLASLt's documentation rejects.
#include "cuda/cublaslt.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// How many products each algorithm has computed.
extern "C" {
__attribute__((visibility("default"))) int emulator_products[8] = {};
}

namespace torchweld {
namespace lt {

struct Handle {};
struct Desc {
  Compute compute;
  DataType scale;
  Transpose transpose_a = Transpose::no;
  uint32_t epilogue = 1;
  void* bias = nullptr;
  void* aux = nullptr;
  int64_t aux_ld = 0;
};
// A matrix layout. Columns are `ld` elements apart.
struct Layout {
  DataType type;
  uint64_t rows, columns;
  int64_t ld;
};
struct Preference {
  uint64_t workspace_bytes = 0;
  uint32_t reductions = 7;
  uint32_t alignments[4] = {256, 256, 256, 256};
};

namespace {

// Inner sizes with which this cuBLASLt fails: without an algorithm (the real one has undocumented
// gaps), and, from these sizes on in steps of 8, with the status of that number: the heuristic at
// its first call, and the product always.
constexpr uint64_t kNoAlgorithm = 104, kFailsAtFirst = 4104, kFails = 5128;
constexpr uint64_t kStatuses = 32;
constexpr size_t kWorkspaceBytes = 4096;
// The number of products in a partial sum. The scheme below rounds partial sums to the result's
// dtype.
constexpr int64_t kPart = 8;
constexpr uint64_t kReduceInResultsType = 4;
constexpr uint64_t kMark = 0x616c676f, kMostAlignment = 256;
// The algorithms of every problem: the heuristic prefers the first, the second one is the fastest,
// and the last cannot run.
constexpr int kAlgorithms = 5;
constexpr double kMilliseconds[kAlgorithms] = {3, 1, 2, 4, 0.5};
constexpr Status kStates[kAlgorithms] = {Status::success, Status::success, Status::success,
                                         Status::success, Status::not_supported};

// The caller treats every status except success as "not supported", so a status would hide its
// mistakes.
[[noreturn]] void misused() {
  throw std::logic_error("the emulated cuBLASLt got inconsistent arguments");
}

// The status that is planted for this inner size from `from` on.
Status planted(uint64_t inner, uint64_t from) {
  const uint64_t steps = (inner - from) / 8;
  return inner >= from && steps < kStatuses ? (Status)steps : Status::success;
}

template <class T>
Status assign(T& member, const void* value, size_t size) {
  if (!value || size != sizeof member) return Status::invalid_value;
  std::memcpy(&member, value, size);
  return Status::success;
}

template <class T>
Status make(T** made, const T& value) {
  *made = new T(value);
  return Status::success;
}

template <class T>
Status destroy(T* made) {
  delete made;
  return Status::success;
}

Status Create(Handle** handle) { return make(handle, {}); }

Status MatmulDescCreate(Desc** desc, Compute compute, DataType scale) {
  return make(desc, {compute, scale});
}

Status MatmulDescSetAttribute(Desc* desc, DescAttribute at, const void* value, size_t size) {
  switch (at) {
    case DescAttribute::transpose_a:
      return assign(desc->transpose_a, value, size);
    case DescAttribute::epilogue:
      return assign(desc->epilogue, value, size);
    case DescAttribute::bias:
      return assign(desc->bias, value, size);
    case DescAttribute::aux:
      return assign(desc->aux, value, size);
    case DescAttribute::aux_ld:
      return assign(desc->aux_ld, value, size);
  }
  return Status::invalid_value;
}

Status MatrixLayoutCreate(Layout** made, DataType type, uint64_t rows, uint64_t columns,
                          int64_t ld) {
  return make(made, {type, rows, columns, ld});
}

Status MatmulPreferenceCreate(Preference** preference) { return make(preference, {}); }

Status MatmulPreferenceSetAttribute(Preference* preference, Choice choice, const void* value,
                                    size_t size) {
  switch (choice) {
    case Choice::workspace_bytes:
      return assign(preference->workspace_bytes, value, size);
    case Choice::reductions:
      return assign(preference->reductions, value, size);
    default:
      return assign(preference->alignments[(int)choice - (int)Choice::alignment_a], value, size);
  }
}

bool is_aligned(const void* p, uint64_t bytes) { return (uintptr_t)p % bytes == 0; }

// Whether cuBLASLt has this combination of epilogues. relu is left out, since nothing uses it.
bool has_epilogue(uint32_t epilogue) {
  for (const uint32_t there : {(uint32_t)kGelu, kGelu | kBias, kGelu | kAux, kGelu | kAux | kBias,
                               kGeluGradient | kAux, kGeluGradient | kAux | kBiasGradient}) {
    if (epilogue == there) return true;
  }
  return false;
}

// Whether the descriptors fit together.
Status check(const Desc& desc, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
  const bool turned = desc.transpose_a == Transpose::yes;
  const uint64_t rows = turned ? a.columns : a.rows, inner = turned ? a.rows : a.columns;
  bool fits = rows == d.rows && inner == b.rows && b.columns == d.columns && c.rows == d.rows &&
              c.columns == d.columns && desc.scale == DataType::f32;
  for (const Layout* each : {&a, &b, &c, &d}) {
    fits &= each->type == d.type && each->rows > 0 && each->columns > 0 &&
            each->ld >= (int64_t)each->rows;
  }
  fits &= desc.compute == Compute::f32 || d.type == DataType::f32;
  if (desc.epilogue & (kBias | kBiasGradient)) fits &= desc.bias != nullptr;
  if (desc.epilogue & kAux) {
    fits &= desc.aux && desc.aux_ld >= (int64_t)d.rows && desc.aux_ld % 8 == 0;
  }
  if (!fits || !has_epilogue(desc.epilogue)) misused();
  return inner == kNoAlgorithm ? Status::not_supported : Status::success;
}

// The common alignment of the epilogue's addresses, which an algorithm may rely on.
uint64_t alignment_of(const Desc& desc) {
  uintptr_t bits = kMostAlignment;
  if (desc.epilogue & (kBias | kBiasGradient)) bits |= (uintptr_t)desc.bias;
  if (desc.epilogue & kAux) bits |= (uintptr_t)desc.aux;
  return bits & (~bits + 1);
}

// Identifies the problem that an algorithm is valid for. `found_with` is the heuristic's other
// input.
Algorithm algorithm_for(const Desc& desc, uint64_t found_with, const Layout& a, const Layout& d) {
  return {{kMark | found_with << 32, desc.epilogue, (uint64_t)desc.compute, (uint64_t)d.type,
           a.rows, a.columns, d.rows, d.columns}};
}

Status MatmulAlgoGetHeuristic(Handle* handle, Desc* desc, Layout* a, Layout* b, Layout* c,
                              Layout* d, Preference* preference, int wanted, Heuristic* found,
                              int* count) {
  *count = 0;
  if (!handle || wanted < 1) return Status::invalid_value;
  const Status status = check(*desc, *a, *b, *c, *d);
  if (status != Status::success) return status;
  // The kernels load 16 bytes at a time and keep partial sums.
  for (const uint32_t alignment : preference->alignments) {
    if (alignment < 16) return Status::not_supported;
    if (alignment > 16) misused();  // more than tensors guarantee
  }
  if (preference->workspace_bytes < kWorkspaceBytes) return Status::not_supported;
  static bool asked[kStatuses] = {};
  const Status at_first = planted(b->rows, kFailsAtFirst);
  if (!std::exchange(asked[(int)at_first], true) && at_first != Status::success) return at_first;
  const uint64_t found_with = alignment_of(*desc) | (uint64_t)preference->reductions << 16;
  for (uint64_t i = 0; i < kAlgorithms && (int)i < wanted; ++i) {
    const Algorithm algorithm = algorithm_for(*desc, found_with | i << 24, *a, *d);
    found[i] = {algorithm, kWorkspaceBytes * (1 + i % 2), kStates[i], 1, {}};
    *count = (int)i + 1;
  }
  return Status::success;
}

float load(const void* p, DataType type, int64_t at) {
  if (type == DataType::f32) return ((const float*)p)[at];
  if (type == DataType::bf16) return __bfloat162float(((const __nv_bfloat16*)p)[at]);
  return __half2float(((const __half*)p)[at]);
}

void store(void* p, DataType type, int64_t at, float value) {
  if (type == DataType::f32) {
    ((float*)p)[at] = value;
  } else if (type == DataType::bf16) {
    ((__nv_bfloat16*)p)[at] = __float2bfloat16_rn(value);
  } else {
    ((__half*)p)[at] = __float2half_rn(value);
  }
}

float rounded(float value, DataType type) {
  float bits = 0;
  store(&bits, type, 0, value);
  return load(&bits, type, 0);
}

// Truncates a float32 to the first 10 bits of its fraction.
float as_tf32(float value) { return __uint_as_float(__float_as_uint(value) & 0xffffe000u); }

float gelu(float z) {
  return 0.5f * z * (1 + std::tanh(0.7978845608f * (z + 0.044715f * z * z * z)));
}

float gelu_gradient(float z) {
  const float t = std::tanh(0.7978845608f * (z + 0.044715f * z * z * z));
  return 0.5f * (1 + t) + 0.5f * z * (1 - t * t) * 0.7978845608f * (1 + 3 * 0.044715f * z * z);
}

Status Matmul(Handle* handle, Desc* desc, const void* alpha, const void* a, Layout* a_layout,
              const void* b, Layout* b_layout, const void* beta, const void* c, Layout* c_layout,
              void* d, Layout* d_layout, const Algorithm* algorithm, void* workspace,
              size_t workspace_bytes, cudaStream_t) {
  const Status status = check(*desc, *a_layout, *b_layout, *c_layout, *d_layout);
  if (status != Status::success) return status;
  const uint64_t found_with = algorithm->data[0] >> 32;
  const uint64_t alignment = found_with & 0xffff, reductions = found_with >> 16 & 0xff;
  const uint64_t which = found_with >> 24;
  const size_t needed = kWorkspaceBytes * (1 + which % 2);
  const Algorithm right = algorithm_for(*desc, found_with, *a_layout, *d_layout);
  bool fits = handle && std::memcmp(algorithm, &right, sizeof right) == 0;
  fits &= alignment_of(*desc) >= alignment && workspace && workspace_bytes >= needed && c == d;
  for (const void* p : {a, b, c, (const void*)d, (const void*)desc->bias, (const void*)desc->aux}) {
    fits &= is_aligned(p, 16);
  }
  fits &=
      *(const float*)alpha == 1 && *(const float*)beta == 0 && kStates[which] == Status::success;
  if (!fits) misused();
  if (const Status fails = planted(b_layout->rows, kFails); fails != Status::success) return fails;
  std::memset(workspace, 0xff, needed);
  emulator::clock_ms += kMilliseconds[which];
  ++emulator_products[which];
  const bool turned = desc->transpose_a == Transpose::yes;
  const int64_t inner = (int64_t)b_layout->rows;
  const DataType type = d_layout->type;
  const auto factors = [&](const void* p, const Layout& l) {
    std::vector<float> loaded(l.rows * l.columns);
    for (uint64_t column = 0; column < l.columns; ++column) {
      for (uint64_t row = 0; row < l.rows; ++row) {
        const float value = load(p, l.type, (int64_t)(column * l.ld + row));
        loaded[column * l.rows + row] = desc->compute == Compute::tf32 ? as_tf32(value) : value;
      }
    }
    return loaded;
  };
  const std::vector<float> left = factors(a, *a_layout), right_factor = factors(b, *b_layout);
  const int64_t step = turned ? 1 : (int64_t)a_layout->rows;
  const auto product = [&](int64_t row, int64_t column) {
    const float* from = &left[turned ? row * (int64_t)a_layout->rows : row];
    float sum = 0;
    for (int64_t k = 0; k < inner; ++k) {
      sum += from[k * step] * right_factor[column * inner + k];
      if (k % kPart == kPart - 1 && (reductions & kReduceInResultsType)) sum = rounded(sum, type);
    }
    return sum;
  };
  for (int64_t row = 0; row < (int64_t)d_layout->rows; ++row) {
    double total = 0;
    for (int64_t column = 0; column < (int64_t)d_layout->columns; ++column) {
      const int64_t aux = column * desc->aux_ld + row;
      float value = product(row, column);
      if (desc->epilogue & kGelu) {
        if (desc->epilogue & kBias) value += load(desc->bias, type, row);
        if (desc->epilogue & kAux) store(desc->aux, type, aux, value);
        value = gelu(value);
      } else {
        value *= gelu_gradient(load(desc->aux, type, aux));
        total += value;
      }
      store(d, type, column * d_layout->ld + row, value);
    }
    if (desc->epilogue & kBiasGradient) store(desc->bias, type, row, (float)total);
  }
  return Status::success;
}

constexpr auto MatmulDescDestroy = destroy<Desc>;
constexpr auto MatrixLayoutDestroy = destroy<Layout>;
constexpr auto MatmulPreferenceDestroy = destroy<Preference>;

}  // namespace

static std::map<std::string, void*> by_name() {
#define TW_NAMED(name, ...) {"cublasLt" #name, (void*)(Status (*)(__VA_ARGS__))name},
  return {TW_CUBLASLT(TW_NAMED)};
#undef TW_NAMED
}

}  // namespace lt
}  // namespace torchweld

namespace emulator {

void* cublaslt(const char* name) {
  static const std::map<std::string, void*> functions = torchweld::lt::by_name();
  return functions.at(name);
}

}  // namespace emulator
