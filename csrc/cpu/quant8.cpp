// Quantises to 8 bits and back on the CPU.
//
// Bytes per element: reads x once, writes a code, and writes 4 bytes per block. That is 5 + 1/64 in
// float32 and 3 + 1/64 in 16 bits. Dequantising moves the same bytes the other way.
#include "cpu/quant8.h"

#include <type_traits>

#include "core/dispatch.h"

namespace {

using namespace torchweld;

// Quantises blocks from `first` on: either one block, or several narrow rows.
template <bool Signed, class T>
void quantize_blocks(const Quantize8& a, int64_t first, int64_t blocks) {
  const QuantBlock at = quant_block(first, a.width);
  const int64_t count = at.count * blocks;
  const T* x = (const T*)a.x + at.begin;
  uint8_t* codes = a.codes + at.begin;
  float* absmax = a.absmax + first;
  BlockRoom values;
  Largest largest;
  for_vectors<float>(count, [&](int64_t i, auto place) {
    const F32 value = read(x + i, place);
    largest.add(value);
    store(values.at + i, value);
  });
  if (blocks == 1) {
    *absmax = largest.value();
    encode_block<Signed>(codes, values.at, count, *absmax);
  } else {
    measure_rows(absmax, values, blocks, at.count);
    encode_rows<Signed>(codes, values, absmax, blocks, at.count);
  }
}

template <class T>
void dequantize_blocks(const Dequantize8& a, int64_t first, int64_t blocks) {
  const QuantBlock at = quant_block(first, a.width);
  const int64_t count = at.count * blocks;
  const uint8_t* codes = a.codes + at.begin;
  T* y = (T*)a.y + at.begin;
  BlockRoom values;
  decode_block(values.at, codes, count, a.is_signed);
  if (blocks > 1) scale_rows(values, a.absmax + first, blocks, at.count);
  const F32 absmax = splat(blocks > 1 ? 1.0f : a.absmax[first]);
  for_vectors<float>(
      count, [&](int64_t i, auto place) { store(y + i, load(values.at + i) * absmax, place); });
}

// call(first, blocks) over a range, with as many blocks per call as possible.
template <class Call>
void for_blocks(int64_t width, int64_t begin, int64_t end, Call&& call) {
  const int64_t at_once = rows_at_once(width);
  for (; begin < end; begin += at_once) {
    call(begin, end - begin < at_once ? end - begin : at_once);
  }
}

// call(T) with the storage type of the floats.
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
    const auto quantize = a.is_signed ? quantize_blocks<true, T> : quantize_blocks<false, T>;
    for_blocks(a.width, begin, end, [&](int64_t first, int64_t n) { quantize(a, first, n); });
  });
}

TW_EXPORT void dequantize_8bit(const Dequantize8& a, int64_t begin, int64_t end) {
  dispatch_float(a.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    for_blocks(a.width, begin, end,
               [&](int64_t first, int64_t n) { dequantize_blocks<T>(a, first, n); });
  });
}
