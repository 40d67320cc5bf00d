// The launch of the second read of a row. A source is the code of one dtype; setup.py compiles them together.
#pragma once

#include "rlkernel/sampling/kept.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

// Who reads a row: the bits are the same in any shape.
struct Shape {
  unsigned blocks, threads;
};

// Fewer rows than a device has room for would leave the rest of it idle: the largest cluster, of which all rows' run at a time.
// Of more rows than it has room for half a block each: two share a multiprocessor, and one reads while the other waits. Alone half
// a block takes 1.75 times as long as a whole one: in an odd number of waves, if these are few, whole ones end first.
template <class T>
inline Shape shape_of(int64_t rows) {
  static ActiveClusters active;
  for (unsigned size = kLargestCluster; size > 1; size /= 2)
    if (rows <= active(filter_kernel<T>, size, kFinishThreads)) return {size, kFinishThreads};
  const int room = active(filter_kernel<T>, 1, kFinishThreads);
  const int64_t waves = room != 0 ? (rows + room - 1) / room : 1;
  const unsigned threads = waves > 6 || waves % 2 == 0 ? kFinishThreads / 2 : kFinishThreads;
  return {1, threads};
}

template <class T>
int launch_filter(const SamplingInputs& in, const SamplingOutputs& out, unsigned rows, void* stream) {
  const Shape row = shape_of<T>(in.rows);
  RLKERNEL_LAUNCH_CLUSTERS((filter_kernel<T>), rows, row.blocks, row.threads, stream, in, out);
  return launch_error();
}

}  // namespace rlkernel::RLKERNEL_DEVICE

#define RLKERNEL_SAMPLING_FILTER(T)        \
  namespace rlkernel::RLKERNEL_DEVICE {    \
  template int launch_filter<T>(const SamplingInputs&, const SamplingOutputs&, unsigned, void*); \
  }
