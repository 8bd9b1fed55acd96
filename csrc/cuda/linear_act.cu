// linear_act as one cuBLASLt GEMM. Its epilogue adds the bias, applies the activation and, if there
// is a gradient, stores the sum before the activation. A second GEMM serves the backward pass of the
// next layer. Its epilogue multiplies by the activation's derivative and adds up the bias's
// gradient. Both use the tanh form of gelu. cuBLASLt has neither gelu with erf nor silu, and
// its relu turns NaN into 0.
//
// With M rows, K inputs and N outputs linear_act does 2 M N K operations. At 16 bits it reads 2 (M
// K + N K) bytes and writes 2 M N of y and, with a gradient, as many of z. torch's GEMM followed by
// bias_act moves 2 M N more, or 4 M N more. The floor is the bare GEMM plus one more tensor to
// write. triton_kernels/linear_act.py has the times on an H200: at (8192, 4096) x 16384 the unfused
// form takes 1.08x the GEMM. This kernel should stay below 1.06x, with the library's own main loop
// and an epilogue that overlaps it.
//
// linear_act's backward is torch's two GEMMs and bias_act's pass, which computes both gradients of
// the sum. In an mlp that pass reads what grad_y @ w2 has just written. DGELU_BGRAD reads z there
// and writes grad_z at once: 4 M N bytes less. On an H200 at bf16, K outputs of the mlp, in
// milliseconds:
//
//     (M, K) x N            bare GEMM    pass of 3 trips   unfused         z read   fused, at best
//     (8192, 4096) x 16384     1.53          0.19          1.12x the GEMM   0.06    1.04x
//     (8192, 1024) x 4096      0.095         0.047         1.49x            0.016   1.16x
//
// At the first shape that saves 0.12 ms of the 6.3 ms of the backward pass's four GEMMs and the
// pass (2%), and at the second 0.03 ms of 0.43 ms (7%). The automatic choice requires a lead of 2%.
// For that the fused GEMM has to reach 94% of the rate of torch's GEMM at the first shape and 77% at
// the second.
//
// The heuristic's first algorithm is a guess. For sizes that come a second time, the best kRaced of
// its kAsked algorithms are timed once on the call's own tensors: each runs 1 + kTurns times, 16
// products for the whole life of the process. A size that comes only once costs nothing. The bits of
// a result may therefore differ between the first call of a size and later ones.
//
// Not built: BGRADB, which adds up the second bias's gradient in the GEMM of the second weight's
// gradient. It saves one read of grad_y, 2 M K bytes: 0.016 ms and 0.004 ms, 0.3% and 1% of the
// backward pass, and less at the second shape, where grad_y fits L2. A GEMM's time varies by as much
// from run to run, and fewer kernels have that epilogue than torch's GEMM can choose from.
#include "cuda/linear_act.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>

#include "core/dispatch.h"
#include "cuda/cublaslt.h"

namespace torchweld {
namespace {

// cuBLASLt requires the row length of z to be a multiple of this. Its fast kernels need the same
// for x and weight.
constexpr int64_t kMultiple = 8;
// The alignment of addresses that cuBLASLt requires, in bytes.
constexpr uint32_t kAlignment = 16;
constexpr int64_t kMostRows = (int64_t{1} << 31) - 1;
// The same limit as torch's on Hopper.
constexpr uint64_t kMostWorkspaceBytes = 32 << 20;

bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % kAlignment == 0; }

// result = epilogue(left @ right), or of left @ right^T.
struct Product {
  const void* left;   // [rows, inner]
  const void* right;  // [inner, columns], or [columns, inner] if transposed
  void* result;       // [rows, columns]
  const void* bias;   // [columns]: the bias, or its gradient; or null
  const void* sum;    // [rows, columns]: before the activation; or null
  uint32_t epilogue;
  lt::Transpose right_transposed;
  int64_t rows, columns, inner;
  DType dtype;
  bool tf32;
};

Product product_of(const LinearAct& a) {
  const uint32_t epilogue = lt::kGelu | (a.bias ? lt::kBias : 0u) | (a.z ? lt::kAux : 0u);
  return {a.x,    a.weight,  a.y,     a.bias,  a.z,   epilogue, lt::Transpose::yes,
          a.rows, a.columns, a.inner, a.dtype, a.tf32};
}

Product product_of(const ActLinearBackward& a) {
  const uint32_t epilogue = lt::kGeluGradient | lt::kAux | (a.grad_bias ? lt::kBiasGradient : 0u);
  return {a.grad_y,          a.weight, a.grad_z,  a.grad_bias, a.z,     epilogue,
          lt::Transpose::no, a.rows,   a.columns, a.inner,     a.dtype, a.tf32};
}

bool is_served(const Product& p) {
  return p.rows > 0 && p.rows <= kMostRows && p.columns > 0 && p.columns % kMultiple == 0 &&
         p.inner > 0 && p.inner % kMultiple == 0 && is_aligned(p.left) && is_aligned(p.right) &&
         is_aligned(p.bias) && is_aligned(p.sum) && p.dtype != DType::f64 && lt::functions().all();
}

// cuBLASLt's matrices are column-major. It therefore sees the result as right, transposed, times
// left.
class Gemm {
 public:
  lt::Desc* desc = nullptr;
  lt::Layout *right = nullptr, *left = nullptr, *result = nullptr;
  lt::Status status = lt::Status::success;

  explicit Gemm(const Product& p) {
    const lt::DataType type = p.dtype == DType::f32    ? lt::DataType::f32
                              : p.dtype == DType::bf16 ? lt::DataType::bf16
                                                       : lt::DataType::f16;
    then([&] {
      return lt_.MatmulDescCreate(&desc, p.tf32 ? lt::Compute::tf32 : lt::Compute::f32,
                                  lt::DataType::f32);
    });
    set(lt::DescAttribute::transpose_a, p.right_transposed);
    set(lt::DescAttribute::epilogue, p.epilogue);
    if (p.bias) set(lt::DescAttribute::bias, p.bias);
    if (p.sum) {
      set(lt::DescAttribute::aux, p.sum);
      set(lt::DescAttribute::aux_ld, p.columns);
    }
    const auto layout = [&](lt::Layout*& made, int64_t rows, int64_t columns) {
      then([&] { return lt_.MatrixLayoutCreate(&made, type, rows, columns, rows); });
    };
    if (p.right_transposed == lt::Transpose::yes) {
      layout(right, p.inner, p.columns);
    } else {
      layout(right, p.columns, p.inner);
    }
    layout(left, p.inner, p.rows);
    layout(result, p.columns, p.rows);
  }
  ~Gemm() {
    for (lt::Layout* made : {right, left, result}) {
      if (made) lt_.MatrixLayoutDestroy(made);
    }
    if (desc) lt_.MatmulDescDestroy(desc);
  }
  Gemm(const Gemm&) = delete;

  // Runs the step unless an earlier one failed. The first failure is kept.
  template <class Step>
  void then(const Step& step) {
    if (status == lt::Status::success) status = step();
  }

 private:
  template <class T>
  void set(lt::DescAttribute attribute, const T& value) {
    then([&] { return lt_.MatmulDescSetAttribute(desc, attribute, &value, sizeof value); });
  }

  const lt::Functions& lt_ = lt::functions();
};

constexpr int kAsked = 8, kRaced = 4, kTurns = 3;

// The algorithms for a problem of these sizes, whatever the addresses of its tensors.
struct Plan {
  lt::Handle* handle = nullptr;
  lt::Heuristic found[kAsked] = {};
  int count = 0;   // of those that can run
  int chosen = 0;  // the first by the heuristic, later the fastest
  bool has_run = false, was_raced = false;
  lt::Status status = lt::Status::success;

  // Enough for every algorithm that may still be chosen.
  size_t workspace_bytes() const {
    size_t most = 0;
    for (int i = 0; i < count; ++i) {
      if (found[i].workspace_bytes > most) most = found[i].workspace_bytes;
    }
    return most;
  }
};

Plan plan_from_heuristic(lt::Handle* handle, Product p) {
  // The heuristic looks only at these addresses' alignment, so the plan also fits other addresses.
  void* const somewhere = reinterpret_cast<void*>(uintptr_t{kAlignment});
  if (p.bias) p.bias = somewhere;
  if (p.sum) p.sum = somewhere;
  const lt::Functions& lt = lt::functions();
  Gemm gemm(p);
  lt::Preference* preference = nullptr;
  gemm.then([&] { return lt.MatmulPreferenceCreate(&preference); });
  const auto prefer = [&](lt::Choice choice, const auto& value) {
    gemm.then(
        [&] { return lt.MatmulPreferenceSetAttribute(preference, choice, &value, sizeof value); });
  };
  prefer(lt::Choice::workspace_bytes, kMostWorkspaceBytes);
  prefer(lt::Choice::reductions, lt::kReduceInFloat32);
  for (const lt::Choice of : {lt::Choice::alignment_a, lt::Choice::alignment_b,
                              lt::Choice::alignment_c, lt::Choice::alignment_d}) {
    prefer(of, kAlignment);
  }
  Plan plan;
  int count = 0;
  gemm.then([&] {
    return lt.MatmulAlgoGetHeuristic(handle, gemm.desc, gemm.right, gemm.left, gemm.result,
                                     gemm.result, preference, kAsked, plan.found, &count);
  });
  const lt::Status of_first = count == 0 ? lt::Status::not_supported : plan.found[0].state;
  gemm.then([&] { return of_first; });
  for (int i = 0; i < count && plan.count < kRaced; ++i) {
    if (plan.found[i].state == lt::Status::success) plan.found[plan.count++] = plan.found[i];
  }
  if (preference) lt.MatmulPreferenceDestroy(preference);
  plan.handle = handle;
  plan.status = gemm.status;
  return plan;
}

using Key = std::tuple<int, int64_t, int64_t, int64_t, DType, bool, uint32_t>;

struct Known {
  std::mutex mutex;
  std::map<int, lt::Handle*> handles;
  std::map<Key, Plan> plans;
};

Known& known() {
  // Never destroyed: CUDA may be gone before this at exit.
  static Known& instance = *new Known;
  return instance;
}

Key key_of(const Product& p) {
  int device = 0;
  cudaGetDevice(&device);
  return {device, p.rows, p.columns, p.inner, p.dtype, p.tf32, p.epilogue};
}

// The plan for these sizes on the current device, found once.
Plan plan_of(const Product& p) {
  constexpr size_t kMost = 4096;
  const Key key = key_of(p);
  const std::lock_guard<std::mutex> lock(known().mutex);
  auto& plans = known().plans;
  if (const auto at = plans.find(key); at != plans.end()) return at->second;
  lt::Handle*& handle = known().handles[std::get<0>(key)];
  if (!handle) {
    const lt::Status status = lt::functions().Create(&handle);
    if (status != lt::Status::success) {
      Plan none;
      none.status = status;
      return none;
    }
  }
  const Plan plan = plan_from_heuristic(handle, p);
  if (plan.status == lt::Status::alloc_failed) return plan;  // retry next time
  if (plans.size() == kMost) plans.clear();
  return plans[key] = plan;
}

// Two events around some work on a stream.
class Stopwatch {
 public:
  explicit Stopwatch(cudaStream_t stream) : stream_(stream) {
    is_sound_ = cudaEventCreate(&begin_) == cudaSuccess && cudaEventCreate(&end_) == cudaSuccess;
  }
  ~Stopwatch() {
    for (const cudaEvent_t event : {begin_, end_}) {
      if (event) cudaEventDestroy(event);
    }
  }
  Stopwatch(const Stopwatch&) = delete;

  // The milliseconds of some work; negative if it fails.
  template <class Work>
  float time(const Work& work) {
    float ms = -1;
    bool done = is_sound_ && cudaEventRecord(begin_, stream_) == cudaSuccess && work();
    done = done && cudaEventRecord(end_, stream_) == cudaSuccess &&
           cudaEventSynchronize(end_) == cudaSuccess;
    return done && cudaEventElapsedTime(&ms, begin_, end_) == cudaSuccess ? ms : -1;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  bool is_sound_ = false;
};

// The fastest algorithm of a plan, or the one so far if none can be timed. `run` runs one of them.
template <class Run>
int race(const Plan& plan, cudaStream_t stream, const Run& run) {
  // A graph that another thread captures must not fail because this thread waits.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  Stopwatch watch(stream);
  int fastest = plan.chosen;
  float least = -1;
  for (int i = 0; i < plan.count; ++i) {
    const float ms = !run(i) ? -1 : watch.time([&] {
      bool ran = true;
      for (int turn = 0; turn < kTurns; ++turn) ran = ran && run(i);
      return ran;
    });
    if (ms >= 0 && (least < 0 || ms < least)) least = ms, fastest = i;
  }
  cudaThreadExchangeStreamCaptureMode(&mode);
  return fastest;
}

// TORCHWELD_TUNE=kept forbids timing, here as for the choice of a backend.
bool may_time() {
  const char* tune = std::getenv("TORCHWELD_TUNE");
  return !tune || std::strcmp(tune, "kept") != 0;
}

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) != cudaSuccess ||
         status != cudaStreamCaptureStatusNone;
}

// Finds the workspace size of the product. Returns false if cuBLASLt does not support the product.
bool plan(const Product& p, int64_t* workspace_bytes) {
  if (!is_served(p)) return false;
  const Plan plan = plan_of(p);
  *workspace_bytes = static_cast<int64_t>(plan.workspace_bytes());
  return plan.status == lt::Status::success;
}

bool multiply(const Product& p, void* workspace, cudaStream_t stream) {
  Plan plan = plan_of(p);
  const float one = 1, zero = 0;
  Gemm gemm(p);
  const auto run = [&](int i) {
    const lt::Heuristic& how = plan.found[i];
    return lt::functions().Matmul(plan.handle, gemm.desc, &one, p.right, gemm.right, p.left,
                                  gemm.left, &zero, p.result, gemm.result, p.result, gemm.result,
                                  &how.algorithm, workspace, how.workspace_bytes, stream);
  };
  // A product that overwrites what it reads cannot run twice.
  const bool repeats = p.result != p.left && p.result != p.sum;
  if (gemm.status == lt::Status::success && plan.has_run && !plan.was_raced && repeats &&
      plan.count > 1 && may_time() && !is_captured(stream)) {
    plan.chosen = race(plan, stream, [&](int i) { return run(i) == lt::Status::success; });
    plan.was_raced = true;
  }
  gemm.then([&] { return run(plan.chosen); });
  if (gemm.status != lt::Status::success) return false;
  if (!plan.has_run || plan.was_raced) {
    plan.has_run = true;
    const std::lock_guard<std::mutex> lock(known().mutex);
    Plan& kept = known().plans[key_of(p)];
    if (!kept.was_raced) kept = plan;
  }
  return true;
}

}  // namespace

TW_EXPORT bool linear_act_plan(const LinearAct& a, int64_t* workspace_bytes) {
  return plan(product_of(a), workspace_bytes);
}
TW_EXPORT bool linear_act_forward(const LinearAct& a, void* workspace, cudaStream_t stream) {
  return multiply(product_of(a), workspace, stream);
}

TW_EXPORT bool act_linear_backward_plan(const ActLinearBackward& a, int64_t* workspace_bytes) {
  return plan(product_of(a), workspace_bytes);
}
TW_EXPORT bool act_linear_backward_launch(const ActLinearBackward& a, void* workspace,
                                          cudaStream_t stream) {
  return multiply(product_of(a), workspace, stream);
}

}  // namespace torchweld
