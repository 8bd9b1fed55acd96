// The part of cuBLASLt's interface that a GEMM with an epilogue needs, declared here: the library
// is the copy that torch has loaded, and its header may be missing at build time. If the header is
// present, static assertions compare these declarations with it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#if !defined(TW_EMULATED)
#include <dlfcn.h>
#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#define TW_CUBLASLT_HEADER
#endif
#endif

namespace torchweld {
namespace lt {

enum class Status : int { success = 0, alloc_failed = 3, invalid_value = 7, not_supported = 15 };
enum class DataType : int { f32 = 0, f16 = 2, bf16 = 14 };
enum class Compute : int { f32 = 68, tf32 = 77 };
enum class Transpose : int32_t { no = 0, yes = 1 };
enum class DescAttribute : int {
  transpose_a = 3,
  epilogue = 7,
  bias = 8,
  aux = 11,
  aux_ld = 12,
};
enum class Choice : int {
  workspace_bytes = 1,
  reductions = 3,
  alignment_a = 5,
  alignment_b = 6,
  alignment_c = 7,
  alignment_d = 8,
};
// An epilogue is a sum of these. gelu is the tanh form. A bias gradient is written to the bias's
// address. In both directions aux holds the sum before gelu.
enum Epilogue : uint32_t {
  kBias = 4,
  kBiasGradient = 16,
  kGelu = 32,
  kGeluGradient = 64,
  kAux = 128
};
// Partial sums are added in float32, not in the result's 16 bits.
constexpr uint32_t kReduceInFloat32 = 2;

struct Handle;
struct Desc;
struct Layout;
struct Preference;
struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};

// Every function in use: its name after "cublasLt", and its arguments.
#define TW_CUBLASLT(F)                                                                            \
  F(Create, Handle**)                                                                             \
  F(MatmulDescCreate, Desc**, Compute, DataType)                                                  \
  F(MatmulDescSetAttribute, Desc*, DescAttribute, const void*, size_t)                            \
  F(MatmulDescDestroy, Desc*)                                                                     \
  F(MatrixLayoutCreate, Layout**, DataType, uint64_t, uint64_t, int64_t)                          \
  F(MatrixLayoutDestroy, Layout*)                                                                 \
  F(MatmulPreferenceCreate, Preference**)                                                         \
  F(MatmulPreferenceSetAttribute, Preference*, Choice, const void*, size_t)                       \
  F(MatmulPreferenceDestroy, Preference*)                                                         \
  F(MatmulAlgoGetHeuristic, Handle*, Desc*, Layout*, Layout*, Layout*, Layout*, Preference*, int, \
    Heuristic*, int*)                                                                             \
  F(Matmul, Handle*, Desc*, const void*, const void*, Layout*, const void*, Layout*, const void*, \
    const void*, Layout*, void*, Layout*, const Algorithm*, void*, size_t, cudaStream_t)

inline void* symbol(const char* name) {
#if defined(TW_EMULATED)
  return emulator::cublaslt(name);
#else
  static void* const library = [] {
    void* cuda_13 = dlopen("libcublasLt.so.13", RTLD_LAZY | RTLD_NOLOAD);
    return cuda_13 ? cuda_13 : dlopen("libcublasLt.so.12", RTLD_LAZY | RTLD_NOLOAD);
  }();
  return library ? dlsym(library, name) : nullptr;
#endif
}

template <class Signature>
Signature* function(const char* name) {
  return reinterpret_cast<Signature*>(symbol(name));
}

struct Functions {
#define TW_MEMBER(name, ...) \
  Status (*name)(__VA_ARGS__) = function<Status(__VA_ARGS__)>("cublasLt" #name);
  TW_CUBLASLT(TW_MEMBER)
#undef TW_MEMBER

  bool all() const {
#define TW_FOUND(name, ...) &&name
    return true TW_CUBLASLT(TW_FOUND);
#undef TW_FOUND
  }
};

inline const Functions& functions() {
  static const Functions instance;
  return instance;
}

#if defined(TW_CUBLASLT_HEADER)
// Whether arguments for one function can be passed to the other.
template <class R, class... A, class S, class... B>
constexpr bool are_alike(R (*)(A...), S (*)(B...)) {
  if constexpr (sizeof...(A) != sizeof...(B)) {
    return false;
  } else {
    return ((sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>) && ...);
  }
}
#define TW_ALIKE(name, ...) \
  static_assert(are_alike((Status (*)(__VA_ARGS__)) nullptr, (decltype(&cublasLt##name))nullptr));
TW_CUBLASLT(TW_ALIKE)
#undef TW_ALIKE
static_assert(sizeof(Algorithm) == sizeof(cublasLtMatmulAlgo_t));
static_assert(sizeof(Heuristic) == sizeof(cublasLtMatmulHeuristicResult_t));
static_assert(offsetof(Heuristic, workspace_bytes) ==
              offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
static_assert(offsetof(Heuristic, state) == offsetof(cublasLtMatmulHeuristicResult_t, state));
#define TW_SAME(ours, theirs) static_assert((int)ours == (int)theirs);
TW_SAME(Status::success, CUBLAS_STATUS_SUCCESS)
TW_SAME(Status::invalid_value, CUBLAS_STATUS_INVALID_VALUE)
TW_SAME(Status::not_supported, CUBLAS_STATUS_NOT_SUPPORTED)
TW_SAME(DataType::f32, CUDA_R_32F)
TW_SAME(DataType::f16, CUDA_R_16F)
TW_SAME(DataType::bf16, CUDA_R_16BF)
TW_SAME(Compute::f32, CUBLAS_COMPUTE_32F)
TW_SAME(Compute::tf32, CUBLAS_COMPUTE_32F_FAST_TF32)
TW_SAME(Transpose::no, CUBLAS_OP_N)
TW_SAME(Transpose::yes, CUBLAS_OP_T)
TW_SAME(DescAttribute::transpose_a, CUBLASLT_MATMUL_DESC_TRANSA)
TW_SAME(DescAttribute::epilogue, CUBLASLT_MATMUL_DESC_EPILOGUE)
TW_SAME(DescAttribute::bias, CUBLASLT_MATMUL_DESC_BIAS_POINTER)
TW_SAME(DescAttribute::aux, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER)
TW_SAME(DescAttribute::aux_ld, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD)
TW_SAME(Choice::workspace_bytes, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)
TW_SAME(Choice::reductions, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK)
TW_SAME(Choice::alignment_a, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES)
TW_SAME(Choice::alignment_b, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES)
TW_SAME(Choice::alignment_c, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES)
TW_SAME(Choice::alignment_d, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES)
TW_SAME(kGelu, CUBLASLT_EPILOGUE_GELU)
TW_SAME((kGelu | kBias), CUBLASLT_EPILOGUE_GELU_BIAS)
TW_SAME((kGelu | kAux), CUBLASLT_EPILOGUE_GELU_AUX)
TW_SAME((kGelu | kAux | kBias), CUBLASLT_EPILOGUE_GELU_AUX_BIAS)
TW_SAME((kGeluGradient | kAux), CUBLASLT_EPILOGUE_DGELU)
TW_SAME((kGeluGradient | kAux | kBiasGradient), CUBLASLT_EPILOGUE_DGELU_BGRAD)
TW_SAME(kReduceInFloat32, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)
#undef TW_SAME
#endif

}  // namespace lt
}  // namespace torchweld
