// The sum of the squares of gradients in CUDA. It reads each gradient once.
//
// Consumer GPUs run float64 at 1/64 of the float32 rate. So each lane sums a run of eight squares
// in float32, accumulates the rounding errors of the run, and adds both to its float64 sum. That is
// half a float64 addition per element in place of a conversion, a product and an addition.
//
// With u = 2^-24, the errors are at most 4 u of the run: one from the squares, which are exact for
// 16-bit floats, and one from each of three levels of sums. Adding up the errors rounds by at most
// 5 u of them. So a run's relative error is at most 20 u^2 = 7e-14.
#include "cuda/optim.cuh"

namespace {

using namespace torchweld;

// A gradient without its parameter, and a rule for it.
struct NoRule {
  static constexpr int kMoments = 0;
  static constexpr bool kSigned[] = {true};
};
template <class T>
struct NoParam {
  using Storage = T;
  template <class Access>
  __device__ __forceinline__ void read(const StepTensor&, int64_t, const Access&) {}
  __device__ __forceinline__ float operator[](int) const { return 0; }
};

// A sum of floats and its rounding error. Together they are exact.
struct ExactSum {
  float sum, error;
  __device__ __forceinline__ ExactSum(float a, float b) : sum(a + b) {
    const float from_b = sum - a;
    error = (a - (sum - from_b)) + (b - from_b);
  }
};

// The sum of the squares of a run. Squares of float32 are rounded, those of 16-bit floats are
// exact.
constexpr int kRun = 4 * kGroups;
template <bool Rounded>
__device__ __forceinline__ double sum_of_run(const float (&run)[kRun]) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < kRun; ++i) largest = fmaxf(largest, fabsf(run[i]));
  // Larger squares overflow, and the errors of smaller ones underflow.
  if (largest != 0 && !(largest >= 0x1p-40f && largest <= 0x1p60f)) {
    double sum = 0;
#pragma unroll  // unrolled, since a variable index would put the run in local memory
    for (int i = 0; i < kRun; ++i) sum += (double)run[i] * run[i];
    return sum;
  }
  float sums[kRun], errors[kRun];
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    sums[i] = run[i] * run[i];
    errors[i] = Rounded ? fmaf(run[i], run[i], -sums[i]) : 0;
  }
#pragma unroll
  for (int count = kRun / 2; count > 0; count /= 2) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const ExactSum both(sums[i], sums[i + count]);
      sums[i] = both.sum;
      errors[i] += errors[i + count] + both.error;
    }
  }
  return (double)sums[0] + errors[0];
}

struct GradLaunch {
  StepBatch<StepTensor> batch;
  double* sums;  // one per piece
};
template <class T>
__global__ void __launch_bounds__(kStepThreads) grad_pieces(const GradLaunch __grid_constant__ a) {
  using Lane = LaneOfBlock<NoParam<T>, float, NoRule>;
  const int at = a.batch.tensor_of(blockIdx.x);
  const bool is_aligned = a.batch.is_aligned(at);
  double sum = 0;
  for_turns_of_piece(a.batch, at, [&](const StepTensor& t, Turn turn) {
    Lane lane(t, turn, is_aligned);
    float run[kRun];
    int at_element = 0;
    lane.for_elements({}, [&](float&, float g, float*, bool) { run[at_element++] = g; });
    sum += sum_of_run<std::is_same<T, float>::value>(run);
  });
  sum = sum_over_block(sum);
  if (threadIdx.x == 0) a.sums[blockIdx.x] = sum;
}

}  // namespace

TW_EXPORT cudaError_t grad_squares(const GradSquares& a, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;  // for types without a kernel
  int64_t pieces = 0;
  dispatch(a.dtype, a.dtype, [&](auto t, auto) {
    using T = typename decltype(t)::type;
    error = for_batches<StepTensor>(
        a.tensors, nullptr, a.count, kSquarePiece,
        [](const StepTensor& t) { return holds_groups<T>(t.grad); },
        [&](const StepBatch<StepTensor>& batch, int64_t, int64_t first_piece, unsigned now) {
          pieces += now;
          if (now == 0) return cudaSuccess;
          return launch(grad_pieces<T>, {dim3(now), dim3(kStepThreads)}, stream,
                        GradLaunch{batch, a.sums + first_piece});
        });
  });
  if (error != cudaSuccess) return error;
  return sum<1>(a.sums, a.total, 1, [&](int64_t i) { return i * pieces; }, stream);
}
