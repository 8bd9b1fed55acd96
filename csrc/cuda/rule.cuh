// The loop of the rules in CUDA, over lanes (lane.cuh). Nothing here has been measured yet. This
// header argues for the design, and bench/evidence will hold the figures.
//
// 1. The floor. A step reads a parameter, its gradient and its moments, and writes all but the
//    gradient. For AdamW with float32 parameters that is 28 bytes with float32 moments, 20 with
//    bfloat16 moments, 16 and 1/16 with 8-bit moments. At the 4.3 TB/s that a copy reaches on an
//    H200, 10^9 parameters take 6.5, 4.7 and 3.7 ms. A measure reads as much as its step; a norm
//    reads only gradients.
//
// 2. One launch for 304 tensors: a step of 600 takes three, with the one that makes the rules.
//    Addresses are passed by value, within the 32 KB of a launch's arguments: nothing is copied to
//    the device, and a CUDA graph captures them. A thread block has 16 blocks of 256 elements of
//    one tensor, which it finds by bisection in nine reads of constant memory. Learning rate, step
//    numbers, ratios, scale and a GradScaler's found_inf are read on the device, so that the host
//    need not wait. A kernel of one thread per tensor, 960 tensors a launch, makes the rules from
//    them and increments the steps. It takes powers in float64, which would take longer than
//    everything else if each thread block did so. If shards split blocks, a launch has 208 tensors
//    and a kernel of its own, since it also describes their pieces.
//
// 3. A warp has a block at a time. A lane has eight of its elements, in two groups of four: the
//    accesses of a warp are contiguous, 16 bytes a lane in float32, 8 in 16 bits, 4 of codes. All
//    loads precede all arithmetic. With at most 80 registers, 768 threads fit and have 98 KB in
//    flight with float32 moments, 61 KB with 8-bit moments; 1 us at the copy bandwidth needs 33 KB.
//    Blocks that are unaligned or not whole go element by element through the same code. Rows of 4
//    to 128 elements are 8-bit blocks of their own, as in LoRA. If the width is a power of two, a
//    warp takes as many rows as make up 256 elements and finds each row's absmax by exchanges among
//    its lanes. One at a time, rows of 8 would leave 30 of 32 lanes idle.
//    With 8-bit moments a warp loads its next block before it writes and encodes this one, 40% of
//    its instructions. What it has in flight meanwhile was nothing and is 2.6 KB in float32, 61 KB a
//    multiprocessor. Parameters are written before moments are encoded, so that their registers are
//    free: with two moments a thread still has 80, and nothing spills. With stochastic rounding 96
//    bytes would, and 12 with parameters in two parts on sm_100: those cases load as before.
//
// 4. Instructions. 132 multiprocessors start 29.6e12 thread instructions in a second. At the copy
//    bandwidth that is 193 an element with float32 moments, 110 with 8-bit moments. Counted in the
//    code of AdamW for sm_90:
//      - float32 moments: 42. Limited by memory;
//      - 8-bit moments: 102, of which 39 are the rule with its root and its division, 10 decoding,
//        37 encoding. That takes as long as the memory traffic: 80% of the copy bandwidth is the
//        target. With bfloat16 parameters, 10 bytes, instructions limit: two thirds at most. Loading
//        ahead adds less than one: the shortest way through the loop, with averages, was 914 for a
//        lane's eight elements and is 919;
//      - stochastic rounding: 26 more, 16 of them in Philox, one call of which serves four
//        elements. With float32 moments, 22 bytes, memory still limits: 68 of 152. With 8-bit
//        moments half of the copy bandwidth is left.
//    Encoding looks up tables of 7 and 13 KB, which a thread block fills from L2. With tables a
//    thread block therefore has 64 blocks of 256 elements, 256 KB of traffic. A look-up of 32 lanes
//    in 32 banks takes about 3.5 turns: 110 cycles for a block whose bytes take 220.
//
// 5. The reference's bits. Products are not fused with sums unless a function says so (the flags
//    are in flags.py), and roots and divisions are correctly rounded. Sums of squares are float64,
//    by lane, thread block and tensor, in an order that depends only on sizes.
#pragma once

#include "cuda/optim.cuh"

TW_NAMESPACE_BEGIN

// --- Rules --------------------------------------------------------------------------------------

// Makes the rules of a step, one thread each, since a rule takes powers in float64.
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
  bool has_lrs;  // learning rates differ
  bool is_step;  // increment the steps
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
    MakeRules<Rule> make = {};
    make.settings = a.settings;
    make.lr = a.lr;
    make.found_inf = a.found_inf;
    make.ratios = a.ratios ? a.ratios + first : nullptr;
    make.rules = a.rules + first;
    make.count = (int)(left < kRulesAtOnce ? left : kRulesAtOnce);
    make.has_lrs = a.lrs != nullptr;
    make.is_step = !a.sums && !a.only_absmaxes;
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
  Number grad_factor, found_inf, average_rate;
  double (*squares)[2];  // one per piece
};
static_assert(sizeof(StepLaunch<StepTensor, int>) <= kLaunchBytes);
static_assert(sizeof(StepLaunch<SplitTensor, int>) + sizeof(bool) <= kLaunchBytes);

// call(Type<Lane>{}) with the type of lanes for this tensor.
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

// save(lane, maps) for each turn, after the step.
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
    const auto step = [&](Lane& lane) {
      lane.for_elements(maps, [&](float& p, float g, float* m, bool, auto&... z) {
        const float before[] = {p, z...};
        rule(p, g * grad_factor, m, z...);
        if constexpr (Lane::kInBlocks) {
          const bool is_sound = is_finite(m[Lane::N - 1]);
          ((z = is_sound ? z : before[1]), ...);
          skip_unless<Lane::N>(is_sound, p, before[0], m);
        }
      });
    };
    if constexpr (!Lane::kLoadsAhead) {
      for_turns_of_piece(a.batch, at, [&](const Tensor& t, Turn turn) {
        Lane lane(t, turn, is_aligned);
        step(lane);
        save(lane, maps);
      });
    } else {
      Turns<Tensor> turns(a.batch, at);
      if (!turns.has_turn()) return;
      Lane lane(a.batch.tensor[at], turns.turn(), is_aligned);
#pragma unroll 1
      for (bool goes_on = true; goes_on;) {
        step(lane);
        turns.advance();
        goes_on = turns.has_turn();
        if (goes_on) lane.load(turns.turn());
        save(lane, maps);
      }
    }
  });
}

template <class Param, class State, class Rule>
__global__ void __launch_bounds__(kStepThreads, kStepCtas<Rule>)
    step_pieces(const StepLaunch<StepTensor, Rule> __grid_constant__ a) {
  const float rate = (float)a.average_rate.read();
  step_each<Param, State>(a, [=](auto& lane, const auto& maps) { lane.save(maps, rate); });
}
template <class Param, class Rule>
__global__ void __launch_bounds__(kStepThreads, kStepCtas<Rule>)
    step_split_pieces(const StepLaunch<SplitTensor, Rule> __grid_constant__ a, bool only_absmaxes) {
  const float rate = (float)a.average_rate.read();
  step_each<Param, uint8_t>(a, [=](auto& lane, const auto& maps) {
    only_absmaxes ? lane.save_absmaxes() : lane.save(maps, rate);
  });
}

// --- Measures -----------------------------------------------------------------------------------

// Compute the step, but write only the piece's sums of squares.
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

// call(Type<Param>{}, Type<State>{}, Type<Tensor>{}). Float32 parameters are their own masters.
// Only bfloat16 parameters have remainders, and only written ones are rounded.
template <bool Writes, class Rule, class Call>
cudaError_t with_codecs(const Step<Rule>& a, Call&& call) {
  if constexpr (Writes) {
    if (a.param == ParamCodec::rounded) return with_states<RoundedParam>(a, call);
  }
  if (a.param == ParamCodec::remainder) return with_states<RemainderParam>(a, call);
  if (a.param == ParamCodec::short_remainder) return with_states<ShortRemainderParam>(a, call);
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
  aligned &= param == ParamCodec::master            ? holds_groups<float>(t.master)
             : param == ParamCodec::short_remainder ? holds_groups<uint8_t>(t.master)
                                                    : holds_groups<uint16_t>(t.master);
  aligned &= holds_groups<float>(t.companion);
  for (const void* moment : t.moment) aligned &= holds_groups<State>(moment);
  return aligned && (sizeof(State) > 1 || t.width % 4 == 0);
}

// --- Launches -----------------------------------------------------------------------------------

// Blocks of 256 elements per thread block: more if it first fills tables.
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
          const StepLaunch<Tensor, Rule> args{batch,          a.rules + first,
                                              a.grad_factor,  a.found_inf,
                                              a.average_rate, a.squares + first_piece};
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
  int64_t tensor = 0, piece = 0;  // `sum` asks for ascending i
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
