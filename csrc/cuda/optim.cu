// Optimizers in CUDA. Nothing here has been measured yet: what follows is the argument for the design,
// and bench/evidence is where figures will be.
//
// 1. The floor. A step reads a parameter, its gradient and its moments, and writes all but the
//    gradient: of AdamW with float32 parameters 28 bytes with float32 moments, 20 with bfloat16 ones,
//    16 and 1/16 with 8-bit ones. At the 4.3 TB/s that a copy reaches on an H200, 10^9 parameters take
//    6.5, 4.7 and 3.7 ms. A measure reads what its step reads; the norm of gradients reads those.
//
// 2. One launch for 320 tensors: a step of 600 is three. Addresses come by value with the launch,
//    within the 32 KB that it may have: nothing is copied to the device, and a graph has them. A block
//    of threads has 16 blocks of 256 elements of one tensor, which it finds by bisection, nine looks
//    into constant memory. Learning rate, numbers of steps, ratios, scale and what a GradScaler found
//    are read on the device, so that the host waits for nothing: a kernel of one thread a tensor, for
//    960 of them, makes the rules of them, powers in float64 included, which would take longer than
//    all else in each block of threads, and counts the steps up. Where shards cut blocks a launch has
//    256 tensors, of kernels of their own: it also says where their pieces are.
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
// 5. The reference's bits: products are not fused with sums here, but where a function says so (the
//    flags are in build.py), roots and divisions are rounded right. Sums of squares are float64, by
//    lane, block of threads, tensor: in an order that sizes alone decide.
#include "cuda/optim.cuh"

#include "core/adam.h"
#include "core/lamb.h"
#include "core/lion.h"
#include "core/sgd.h"

namespace {

using namespace torchweld;

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
        return a.cuts ? call(Type<Param>{}, Type<uint8_t>{}, Type<CutTensor>{})
                      : call(Type<Param>{}, Type<uint8_t>{}, Type<StepTensor>{});
    }
  }
  return call(Type<Param>{}, Type<float>{}, Type<StepTensor>{});
}

// call(Type<Param>{}, Type<State>{}, Type<Tensor>{}). Float32 parameters are their own masters, and
// only bfloat16 ones have a remainder; what is only read is not rounded.
template <bool Writes, class Rule, class Call>
cudaError_t with_codecs(const Step<Rule>& a, Call&& call) {
  if constexpr (Writes) {
    if (a.param == ParamCodec::rounded) return with_states<RoundedParam>(a, call);
  }
  if (a.param == ParamCodec::remainder) return with_states<CompletedParam>(a, call);
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
  aligned &= param == ParamCodec::master ? holds_groups<float>(t.completion)
                                         : holds_groups<uint16_t>(t.completion);
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
        a.tensors, a.cuts, a.count, piece,
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
        if constexpr (kIsCut<typename decltype(tensor)::type>) {
          return launch(step_cut_pieces<Param, Rule>, how, stream, args, a.only_absmaxes);
        } else {
          using State = typename decltype(state)::type;
          return launch(step_pieces<Param, State, Rule>, how, stream, args);
        }
      });
}

// Sums of `Numbers` numbers over the pieces of each of `count` ranges; first(i) begins one.
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
          piece += a.cuts ? pieces_of<CutTensor>(t, blocks, kSquarePiece)
                          : pieces_of<StepTensor>(t, blocks, kSquarePiece);
        }
        return piece;
      },
      stream);
}

}  // namespace

TW_EXPORT cudaError_t adam_step(const Step<Adam<false>>& a, cudaStream_t stream) {
  return step(a, stream);
}
TW_EXPORT cudaError_t amsgrad_step(const Step<Adam<true>>& a, cudaStream_t stream) {
  return step(a, stream);
}
TW_EXPORT cudaError_t sgd_step(const Step<Sgd<false>>& a, cudaStream_t stream) {
  return step(a, stream);
}
TW_EXPORT cudaError_t momentum_step(const Step<Sgd<true>>& a, cudaStream_t stream) {
  return step(a, stream);
}
TW_EXPORT cudaError_t lion_step(const Step<Lion>& a, cudaStream_t stream) {
  return step(a, stream);
}
TW_EXPORT cudaError_t lamb_step(const Step<Lamb>& a, cudaStream_t stream) {
  return step(a, stream);
}
TW_EXPORT cudaError_t lamb_measure(const Step<Lamb>& a, cudaStream_t stream) {
  return measure(a, stream);
}
TW_EXPORT cudaError_t gradient_measure(const Step<Gradient>& a, cudaStream_t stream) {
  return measure(a, stream);
}

TW_EXPORT cudaError_t grad_squares(const GradSquares& a, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;  // of a type that has no kernel
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
