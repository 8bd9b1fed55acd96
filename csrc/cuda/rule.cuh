// The loop of the rules in CUDA, over lanes (lane.cuh). Nothing here has been measured yet: what
// follows is the argument for the design, and bench/evidence is where figures will be.
//
// 1. The floor. A step reads a parameter, its gradient and its moments, and writes all but the
//    gradient. For AdamW with float32 parameters that is 28 bytes with float32 moments, 20 with
//    bfloat16 ones, 16 and 1/16 with 8-bit ones. At the 4.3 TB/s that a copy reaches on an H200, 10^9
//    parameters take 6.5, 4.7 and 3.7 ms. A measure reads as its step does, a norm only gradients.
//
// 2. One launch for 320 tensors: a step of 600 is three. Addresses come by value with the launch,
//    within the 32 KB that it may have: nothing is copied to the device, and a graph has them. A block
//    of threads has 16 blocks of 256 elements of one tensor, which it finds by bisection, nine looks
//    into constant memory. Learning rate, numbers of steps, ratios, scale and what a GradScaler found
//    are read on the device, so that the host waits for nothing: a kernel of one thread a tensor, for
//    960 of them, makes the rules of them, powers in float64 included, which would take longer than
//    all else in each block of threads, and counts the steps up. Where shards cut blocks a launch has
//    224 tensors, of kernels of their own: it also says where their pieces are.
//
// 3. A warp has a block at a time, a lane eight of its elements as two groups of four: what a warp
//    reads lies side by side, 16 bytes a lane of float32, 8 of 16 bits, 4 of codes. All of it is asked
//    for before anything is computed: at 80 registers or less 768 threads are there and have 98 KB in
//    flight with float32 moments, 61 KB with 8-bit ones; 1 us at the copy bandwidth asks for 33 KB.
//    Blocks that are not whole or not aligned go element by element through the same code. Rows of 4
//    to 128 elements that are 8-bit blocks of their own, as LoRA has them, are a warp's by as many as
//    256 elements have, where their number is a power of two: a row's absmax is found by exchanging
//    among its lanes. One at a time, rows of 8 would leave 30 lanes of 32 idle.
//
// 4. Instructions. 132 multiprocessors start 29.6e12 of a thread's in a second: at the copy bandwidth
//    193 an element with float32 moments, 110 with 8-bit ones. Counted in the code of AdamW for sm_90:
//      - float32 moments: 42. Memory decides;
//      - 8-bit moments: 102, of which the rule with its root and its division are 39, decoding 10,
//        encoding 37. As much time as the memory takes: 80% of the copy bandwidth is to be hoped for.
//        With bfloat16 parameters, 10 bytes, it is instructions that decide: two thirds at most;
//      - stochastic rounding: 26 more, 16 of them Philox's, a call of which serves four elements. With
//        float32 moments, 22 bytes, memory decides as before: 68 of 152. With 8-bit ones half of the
//        copy bandwidth is left.
//    Encoding takes a look-up in tables of 7 and 13 KB, which a block of threads fills from L2: it has
//    64 blocks of 256 elements then, 256 KB of traffic. Look-ups of 32 lanes in 32 banks take some 3.5
//    turns, 110 cycles for a block whose bytes take 220.
//
// 5. The reference's bits: products are not fused with sums except where a function says so (the flags
//    are in flags.py), and roots and divisions are rounded right. Sums of squares are float64, by
//    lane, block of threads, tensor: in an order that only sizes decide.
#pragma once

#include "cuda/optim.cuh"

TW_NAMESPACE_BEGIN

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

// --- Steps --------------------------------------------------------------------------------------

template <class Tensor, class Rule>
struct StepLaunch {
  StepBatch<Tensor> batch;
  const Rule* rules;
  Number grad_factor, found_inf;
  double (*squares)[2];  // each piece's
};
static_assert(sizeof(StepLaunch<StepTensor, int>) <= kLaunchBytes);
static_assert(sizeof(StepLaunch<SplitTensor, int>) + sizeof(bool) <= kLaunchBytes);

// call(Type<Lane>{}) with the lanes that the tensor's turns take.
template <class Param, class State, class Tensor, class Rule, class Call>
__device__ __forceinline__ void with_lanes(const Tensor& t, Call&& call) {
  using Wide = LaneOfBlock<Param, State, Rule, Tensor>;
  if constexpr (Wide::kInBlocks && !kIsSplit<Tensor>) {
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
    step_split_pieces(const StepLaunch<SplitTensor, Rule> __grid_constant__ a, bool only_absmaxes) {
  step_each<Param, uint8_t>(a, [=](auto& lane, const auto& maps) {
    only_absmaxes ? lane.save_absmaxes() : lane.save(maps);
  });
}

// --- Measures -----------------------------------------------------------------------------------

// Compute the step, and write only the squares of the piece.
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

// --- Codecs -------------------------------------------------------------------------------------

template <class Param, class Rule, class Call>
cudaError_t with_states(const Step<Rule>& a, Call&& call) {
  if constexpr (Rule::kMoments > 0) {
    switch (a.state) {
      case StateCodec::f32:
        break;
      case StateCodec::bf16:
        return call(Type<Param>{}, Type<BFloat16>{}, Type<StepTensor>{});
      case StateCodec::blocks:
        return a.splits ? call(Type<Param>{}, Type<uint8_t>{}, Type<SplitTensor>{})
                        : call(Type<Param>{}, Type<uint8_t>{}, Type<StepTensor>{});
    }
  }
  return call(Type<Param>{}, Type<float>{}, Type<StepTensor>{});
}

// call(Type<Param>{}, Type<State>{}, Type<Tensor>{}). Float32 parameters are their own masters, and
// only bfloat16 ones have a remainder; values that are only read are not rounded.
template <bool Writes, class Rule, class Call>
cudaError_t with_codecs(const Step<Rule>& a, Call&& call) {
  if constexpr (Writes) {
    if (a.param == ParamCodec::rounded) return with_states<RoundedParam>(a, call);
  }
  if (a.param == ParamCodec::remainder) return with_states<RemainderParam>(a, call);
  const bool mastered = a.param == ParamCodec::master;
  switch (a.dtype) {
    case DType::f32:
      return with_states<PlainParam<float>>(a, call);
    case DType::bf16:
      return mastered ? with_states<MasteredParam<BFloat16>>(a, call)
                      : with_states<PlainParam<BFloat16>>(a, call);
    case DType::f16:
      return mastered ? with_states<MasteredParam<Half>>(a, call)
                      : with_states<PlainParam<Half>>(a, call);
    case DType::f64:
      break;
  }
  return cudaErrorInvalidValue;
}

// Whether each row of the tensor can be accessed in groups of four elements.
template <class T, class State>
bool is_aligned(const StepTensor& t, ParamCodec param) {
  bool aligned = holds_groups<T>(t.param) && holds_groups<T>(t.grad);
  aligned &= param == ParamCodec::master ? holds_groups<float>(t.master)
                                         : holds_groups<uint16_t>(t.master);
  for (const void* moment : t.moment) aligned &= holds_groups<State>(moment);
  return aligned && (sizeof(State) > 1 || t.width % 4 == 0);
}

// --- Launches -----------------------------------------------------------------------------------

// Blocks of 256 elements for a block of threads: more where tables have to be filled first.
constexpr int kPiece = 16, kTablesPiece = 64;

// launch_pieces(Type<Param>{}, Type<State>{}, Type<Tensor>{}, arguments, pieces) for each batch.
template <bool Writes, class Rule, class LaunchPieces>
cudaError_t launch_batches(const Step<Rule>& a, int piece, cudaStream_t stream,
                           LaunchPieces&& launch_pieces) {
  cudaError_t error = cudaSuccess;
  if (a.roundings) error = launch_roundings(a.roundings, a.tensors, a.steps, a.count, stream);
  if (error == cudaSuccess) error = launch_rules(a, stream);
  if (error != cudaSuccess) return error;
  return with_codecs<Writes>(a, [&](auto param, auto state, auto tensor) {
    using Param = typename decltype(param)::type;
    using State = typename decltype(state)::type;
    using Tensor = typename decltype(tensor)::type;
    return for_batches<Tensor>(
        a.tensors, a.splits, a.count, piece,
        [&](const StepTensor& t) { return is_aligned<typename Param::Storage, State>(t, a.param); },
        [&](const StepBatch<Tensor>& batch, int64_t first, int64_t first_piece, unsigned pieces) {
          if (pieces == 0) return cudaSuccess;
          const StepLaunch<Tensor, Rule> args{batch, a.rules + first, a.grad_factor, a.found_inf,
                                              a.squares + first_piece};
          return launch_pieces(param, state, tensor, args, pieces);
        });
  });
}

template <class Rule>
cudaError_t step(const Step<Rule>& a, cudaStream_t stream) {
  const int piece = a.state == StateCodec::blocks ? kTablesPiece : kPiece;
  return launch_batches<true>(
      a, piece, stream,
      [&](auto param, auto state, auto tensor, const auto& args, unsigned pieces) {
        using Param = typename decltype(param)::type;
        const Launch how{dim3(pieces), dim3(kStepThreads)};
        if constexpr (kIsSplit<typename decltype(tensor)::type>) {
          return launch(step_split_pieces<Param, Rule>, how, stream, args, a.only_absmaxes);
        } else {
          using State = typename decltype(state)::type;
          return launch(step_pieces<Param, State, Rule>, how, stream, args);
        }
      });
}

template <class Rule>
cudaError_t measure(const Step<Rule>& a, cudaStream_t stream) {
  const cudaError_t error = launch_batches<false>(
      a, kSquarePiece, stream,
      [&](auto param, auto state, auto tensor, const auto& args, unsigned pieces) {
        using Param = typename decltype(param)::type;
        using State = typename decltype(state)::type;
        using Tensor = typename decltype(tensor)::type;
        return launch(measure_pieces<Param, State, Tensor, Rule>,
                      {dim3(pieces), dim3(kStepThreads)}, stream, args);
      });
  if (error != cudaSuccess) return error;
  int64_t tensor = 0, piece = 0;  // each asked for in turn
  return sum<2>(
      &a.squares[0][0], &a.sums[0][0], a.count,
      [&](int64_t i) {
        for (; tensor < i; ++tensor) {
          const StepTensor& t = a.tensors[tensor];
          const int64_t blocks = a.tensors[tensor + 1].first_block - t.first_block;
          piece += a.splits ? pieces_of<SplitTensor>(t, blocks, kSquarePiece)
                            : pieces_of<StepTensor>(t, blocks, kSquarePiece);
        }
        return piece;
      },
      stream);
}

TW_NAMESPACE_END

// The launchers of a rule's kernels by these names.
#define TW_STEP(name, Rule)                                                                    \
  TW_EXPORT cudaError_t name(const torchweld::Step<torchweld::Rule>& a, cudaStream_t stream) { \
    return torchweld::step(a, stream);                                                         \
  }
#define TW_MEASURE(name, Rule)                                                                 \
  TW_EXPORT cudaError_t name(const torchweld::Step<torchweld::Rule>& a, cudaStream_t stream) { \
    return torchweld::measure(a, stream);                                                      \
  }
