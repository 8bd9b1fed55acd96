// Quantising to 8 bits and back on the CPU.
//
// Bytes: an element of x is read once, a code written, and 4 bytes for each block: 5 + 1/64 an
// element in float32, 3 + 1/64 in 16 bits; the same the other way.
#include "cpu/quant8.h"

#include <type_traits>

#include "core/dispatch.h"

namespace {

using namespace torchweld;

template <bool Signed, class T>
void quantize_block(const Quantize8& a, int64_t block) {
  const QuantBlock at = quant_block(block, a.width);
  const T* x = (const T*)a.x + at.begin;
  alignas(kVectorBytes) float values[kQuantBlock];
  Largest largest;
  for_vectors<float>(at.count, [&](int64_t i, auto place) {
    const F32 value = load(x + i, place);
    largest.add(value);
    store(values + i, value);
  });
  a.absmax[block] = largest.value();
  encode_block<Signed>(a.codes + at.begin, values, at.count, a.absmax[block]);
}

template <class T>
void dequantize_block(const Dequantize8& a, int64_t block) {
  const QuantBlock at = quant_block(block, a.width);
  const uint8_t* codes = a.codes + at.begin;
  T* y = (T*)a.y + at.begin;
  alignas(kVectorBytes) float values[kQuantBlock];
  decode_block(values, codes, at.count, a.is_signed);
  const F32 absmax = splat(a.absmax[block]);
  for_vectors<float>(
      at.count, [&](int64_t i, auto place) { store(y + i, load(values + i) * absmax, place); });
}

// call(T) with the float that elements are stored as.
template <class Call>
void dispatch_float(DType dtype, Call&& call) {
  dispatch(dtype, dtype, [&](auto t, auto) {
    if constexpr (!std::is_same_v<typename decltype(t)::type, double>) call(t);
  });
}

}  // namespace

// Items are blocks.
TW_EXPORT void quantize_8bit(const Quantize8& a, int64_t begin, int64_t end) {
  dispatch_float(a.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    const auto quantize = a.is_signed ? quantize_block<true, T> : quantize_block<false, T>;
    for (int64_t block = begin; block < end; ++block) quantize(a, block);
  });
}

TW_EXPORT void dequantize_8bit(const Dequantize8& a, int64_t begin, int64_t end) {
  dispatch_float(a.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    for (int64_t block = begin; block < end; ++block) dequantize_block<T>(a, block);
  });
}
