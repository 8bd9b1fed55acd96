// A lane's elements of a block during a step: parameters and moments, with their codecs. rule.cuh
// argues for the design.
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
// Thread blocks per multiprocessor. Three blocks leave 80 registers a thread, too few for three
// moments.
template <class Rule>
constexpr int kStepCtas = Rule::kMoments < 3 ? 3 : 2;

// Rules in core/ call this.
TW_HD float square_root(float v) { return sqrtf(v); }

// --- Parameters ---------------------------------------------------------------------------------

// A group of four elements. write() overwrites the values by the parameters as they are stored.
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
  static __device__ __forceinline__ void write(const StepTensor& t, int64_t at, float (&values)[4],
                                               const Access& access) {
    const Four<T> stored = pack<T>(values);
    access.write((T*)t.param + at, stored);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = stored[i];
  }
};

template <class T>
struct MasteredParam {
  using Storage = T;
  Four<float> master;
  template <class Access>
  __device__ __forceinline__ void read(const StepTensor& t, int64_t at, const Access& access) {
    master = access.read((const float*)t.master + at);
  }
  __device__ __forceinline__ float operator[](int i) const { return master[i]; }
  template <class Access>
  static __device__ __forceinline__ void write(const StepTensor& t, int64_t at, float (&values)[4],
                                               const Access& access) {
    access.write((float*)t.master + at, pack<float>(values));
    access.write((T*)t.param + at, pack<T>(values));
  }
};

struct RemainderParam {
  using Storage = BFloat16;
  Four<uint16_t> half, remainder;
  template <class Access>
  __device__ __forceinline__ void read(const StepTensor& t, int64_t at, const Access& access) {
    half = access.read((const uint16_t*)t.param + at);
    remainder = access.read((const uint16_t*)t.master + at);
  }
  __device__ __forceinline__ float operator[](int i) const {
    return __uint_as_float(complete(half.bits(i), remainder.bits(i) & 0xffffu));
  }
  template <class Access>
  static __device__ __forceinline__ void write(const StepTensor& t, int64_t at, float (&values)[4],
                                               const Access& access) {
    unsigned halves[4], remainders[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float v = values[i];
      const unsigned bits = v != v ? 0x7fc00000u : __float_as_uint(v);
      halves[i] = round_to_nearest_half(bits), remainders[i] = bits & 0xffffu;
    }
    access.write((uint16_t*)t.param + at, pack_bits<uint16_t>(halves));
    access.write((uint16_t*)t.master + at, pack_bits<uint16_t>(remainders));
  }
};

struct ShortRemainderParam {
  using Storage = BFloat16;
  Four<uint16_t> half;
  Four<uint8_t> remainder;
  template <class Access>
  __device__ __forceinline__ void read(const StepTensor& t, int64_t at, const Access& access) {
    half = access.read((const uint16_t*)t.param + at);
    remainder = access.read((const uint8_t*)t.master + at);
  }
  __device__ __forceinline__ float operator[](int i) const {
    return __uint_as_float(complete_24(half.bits(i), remainder.bits(i) & 0xffu));
  }
  template <class Access>
  static __device__ __forceinline__ void write(const StepTensor& t, int64_t at, float (&values)[4],
                                               const Access& access) {
    unsigned halves[4], remainders[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float v = values[i];
      const unsigned bits = v != v ? 0x7fc000u : round_to_24(__float_as_uint(v));
      halves[i] = half_of_24(bits), remainders[i] = bits & 0xffu;
      values[i] = __uint_as_float(bits << 8);
    }
    access.write((uint16_t*)t.param + at, pack_bits<uint16_t>(halves));
    access.write((uint8_t*)t.master + at, pack_bits<uint8_t>(remainders));
  }
};

struct RoundedParam : PlainParam<BFloat16> {
  template <class Access>
  static __device__ __forceinline__ void write(const StepTensor& t, int64_t at, float (&values)[4],
                                               const Access& access) {
    const uint64_t random = rounding_bits(*(const Rounding*)t.master, at);
    unsigned halves[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned bits = __float_as_uint(values[i]);
      halves[i] = round_randomly(bits, (unsigned)(random >> 16 * i) & 0xffffu);
      values[i] = __uint_as_float(halves[i] << 16);
    }
    access.write((uint16_t*)t.param + at, pack_bits<uint16_t>(halves));
  }
};

// Whether there are registers to load parameters ahead. Stochastic rounding's random numbers would
// spill, and so would parameters in two parts on sm_100.
template <class Param>
constexpr bool kLeavesRegisters = true;
template <>
constexpr bool kLeavesRegisters<RemainderParam> = false;
template <>
constexpr bool kLeavesRegisters<ShortRemainderParam> = false;
template <>
constexpr bool kLeavesRegisters<RoundedParam> = false;

// --- A lane's elements of a block
// -----------------------------------------------------------------

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

// Whether one of a rule's moments has a sign, or has none.
template <class Rule>
constexpr bool has_moment(bool is_signed) {
  for (int k = 0; k < Rule::kMoments; ++k) {
    if (Rule::kSigned[k] == is_signed) return true;
  }
  return false;
}

// A tensor whose rows are split across devices.
struct SplitTensor : StepTensor {
  SplitRows rows;
};
template <class Tensor>
constexpr bool kIsSplit = std::is_same<Tensor, SplitTensor>::value;

// A warp's work in one iteration: one block, or several narrow rows of one block each.
struct Turn {
  uint32_t block, blocks;
};

// State is the storage type of moments: float, BFloat16, or uint8_t for codes. A Narrow turn
// consists of narrow rows.
template <class Param, class State, class Rule, class Tensor = StepTensor, bool Narrow = false>
class LaneOfBlock {
 public:
  static constexpr int N = Rule::kMoments;
  static constexpr bool kInBlocks = std::is_same<State, uint8_t>::value;
  // Whether a turn is loaded before the one before it is encoded.
  static constexpr bool kLoadsAhead = kInBlocks && kLeavesRegisters<Param>;
  using Maps = MapsOf<kInBlocks && has_moment<Rule>(true), kInBlocks && has_moment<Rule>(false)>;

  __device__ __forceinline__ LaneOfBlock(const Tensor& t, Turn turn, bool is_aligned)
      : t_(t), is_aligned_(is_aligned) {
    load(turn);
  }

  // Loads the elements of a turn. Those of the turn before may still have to be saved.
  __device__ __forceinline__ void load(Turn turn) {
    next_ = place_of(turn);
    with_access(next_, [&](auto access_to) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const auto access = access_to(group);
        const int64_t at = next_.first + group * kGroupStride;
        param_[group].read(t_, at, access);
        grad_[group] = access.read((const typename Param::Storage*)t_.grad + at);
        for_moments<N>([&](auto k) {
          constexpr unsigned kZeros = kInBlocks && Rule::kSigned[k] ? kSignedZeros : 0;
          moment_[k][group] = access.read((const State*)t_.moment[k] + at, kZeros);
        });
        if constexpr (kHasCompanion<Rule>) {
          companion_[group] = access.read((const float*)t_.companion + at);
        }
      }
    });
    if constexpr (kInBlocks) {
      for_blocks_of_lane(turn, [&](int at, uint32_t block, bool is_there) {
#pragma unroll
        for (int k = 0; k < N; ++k) absmax_[k][at] = is_there ? t_.absmax[k][block] : 0;
      });
    }
  }

  // call(p, g, m, exists) for each loaded element, with the companion as the last argument if the
  // rule has one. Elements past the end of a block are zeros and do not exist. save() stores
  // what is new.
  template <class Call>
  __device__ __forceinline__ void for_elements(const Maps& maps, Call&& call) {
    here_ = next_;
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
        const bool exists = place(group) + i < here_.block.count;
        if constexpr (kHasCompanion<Rule>) {
          z_[group][i] = companion_[group][i];
          call(p, grad_[group][i], m, exists, z_[group][i]);
        } else {
          call(p, grad_[group][i], m, exists);
        }
#pragma unroll
        for (int k = 0; k < N; ++k) m_[k][group][i] = m[k];
      }
    }
  }

  __device__ __forceinline__ void save(const Maps& maps, float average_rate) {
    if constexpr (kLoadsAhead) {
      // What is written first frees its registers.
      with_access(here_, [&](auto access_to) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) write_param(group, access_to, average_rate);
      });
      for_moments<N>([&](auto k) {
        Four<State> stored[kGroups];
        float absmax[kBlocks];
        encode(k, maps, stored, absmax);
        __syncwarp();  // all lanes have read the absmax that one of them replaces
        write_absmax(k, absmax);
        with_access(here_, [&](auto access_to) {
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            write_moment(k, group, access_to, stored[group]);
          }
        });
      });
    } else {
      for_moments<N>([&](auto k) { encode(k, maps, moment_[k], absmax_[k]); });
      if constexpr (kInBlocks) __syncwarp();
      for_moments<N>([&](auto k) { write_absmax(k, absmax_[k]); });
      with_access(here_, [&](auto access_to) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          write_param(group, access_to, average_rate);
#pragma unroll
          for (int k = 0; k < N; ++k) write_moment(k, group, access_to, moment_[k][group]);
        }
      });
    }
  }

  // Writes the absmax of a piece of a split row.
  __device__ __forceinline__ void save_absmaxes() const {
    for_moments<N>([&](auto k) {
      const float largest = largest_magnitude(m_[k]);
      if (lane() == 0) *new_absmax(k) = largest;
    });
  }

 private:
  // Where a turn is in the tensor.
  struct Place {
    Turn turn;
    QuantBlock block;
    int64_t first;  // the lane's first element
    bool whole;
  };
  __device__ __forceinline__ Place place_of(Turn turn) const {
    const QuantBlock block = locate(t_, turn);
    return {
        turn, block, block.begin + place(0),
        is_aligned_ && block.count == kQuantBlock && (!kIsSplit<Tensor> || block.begin % 4 == 0)};
  }

  // Writes a group's parameters, and what follows them.
  template <class AccessTo>
  __device__ __forceinline__ void write_param(int group, const AccessTo& access_to,
                                              float average_rate) {
    const auto access = access_to(group);
    const int64_t at = here_.first + group * kGroupStride;
    Param::write(t_, at, p_[group], access);
    if constexpr (kHasCompanion<Rule>) {
      access.write((float*)t_.companion + at, pack<float>(z_[group]));
    } else if (t_.companion) {
      const Four<float> average = access.read((const float*)t_.companion + at);
      float values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[i] = average[i] + (p_[group][i] - average[i]) * average_rate;
      }
      access.write((float*)t_.companion + at, pack<float>(values));
    }
  }

  template <class AccessTo>
  __device__ __forceinline__ void write_moment(int k, int group, const AccessTo& access_to,
                                               const Four<State>& stored) {
    access_to(group).write((State*)t_.moment[k] + here_.first + group * kGroupStride, stored);
  }

  // Finds a moment's absmax, if it has one, and its stored form.
  template <int K>
  __device__ __forceinline__ void encode(Index<K> k, const Maps& maps, Four<State>* stored,
                                         float* absmax) {
    if constexpr (kInBlocks) {
      constexpr bool kSigned = Rule::kSigned[K];
      constexpr int kTogether = kGroups / kBlocks;
#pragma unroll
      for (int at = 0; at < kBlocks; ++at) {
        if constexpr (kIsSplit<Tensor>) {
          absmax[at] = *new_absmax(k);  // already the maximum over all devices
        } else if constexpr (Narrow) {
          absmax[at] = largest_magnitude(m_[k][at], lanes_of_row());
        } else {
          absmax[at] = largest_magnitude(m_[k]);
        }
        maps.template of<kSigned>().template encode<kTogether, !kSigned>(stored + at, m_[k] + at,
                                                                         absmax[at]);
      }
    } else {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) stored[group] = pack<State>(m_[k][group]);
    }
  }

  // One lane of a row writes its absmax, which other devices may have to agree on first.
  __device__ __forceinline__ void write_absmax(int k, const float* absmax) {
    if constexpr (kInBlocks && !kIsSplit<Tensor>) {
      for_blocks_of_lane(here_.turn, [&](int at, uint32_t block, bool is_there) {
        if (is_there && (lane() & (lanes_of_row() - 1)) == 0) t_.absmax[k][block] = absmax[at];
      });
    }
  }

  __device__ __forceinline__ float* new_absmax(int k) const {
    return t_.rows.new_absmax[k] + here_.turn.block;
  }
  static __device__ __forceinline__ QuantBlock locate(const Tensor& t, Turn turn) {
    if constexpr (Narrow) return {turn.block * t.width, turn.blocks * t.width};
    if constexpr (kIsSplit<Tensor>) return piece_of(t.rows, turn.block, t.width);
    if constexpr (kInBlocks) return quant_block(turn.block, t.width);
    const int64_t begin = (int64_t)turn.block * kQuantBlock, left = t.width - begin;
    return {begin, left < kQuantBlock ? left : kQuantBlock};
  }

  // The number of blocks that a lane has elements of. A group lies within one narrow row.
  static constexpr int kBlocks = Narrow ? kGroups : 1;
  static __device__ __forceinline__ int block_of(int group) { return Narrow ? group : 0; }
  __device__ __forceinline__ int lanes_of_row() const { return Narrow ? (int)t_.width / 4 : kWarp; }
  // call(index among the lane's blocks, index in the tensor, whether the turn includes it)
  template <class Call>
  __device__ __forceinline__ void for_blocks_of_lane(Turn turn, Call&& call) const {
#pragma unroll
    for (int at = 0; at < kBlocks; ++at) {
      // A division by a power of two.
      const uint32_t row = Narrow ? (uint32_t)place(at) >> (__ffs((int)t_.width) - 1) : 0;
      call(at, turn.block + row, row < turn.blocks);
    }
  }

  // call(group -> its Access), so that all reads or writes share one branch.
  template <class Call>
  static __device__ __forceinline__ void with_access(const Place& here, Call&& call) {
    const auto left = [&](int group) { return (int)here.block.count - place(group); };
    if (here.whole) {
      call([&](int group) { return Access<true>{left(group)}; });
    } else {
      call([&](int group) { return Access<false>{left(group)}; });
    }
  }

  const Tensor& t_;
  const bool is_aligned_;
  // What load() read, and from where.
  Place next_;
  Param param_[kGroups];
  Four<typename Param::Storage> grad_[kGroups];
  Four<State> moment_[N > 0 ? N : 1][kGroups];
  float absmax_[N > 0 ? N : 1][kBlocks];
  Four<float> companion_[kHasCompanion<Rule> ? kGroups : 1];
  // What the step made of it, and where it belongs.
  Place here_;
  float p_[kGroups][4], m_[N > 0 ? N : 1][kGroups][4];
  float z_[kHasCompanion<Rule> ? kGroups : 1][4];
};

TW_NAMESPACE_END
