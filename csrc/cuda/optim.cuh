// Shared by all optimizers in CUDA: tensors passed by value with a launch, stochastic rounding, and
// float64 sums. rule.cuh argues for the design.
#pragma once

#include "cuda/lane.cuh"

TW_NAMESPACE_BEGIN

// --- A launch and its tensors -------------------------------------------------------------------

// The number of blocks that a warp processes in one turn.
template <class Tensor>
TW_HD uint32_t blocks_of_turn(const StepTensor& t) {
  return kIsSplit<Tensor> ? 1 : rows_of_warp(t.width);
}
// The number of pieces, of `piece` turns each.
template <class Tensor>
int64_t pieces_of(const StepTensor& t, int64_t blocks, int piece) {
  const int64_t of_piece = (int64_t)piece * blocks_of_turn<Tensor>(t);
  return (blocks + of_piece - 1) / of_piece;
}

// The tensors of a launch, by value: nothing is copied to the device, and a CUDA graph captures
// them. Each thread block has a piece of `piece` turns within one tensor.
template <class Tensor>
constexpr int kBatchTensors = kIsSplit<Tensor> ? 208 : 304;
template <class Tensor>
struct StepBatch {
  Tensor tensor[kBatchTensors<Tensor>];
  uint32_t blocks[kBatchTensors<Tensor>];
  uint32_t first_piece[kBatchTensors<Tensor> + 1];
  uint32_t aligned[(kBatchTensors<Tensor> + 31) / 32];  // a bit for each tensor
  int count, piece;

  // The tensor that a piece lies in. Tensors without elements have no pieces.
  TW_HD int tensor_of(uint32_t at) const {
    return last_begun(count, [&](int i) { return first_piece[i] <= at; });
  }
  // Whether groups of four elements can be accessed in one instruction.
  TW_HD bool is_aligned(int tensor) const { return aligned[tensor / 32] >> tensor % 32 & 1; }
};

// call(batch, its first tensor, its first piece, number of pieces) for each batch of tensors.
// is_aligned(tensor) says whether all its rows can be accessed in groups of four.
template <class Tensor, class IsAligned, class Call>
cudaError_t for_batches(const StepTensor* tensors, const SplitRows* splits, int64_t count,
                        int piece, IsAligned&& is_aligned, Call&& call) {
  constexpr int kMost = kBatchTensors<Tensor>;
  int64_t first_piece = 0;
  for (int64_t first = 0; first < count; first += kMost) {
    StepBatch<Tensor> batch = {};
    batch.count = (int)(count - first < kMost ? count - first : kMost);
    batch.piece = piece;
    int64_t pieces = 0;
    for (int i = 0; i < batch.count; ++i) {
      const StepTensor& t = tensors[first + i];
      const int64_t blocks = tensors[first + i + 1].first_block - t.first_block;
      if (blocks > INT32_MAX) return cudaErrorInvalidValue;
      (StepTensor&)batch.tensor[i] = t;
      if constexpr (kIsSplit<Tensor>) batch.tensor[i].rows = splits[first + i];
      batch.blocks[i] = (uint32_t)blocks;
      batch.aligned[i / 32] |= (uint32_t)is_aligned(t) << i % 32;
      pieces += pieces_of<Tensor>(t, blocks, piece);
      if (pieces > INT32_MAX) return cudaErrorInvalidValue;
      batch.first_piece[i + 1] = (uint32_t)pieces;
    }
    const cudaError_t error = call(batch, first, first_piece, (unsigned)pieces);
    if (error != cudaSuccess) return error;
    first_piece += pieces;
  }
  return cudaSuccess;
}

// A warp's turns in this thread block's piece.
template <class Tensor>
class Turns {
 public:
  __device__ __forceinline__ Turns(const StepBatch<Tensor>& batch, int at)
      : at_once_(blocks_of_turn<Tensor>(batch.tensor[at])), now_(threadIdx.x / kWarp * at_once_) {
    const uint32_t piece = (uint32_t)batch.piece * at_once_;
    first_ = (blockIdx.x - batch.first_piece[at]) * piece;
    const uint32_t left = batch.blocks[at] - first_;
    count_ = left < piece ? left : piece;
  }
  __device__ __forceinline__ bool has_turn() const { return now_ < count_; }
  __device__ __forceinline__ Turn turn() const {
    return {first_ + now_, count_ - now_ < at_once_ ? count_ - now_ : at_once_};
  }
  __device__ __forceinline__ void advance() { now_ += kStepWarps * at_once_; }

 private:
  uint32_t at_once_, first_, count_, now_;  // in blocks
};

// body(tensor, turn) in each warp, for the turns of this thread block's piece.
template <class Tensor, class Body>
__device__ __forceinline__ void for_turns_of_piece(const StepBatch<Tensor>& batch, int at,
                                                   Body&& body) {
#pragma unroll 1
  for (Turns<Tensor> turns(batch, at); turns.has_turn(); turns.advance()) {
    body(batch.tensor[at], turns.turn());
  }
}

// --- Stochastic rounding ------------------------------------------------------------------------

// The Roundings of a step's tensors. The kernel adds the step numbers and writes them to the
// tensors' masters.
constexpr int kRoundingsAtOnce = 192;
struct MakeRoundings {
  Rounding roundings[kRoundingsAtOnce];
  Rounding* room[kRoundingsAtOnce];
  Number steps[kRoundingsAtOnce];
  int count;
};
static __global__ void __launch_bounds__(kRoundingsAtOnce)
    make_roundings(const MakeRoundings __grid_constant__ a) {
  const int i = (int)threadIdx.x;
  if (i >= a.count) return;
  Rounding rounding = a.roundings[i];
  rounding.step = (uint32_t)(a.steps[i].read() + 1);
  *a.room[i] = rounding;
}

// Launch this before the steps are incremented.
template <class Tensor>
cudaError_t launch_roundings(const Rounding* roundings, const Tensor* tensors, const Number* steps,
                             int64_t count, cudaStream_t stream) {
  for (int64_t first = 0; first < count; first += kRoundingsAtOnce) {
    const int64_t left = count - first;
    MakeRoundings make{{}, {}, {}, (int)(left < kRoundingsAtOnce ? left : kRoundingsAtOnce)};
    for (int i = 0; i < make.count; ++i) {
      make.roundings[i] = roundings[first + i];
      make.room[i] = (Rounding*)tensors[first + i].master;
      make.steps[i] = steps[first + i];
    }
    static_assert(sizeof make <= kLaunchBytes);
    const cudaError_t error =
        launch(make_roundings, {dim3(1), dim3(kRoundingsAtOnce)}, stream, make);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// --- Sums ---------------------------------------------------------------------------------------

// The sum over the warp's lanes, returned to all lanes.
__device__ __forceinline__ double sum_over_warp(double value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

// The sum over the block's threads, returned to thread 0.
__device__ __forceinline__ double sum_over_block(double value) {
  __shared__ double of_warp[kStepWarps];
  value = sum_over_warp(value);
  __syncthreads();  // the previous call's sums have been read
  if (lane() == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  double sum = 0;
  for (int warp = 0; warp < kStepWarps; ++warp) sum += of_warp[warp];
  return sum;
}

// Block i sums each of `Numbers` numbers over the pieces [first[i], first[i + 1]).
constexpr int kRangesAtOnce = 1024;
struct Ranges {
  const double* pieces;
  double* sums;
  int64_t first[kRangesAtOnce + 1];
};
static_assert(sizeof(Ranges) <= kLaunchBytes);
template <int Numbers>
__global__ void __launch_bounds__(kStepThreads) sum_ranges(const Ranges __grid_constant__ a) {
#pragma unroll
  for (int n = 0; n < Numbers; ++n) {
    double sum = 0;
    for (int64_t at = a.first[blockIdx.x] + threadIdx.x; at < a.first[blockIdx.x + 1];
         at += kStepThreads) {
      sum += a.pieces[at * Numbers + n];
    }
    sum = sum_over_block(sum);
    if (threadIdx.x == 0) a.sums[blockIdx.x * Numbers + n] = sum;
  }
}

// Sums `Numbers` numbers over the pieces of each of `count` ranges. Range i begins at first(i).
template <int Numbers, class First>
cudaError_t sum(const double* pieces, double* sums, int64_t count, First&& first,
                cudaStream_t stream) {
  for (int64_t begin = 0; begin < count; begin += kRangesAtOnce) {
    const int64_t now = count - begin < kRangesAtOnce ? count - begin : kRangesAtOnce;
    Ranges ranges{pieces, sums + begin * Numbers, {}};
    for (int64_t i = 0; i <= now; ++i) ranges.first[i] = first(begin + i);
    const cudaError_t error =
        launch(sum_ranges<Numbers>, {dim3((unsigned)now), dim3(kStepThreads)}, stream, ranges);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

TW_NAMESPACE_END
