#include "rlkernel/prefix_shared_attention/kernel.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

int attention_merge(const AttentionMerge& m, void* stream) { return launch_attention_merge(m, stream); }
int segment_reduce(const SegmentReduce& s, void* stream) { return launch_segment_reduce(s, stream); }
int gather_kv(const GatherKv& g, void* stream) { return launch_gather_kv(g, stream); }

}  // namespace rlkernel::RLKERNEL_DEVICE
