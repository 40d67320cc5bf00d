// Arguments of the kernels of group advantages. A response has a place: place p is response order[p], and a group is a stretch
// of places, so that groups may be named by sorted ids, by offsets, or by one size for all.
#pragma once
#include "rlkernel/kernel.h"
#include "rlkernel/moments.h"
#include "rlkernel/names.h"
#include "rlkernel/sequences.h"

namespace rlkernel {

// `deviation` is r - mean, `total` r less a baseline where there is one.
RLKERNEL_ENUM(Estimator, deviation, scaled, rloo, opo, maxrl, passk, gdpo, total, leave_one_out)
RLKERNEL_ENUM(RewardScale, none, group, batch)

struct GroupAdvantages {
  const float* rewards;   // [n, columns], dense
  const uint8_t* mask;    // [n, columns], or null: every reward counts
  int64_t n;
  int columns;
  const float* reward_weights;  // [columns], or null for one column
  const float *baselines, *lengths;  // [n], or null
  const int64_t* ids;     // [n]: on a CPU what order and offsets are made of; or null
  const int64_t* order;   // [n], or null: place p is response p
  const int64_t* ends;    // [n]: where the group of each place ends; or null
  const int64_t* offsets; // [groups + 1]: group g has the places [offsets[g], offsets[g + 1]); or null
  int64_t groups, size;   // with neither, group g has the places [g * size, (g + 1) * size)
  Estimator estimator;
  RewardScale scale;
  bool unbiased, reward_singletons;
  double eps;
  Moments* batch;         // [columns, or 1 unless gdpo][chunks_of(n)], where the scale is the batch's
  float* out;             // [n], or null: `wide` and `counts` are written, for whitening
  double* wide;           // [n]
  uint8_t* counts;        // [n]
};

RLKERNEL_KERNEL(group_advantages, const GroupAdvantages&)

}  // namespace rlkernel
