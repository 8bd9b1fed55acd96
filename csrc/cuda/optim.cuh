// The loop of every optimizer in CUDA, and the codecs it is made for; optim.cu has the argument.
#pragma once

#include <type_traits>

#include "core/dispatch.h"
#include "core/optim.h"
#include "cuda/launch.cuh"
#include "cuda/quant8.cuh"
#include "cuda/rounding.cuh"
#include "cuda/vec.cuh"

TW_NAMESPACE_BEGIN

constexpr int kStepThreads = 256;
constexpr int kStepWarps = kStepThreads / kWarp;
// On a multiprocessor, at the registers that this leaves; with three moments 80 are too few.
template <class Rule>
constexpr int kStepCtas = Rule::kMoments < 3 ? 3 : 2;

// What rules in core/ take of a number.
TW_HD float square_root(float v) { return sqrtf(v); }

// --- Parameters ---------------------------------------------------------------------------------

// Four elements of a lane.
template <class T>
struct PlainParam {
  using Storage = T;
  Four<T> param;
  template <class Access>
  __device__ __forceinline__ void read(const StepTensor& t, int64_t at, const Access& access) {
    param = access.read((const T*)t.param + at);
  }
  __device__ __forceinline__ float operator[](int i) const { return param[i]; }
  template <class Access>
  static __device__ __forceinline__ void write(const StepTensor& t, int64_t at,
                                               const float (&values)[4], const Access& access) {
    access.write((T*)t.param + at, pack<T>(values));
  }
};

template <class T>
struct MasteredParam {
  using Storage = T;
  Four<float> master;
  template <class Access>
  __device__ __forceinline__ void read(const StepTensor& t, int64_t at, const Access& access) {
    master = access.read((const float*)t.completion + at);
  }
  __device__ __forceinline__ float operator[](int i) const { return master[i]; }
  template <class Access>
  static __device__ __forceinline__ void write(const StepTensor& t, int64_t at,
                                               const float (&values)[4], const Access& access) {
    access.write((float*)t.completion + at, pack<float>(values));
    access.write((T*)t.param + at, pack<T>(values));
  }
};

struct CompletedParam {
  using Storage = BFloat16;
  Four<uint16_t> half, remainder;
  template <class Access>
  __device__ __forceinline__ void read(const StepTensor& t, int64_t at, const Access& access) {
    half = access.read((const uint16_t*)t.param + at);
    remainder = access.read((const uint16_t*)t.completion + at);
  }
  __device__ __forceinline__ float operator[](int i) const {
    return __uint_as_float(completed(half.bits(i), remainder.bits(i) & 0xffffu));
  }
  template <class Access>
  static __device__ __forceinline__ void write(const StepTensor& t, int64_t at,
                                               const float (&values)[4], const Access& access) {
    unsigned halves[4], remainders[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float v = values[i];
      const unsigned bits = v != v ? 0x7fc00000u : __float_as_uint(v);
      halves[i] = nearest_half(bits), remainders[i] = bits & 0xffffu;
    }
    access.write((uint16_t*)t.param + at, pack_bits<uint16_t>(halves));
    access.write((uint16_t*)t.completion + at, pack_bits<uint16_t>(remainders));
  }
};

struct RoundedParam : PlainParam<BFloat16> {
  template <class Access>
  static __device__ __forceinline__ void write(const StepTensor& t, int64_t at,
                                               const float (&values)[4], const Access& access) {
    const uint64_t random = rounding_bits(*(const Rounding*)t.completion, at);
    unsigned halves[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned bits = __float_as_uint(values[i]);
      halves[i] = rounded_half(bits, (unsigned)(random >> 16 * i) & 0xffffu);
    }
    access.write((uint16_t*)t.param + at, pack_bits<uint16_t>(halves));
  }
};

// --- What a lane holds of a block ---------------------------------------------------------------

// call(Index<k>{}) for each of a rule's moments.
template <int K>
struct Index {
  TW_HD constexpr operator int() const { return K; }
};
template <int N, class Call>
__device__ __forceinline__ void for_moments(Call&& call) {
  if constexpr (N > 0) {
    for_moments<N - 1>(call);
    call(Index<N - 1>{});
  }
}

// One of whose rows other devices have a part.
struct CutTensor : StepTensor {
  CutRows rows;
};
template <class Tensor>
constexpr bool kIsCut = std::is_same<Tensor, CutTensor>::value;

// What a warp has at a time: a block, or narrow rows that are one each.
struct Turn {
  uint32_t block, blocks;
};

// State is the type that moments are stored in: float, BFloat16, or bytes of codes. A Narrow turn is
// of narrow rows.
template <class Param, class State, class Rule, class Tensor = StepTensor, bool Narrow = false>
class LaneOfBlock {
 public:
  static constexpr int N = Rule::kMoments;
  static constexpr bool kInBlocks = std::is_same<State, uint8_t>::value;
  using Maps = MapsOf<kInBlocks, kInBlocks && (N > 1)>;  // only a first moment has a sign

  __device__ __forceinline__ LaneOfBlock(const Tensor& t, Turn turn, bool is_aligned)
      : t_(t),
        turn_(turn),
        here_(locate(t, turn)),
        first_(here_.begin + place(0)),
        whole_(is_aligned && here_.count == kQuantBlock &&
               (!kIsCut<Tensor> || here_.begin % 4 == 0)) {
    with_access([&](auto access_to) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const auto access = access_to(group);
        const int64_t at = first_ + group * kGroupStride;
        param_[group].read(t, at, access);
        grad_[group] = access.read((const typename Param::Storage*)t.grad + at);
        for_moments<N>([&](auto k) {
          constexpr unsigned kZeros = kInBlocks && Rule::kSigned[k] ? kSignedZeros : 0;
          moment_[k][group] = access.read((const State*)t.moment[k] + at, kZeros);
        });
      }
    });
    if constexpr (kInBlocks) {
      for_blocks_of_lane([&](int at, uint32_t block, bool is_there) {
#pragma unroll
        for (int k = 0; k < N; ++k) absmax_[k][at] = is_there ? t.absmax[k][block] : 0;
      });
    }
  }

  // call(p, g, m, whether the element is there) for each of the lane's elements, which are zeros
  // past the end of a block; what is left in p and m is what save() stores.
  template <class Call>
  __device__ __forceinline__ void for_elements(const Maps& maps, Call&& call) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float m[N > 0 ? N : 1];
        for_moments<N>([&](auto k) {
          if constexpr (kInBlocks) {
            const unsigned code = moment_[k][group].bits(i) & 0xffu;
            m[k] = maps.template of<Rule::kSigned[k]>().value[code] * absmax_[k][block_of(group)];
          } else {
            m[k] = moment_[k][group][i];
          }
        });
        float& p = p_[group][i];
        p = param_[group][i];
        call(p, grad_[group][i], m, place(group) + i < here_.count);
#pragma unroll
        for (int k = 0; k < N; ++k) m_[k][group][i] = m[k];
      }
    }
  }

  __device__ __forceinline__ void save(const Maps& maps) {
    for_moments<N>([&](auto k) {
      if constexpr (kInBlocks) {
        constexpr bool kSigned = Rule::kSigned[k];
        constexpr int kTogether = kGroups / kBlocks;
#pragma unroll
        for (int at = 0; at < kBlocks; ++at) {
          if constexpr (kIsCut<Tensor>) {
            absmax_[k][at] = *new_absmax(k);  // known already, from all devices
          } else if constexpr (Narrow) {
            absmax_[k][at] = largest_magnitude(m_[k][at], lanes_of_row());
          } else {
            absmax_[k][at] = largest_magnitude(m_[k]);
          }
          maps.template of<kSigned>().template encode<kTogether, !kSigned>(
              moment_[k] + at, m_[k] + at, absmax_[k][at]);
        }
      } else {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          moment_[k][group] = pack<State>(m_[k][group]);
        }
      }
    });
    if constexpr (kInBlocks && !kIsCut<Tensor>) {
      __syncwarp();  // all lanes have read the absmax that one of them replaces
      for_blocks_of_lane([&](int at, uint32_t block, bool is_there) {
        if (!is_there || (lane() & (lanes_of_row() - 1)) != 0) return;
#pragma unroll
        for (int k = 0; k < N; ++k) t_.absmax[k][block] = absmax_[k][at];
      });
    }
    with_access([&](auto access_to) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const auto access = access_to(group);
        const int64_t at = first_ + group * kGroupStride;
        Param::write(t_, at, p_[group], access);
#pragma unroll
        for (int k = 0; k < N; ++k) access.write((State*)t_.moment[k] + at, moment_[k][group]);
      }
    });
  }

  // Of cut rows: of what is here of the block.
  __device__ __forceinline__ void save_absmaxes() const {
    for_moments<N>([&](auto k) {
      const float largest = largest_magnitude(m_[k]);
      if (lane() == 0) *new_absmax(k) = largest;
    });
  }

 private:
  __device__ __forceinline__ float* new_absmax(int k) const {
    return t_.absmax[k] + t_.rows.all_pieces + turn_.block;
  }
  static __device__ __forceinline__ QuantBlock locate(const Tensor& t, Turn turn) {
    if constexpr (Narrow) return {turn.block * t.width, turn.blocks * t.width};
    if constexpr (kIsCut<Tensor>) return cut_block(t.rows, turn.block, t.width);
    if constexpr (kInBlocks) return quant_block(turn.block, t.width);
    const int64_t begin = (int64_t)turn.block * kQuantBlock, left = t.width - begin;
    return {begin, left < kQuantBlock ? left : kQuantBlock};
  }

  // Blocks that a lane has elements of: narrow rows do not go on in another group.
  static constexpr int kBlocks = Narrow ? kGroups : 1;
  static __device__ __forceinline__ int block_of(int group) { return Narrow ? group : 0; }
  __device__ __forceinline__ int lanes_of_row() const { return Narrow ? (int)t_.width / 4 : kWarp; }
  // call(which of them, its number in the tensor, whether the turn has it)
  template <class Call>
  __device__ __forceinline__ void for_blocks_of_lane(Call&& call) const {
#pragma unroll
    for (int at = 0; at < kBlocks; ++at) {
      // Divided by a power of two.
      const uint32_t row = Narrow ? (uint32_t)place(at) >> (__ffs((int)t_.width) - 1) : 0;
      call(at, turn_.block + row, row < turn_.blocks);
    }
  }

  // call(group -> its Access): one branch for all that is read or written.
  template <class Call>
  __device__ __forceinline__ void with_access(Call&& call) const {
    const auto left = [&](int group) { return (int)here_.count - place(group); };
    if (whole_) {
      call([&](int group) { return Access<true>{left(group)}; });
    } else {
      call([&](int group) { return Access<false>{left(group)}; });
    }
  }

  const Tensor& t_;
  const Turn turn_;
  const QuantBlock here_;
  const int64_t first_;  // element of the lane
  const bool whole_;
  Param param_[kGroups];
  Four<typename Param::Storage> grad_[kGroups];
  Four<State> moment_[N > 0 ? N : 1][kGroups];
  float absmax_[N > 0 ? N : 1][kBlocks];
  float p_[kGroups][4], m_[N > 0 ? N : 1][kGroups][4];
};

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
