// The loop of every optimizer in CUDA, over lanes (lane.cuh); optim.cu has the argument.
#pragma once

#include "cuda/lane.cuh"

TW_NAMESPACE_BEGIN

// --- A launch and its tensors -------------------------------------------------------------------

// Blocks that a warp has at a time.
template <class Tensor>
TW_HD uint32_t blocks_of_turn(const StepTensor& t) {
  return kIsCut<Tensor> ? 1 : rows_of_warp(t.width);
}
// Pieces of so many turns.
template <class Tensor>
int64_t pieces_of(const StepTensor& t, int64_t blocks, int piece) {
  const int64_t of_piece = (int64_t)piece * blocks_of_turn<Tensor>(t);
  return (blocks + of_piece - 1) / of_piece;
}

// Tensors of a launch, by value: nothing has to be copied to the device, and a graph has them. Each
// block of threads has a piece of `piece` turns, which lie in one tensor.
template <class Tensor>
constexpr int kBatchTensors = kIsCut<Tensor> ? 256 : 320;
template <class Tensor>
struct StepBatch {
  Tensor tensor[kBatchTensors<Tensor>];
  uint32_t blocks[kBatchTensors<Tensor>];
  uint32_t first_piece[kBatchTensors<Tensor> + 1];
  uint32_t aligned[kBatchTensors<Tensor> / 32];  // a bit for each tensor
  int count, piece;

  // The tensor that a piece lies in; those without elements have none.
  TW_HD int tensor_of(uint32_t at) const {
    return last_begun(count, [&](int i) { return first_piece[i] <= at; });
  }
  // Whether groups of four elements can be accessed as one.
  TW_HD bool is_aligned(int tensor) const { return aligned[tensor / 32] >> tensor % 32 & 1; }
};

// call(batch, number of its first tensor, of its first piece, pieces) for all tensors;
// is_aligned(tensor) says whether each of its rows can be accessed in groups of four.
template <class Tensor, class IsAligned, class Call>
cudaError_t for_batches(const StepTensor* tensors, const CutRows* cuts, int64_t count, int piece,
                        IsAligned&& is_aligned, Call&& call) {
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
      if constexpr (kIsCut<Tensor>) batch.tensor[i].rows = cuts[first + i];
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

// The turns of the piece that this block of threads has: body(tensor, turn) in each warp.
template <class Tensor, class Body>
__device__ __forceinline__ void for_turns_of_piece(const StepBatch<Tensor>& batch, int at,
                                                   Body&& body) {
  const Tensor& t = batch.tensor[at];
  const uint32_t at_once = blocks_of_turn<Tensor>(t), piece = (uint32_t)batch.piece * at_once;
  const uint32_t first = (blockIdx.x - batch.first_piece[at]) * piece;
  const uint32_t left = batch.blocks[at] - first;
  const uint32_t count = left < piece ? left : piece;
#pragma unroll 1
  for (uint32_t i = threadIdx.x / kWarp * at_once; i < count; i += kStepWarps * at_once) {
    body(t, Turn{first + i, count - i < at_once ? count - i : at_once});
  }
}

// --- Rules --------------------------------------------------------------------------------------

// The rules of a step, each made by one thread, since it takes powers in float64.
constexpr int kRulesAtOnce = 960, kRulesThreads = 128;
template <class Rule>
struct MakeRules {
  typename Rule::Settings settings;
  Number lr, found_inf;
  const double* ratios;
  Rule* rules;
  Number steps[kRulesAtOnce];
  double lrs[kRulesAtOnce];
  int count;
  bool has_lrs;  // each its own
  bool is_step;  // which is counted
};
template <class Rule>
__global__ void __launch_bounds__(kRulesThreads)
    make_rules(const MakeRules<Rule> __grid_constant__ a) {
  const int i = (int)(blockIdx.x * kRulesThreads + threadIdx.x);
  if (i >= a.count) return;
  const double number = a.steps[i].read() + 1;
  const StepScalars now{a.has_lrs ? a.lrs[i] : a.lr.read(), number, a.ratios ? a.ratios[i] : 1};
  a.rules[i] = Rule(a.settings, now);
  if (a.is_step && a.found_inf.read() == 0) a.steps[i].write(number);
}

template <class Rule>
cudaError_t launch_rules(const Step<Rule>& a, cudaStream_t stream) {
  for (int64_t first = 0; first < a.count; first += kRulesAtOnce) {
    const int64_t left = a.count - first;
    MakeRules<Rule> make{a.settings,
                         a.lr,
                         a.found_inf,
                         a.ratios ? a.ratios + first : nullptr,
                         a.rules + first,
                         {},
                         {},
                         (int)(left < kRulesAtOnce ? left : kRulesAtOnce),
                         a.lrs != nullptr,
                         !a.sums && !a.only_absmaxes};
    for (int i = 0; i < make.count; ++i) {
      make.steps[i] = a.steps[first + i];
      if (a.lrs) make.lrs[i] = a.lrs[first + i];
    }
    static_assert(sizeof make <= kLaunchBytes);
    const auto blocks = (unsigned)((make.count + kRulesThreads - 1) / kRulesThreads);
    const cudaError_t error =
        launch(make_rules<Rule>, {dim3(blocks), dim3(kRulesThreads)}, stream, make);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// How the tensors of a step are rounded, and by which step: to where their completions are.
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

// Before the steps are counted up.
template <class Tensor>
cudaError_t launch_roundings(const Rounding* roundings, const Tensor* tensors, const Number* steps,
                             int64_t count, cudaStream_t stream) {
  for (int64_t first = 0; first < count; first += kRoundingsAtOnce) {
    const int64_t left = count - first;
    MakeRoundings make{{}, {}, {}, (int)(left < kRoundingsAtOnce ? left : kRoundingsAtOnce)};
    for (int i = 0; i < make.count; ++i) {
      make.roundings[i] = roundings[first + i];
      make.room[i] = (Rounding*)tensors[first + i].completion;
      make.steps[i] = steps[first + i];
    }
    static_assert(sizeof make <= kLaunchBytes);
    const cudaError_t error =
        launch(make_roundings, {dim3(1), dim3(kRoundingsAtOnce)}, stream, make);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// --- Steps --------------------------------------------------------------------------------------

template <class Tensor, class Rule>
struct StepLaunch {
  StepBatch<Tensor> batch;
  const Rule* rules;
  Number grad_factor, found_inf;
  double (*squares)[2];  // each piece's
};
static_assert(sizeof(StepLaunch<StepTensor, int>) <= kLaunchBytes);
static_assert(sizeof(StepLaunch<CutTensor, int>) + sizeof(bool) <= kLaunchBytes);

// call(Type<Lane>{}) with the lanes that the tensor's turns take.
template <class Param, class State, class Tensor, class Rule, class Call>
__device__ __forceinline__ void with_lanes(const Tensor& t, Call&& call) {
  using Wide = LaneOfBlock<Param, State, Rule, Tensor>;
  if constexpr (Wide::kInBlocks && !kIsCut<Tensor>) {
    if (blocks_of_turn<Tensor>(t) > 1) {
      return call(Type<LaneOfBlock<Param, State, Rule, Tensor, true>>{});
    }
  }
  call(Type<Wide>{});
}

// save(lane, maps) at each turn, when its lanes have made their step.
template <class Param, class State, class Tensor, class Rule, class Save>
__device__ __forceinline__ void step_each(const StepLaunch<Tensor, Rule>& a, Save&& save) {
  __shared__ typename LaneOfBlock<Param, State, Rule, Tensor>::Maps maps;
  if (a.found_inf.read() != 0) return;
  const int at = a.batch.tensor_of(blockIdx.x);
  const Rule rule = a.rules[at];
  const float grad_factor = (float)a.grad_factor.read();
  const bool is_aligned = a.batch.is_aligned(at);
  maps.fill();
  with_lanes<Param, State, Tensor, Rule>(a.batch.tensor[at], [&](auto type) {
    using Lane = typename decltype(type)::type;
    for_turns_of_piece(a.batch, at, [&](const Tensor& t, Turn turn) {
      Lane lane(t, turn, is_aligned);
      lane.for_elements(maps, [&](float& p, float g, float* m, bool) {
        const float before = p;
        rule(p, g * grad_factor, m);
        if constexpr (Lane::kInBlocks) {
          skip_unless<Lane::N>(is_finite(m[Lane::N - 1]), p, before, m);
        }
      });
      save(lane, maps);
    });
  });
}

template <class Param, class State, class Rule>
__global__ void __launch_bounds__(kStepThreads, kStepCtas<Rule>)
    step_pieces(const StepLaunch<StepTensor, Rule> __grid_constant__ a) {
  step_each<Param, State>(a, [](auto& lane, const auto& maps) { lane.save(maps); });
}
template <class Param, class Rule>
__global__ void __launch_bounds__(kStepThreads, kStepCtas<Rule>)
    step_cut_pieces(const StepLaunch<CutTensor, Rule> __grid_constant__ a, bool only_absmaxes) {
  step_each<Param, uint8_t>(a, [=](auto& lane, const auto& maps) {
    only_absmaxes ? lane.save_absmaxes() : lane.save(maps);
  });
}

// --- Measures and sums --------------------------------------------------------------------------

// The sum over the warp's lanes, in all of them.
__device__ __forceinline__ double sum_over_warp(double value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

// The sum over the block's threads, in thread 0.
__device__ __forceinline__ double sum_over_block(double value) {
  __shared__ double of_warp[kStepWarps];
  value = sum_over_warp(value);
  __syncthreads();  // those of the previous call have been read
  if (lane() == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  double sum = 0;
  for (int warp = 0; warp < kStepWarps; ++warp) sum += of_warp[warp];
  return sum;
}

// What a step would be: nothing is written but a piece's squares.
template <class Param, class State, class Tensor, class Rule>
__global__ void __launch_bounds__(kStepThreads, kStepCtas<Rule>)
    measure_pieces(const StepLaunch<Tensor, Rule> __grid_constant__ a) {
  __shared__ typename LaneOfBlock<Param, State, Rule, Tensor>::Maps maps;
  const int at = a.batch.tensor_of(blockIdx.x);
  const Rule rule = a.rules[at];
  const float grad_factor = (float)a.grad_factor.read();
  const bool is_aligned = a.batch.is_aligned(at);
  maps.fill();
  double of_param = 0, of_step = 0;
  with_lanes<Param, State, Tensor, Rule>(a.batch.tensor[at], [&](auto type) {
    using Lane = typename decltype(type)::type;
    for_turns_of_piece(a.batch, at, [&](const Tensor& t, Turn turn) {
      Lane lane(t, turn, is_aligned);
      lane.for_elements(maps, [&](float& p, float g, float* m, bool is_there) {
        double step = rule.direction(p, g * grad_factor, m);
        if constexpr (Lane::kInBlocks) is_there &= is_finite(m[Lane::N - 1]);
        if (!is_there) step = 0;
        of_param += (double)p * p;
        of_step += step * step;
      });
    });
  });
  of_param = sum_over_block(of_param);
  of_step = sum_over_block(of_step);
  if (threadIdx.x == 0) {
    a.squares[blockIdx.x][0] = of_param;
    a.squares[blockIdx.x][1] = of_step;
  }
}

// The sums of `Numbers` numbers over pieces [first[i], first[i + 1]), by block i.
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
  double* sums;  // each piece's
};
template <class T>
__global__ void __launch_bounds__(kStepThreads) grad_pieces(const GradLaunch __grid_constant__ a) {
  using Lane = LaneOfBlock<NoParam<T>, float, NoRule>;
  const int at = a.batch.tensor_of(blockIdx.x);
  const bool is_aligned = a.batch.is_aligned(at);
  double sum = 0;
  for_turns_of_piece(a.batch, at, [&](const StepTensor& t, Turn turn) {
    Lane lane(t, turn, is_aligned);
    lane.for_elements({}, [&](float&, float g, float*, bool) { sum += (double)g * g; });
  });
  sum = sum_over_block(sum);
  if (threadIdx.x == 0) a.sums[blockIdx.x] = sum;
}

TW_NAMESPACE_END
