// Philox4x32-10: ten rounds that turn a counter of four words, under a key of two, into four random words. For each key it is
// a bijection of the counters: no two of them have the same words (Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC 2011). It passes all of TestU01, and has no state.
//
// Plain functions for host and device. Static: the files for each instruction set must not share one copy.
#pragma once

#include "rlkernel/kernel.h"

namespace rlkernel {

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxFirst = 0xD2511F53u, kPhiloxSecond = 0xCD9E8D57u;    // what words 0 and 2 are multiplied by
constexpr uint32_t kPhiloxLowStep = 0x9E3779B9u, kPhiloxHighStep = 0xBB67AE85u;  // of the key, from round to round

struct PhiloxBlock {
  uint32_t first, second, third, fourth;
};

RLKERNEL_HOST_DEVICE static constexpr PhiloxBlock philox(PhiloxBlock x, uint32_t low_key, uint32_t high_key) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p = uint64_t{kPhiloxFirst} * x.first, q = uint64_t{kPhiloxSecond} * x.third;
    x = {static_cast<uint32_t>(q >> 32) ^ x.second ^ low_key, static_cast<uint32_t>(q),
         static_cast<uint32_t>(p >> 32) ^ x.fourth ^ high_key, static_cast<uint32_t>(p)};
    low_key += kPhiloxLowStep;
    high_key += kPhiloxHighStep;
  }
  return x;
}

// The known answers that Random123 publishes: every compiler of the kernels finds them.
constexpr bool philox_gives(PhiloxBlock counter, uint32_t low_key, uint32_t high_key, PhiloxBlock want) {
  const PhiloxBlock x = philox(counter, low_key, high_key);
  return x.first == want.first && x.second == want.second && x.third == want.third && x.fourth == want.fourth;
}
static_assert(philox_gives({0, 0, 0, 0}, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
static_assert(philox_gives({~0u, ~0u, ~0u, ~0u}, ~0u, ~0u, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
static_assert(philox_gives({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0xa4093822, 0x299f31d0,
                           {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));

}  // namespace rlkernel
