// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): a counter and
// a key to four random words, with no state between calls.
#pragma once

#include "core/dtype.h"

TW_NAMESPACE_BEGIN

constexpr uint32_t kPhiloxMultiplier[2] = {0xD2511F53u, 0xCD9E8D57u};
constexpr uint32_t kPhiloxKeyStep[2] = {0x9E3779B9u, 0xBB67AE85u};
constexpr int kPhiloxRounds = 10;

struct PhiloxWords {
  uint32_t word[4];
};

TW_HD PhiloxWords philox(PhiloxWords counter, uint32_t key0, uint32_t key1) {
  uint32_t c0 = counter.word[0], c1 = counter.word[1];
  uint32_t c2 = counter.word[2], c3 = counter.word[3];
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = (uint64_t)c0 * kPhiloxMultiplier[0];
    const uint64_t product1 = (uint64_t)c2 * kPhiloxMultiplier[1];
    c0 = (uint32_t)(product1 >> 32) ^ c1 ^ key0;
    c1 = (uint32_t)product1;
    c2 = (uint32_t)(product0 >> 32) ^ c3 ^ key1;
    c3 = (uint32_t)product0;
    key0 += kPhiloxKeyStep[0];
    key1 += kPhiloxKeyStep[1];
  }
  return {{c0, c1, c2, c3}};
}

TW_NAMESPACE_END
