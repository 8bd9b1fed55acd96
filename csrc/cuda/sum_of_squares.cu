// The sum of the squares of gradients in CUDA. It reads each gradient once.
//
// A lane's run (runs.cuh) is its eight elements of a turn.
#include "cuda/optim.cuh"
#include "cuda/runs.cuh"

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
