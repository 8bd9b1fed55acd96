// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) turns a
// counter and a key into four random words. It keeps no state between calls.
#pragma once

#include "core/dtype.h"

TW_NAMESPACE_BEGIN

constexpr uint32_t kPhiloxMultiplier[2] = {0xD2511F53u, 0xCD9E8D57u};
constexpr uint32_t kPhiloxKeyStep[2] = {0x9E3779B9u, 0xBB67AE85u};
constexpr int kPhiloxRounds = 10;

struct PhiloxWords {
  uint32_t word[4];
};

// The high half of a product. __umulhi compiles to one instruction on a GPU. A 64-bit product would
// cost one more addition per multiplication.
TW_HD uint32_t multiply_high(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __umulhi(a, b);
#else
  return (uint32_t)((uint64_t)a * b >> 32);
#endif
}

TW_HD PhiloxWords philox(PhiloxWords counter, uint32_t key0, uint32_t key1) {
  uint32_t c0 = counter.word[0], c1 = counter.word[1];
  uint32_t c2 = counter.word[2], c3 = counter.word[3];
  // constexpr arrays exist only on the host, so device code needs scalars.
  constexpr uint32_t multiplier0 = kPhiloxMultiplier[0], multiplier1 = kPhiloxMultiplier[1];
  constexpr uint32_t step0 = kPhiloxKeyStep[0], step1 = kPhiloxKeyStep[1];
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint32_t high0 = multiply_high(c0, multiplier0), low0 = c0 * multiplier0;
    const uint32_t high1 = multiply_high(c2, multiplier1), low1 = c2 * multiplier1;
    c0 = high1 ^ c1 ^ key0;
    c1 = low1;
    c2 = high0 ^ c3 ^ key1;
    c3 = low0;
    key0 += step0;
    key1 += step1;
  }
  return {{c0, c1, c2, c3}};
}

TW_NAMESPACE_END
