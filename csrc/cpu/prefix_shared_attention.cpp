#include "rlkernel/prefix_shared_attention/arguments.h"

#include "isa.h"

namespace rlkernel::cpu {

RLKERNEL_CPU_DISPATCH(attention_merge, AttentionMerge)
RLKERNEL_CPU_DISPATCH(segment_reduce, SegmentReduce)
RLKERNEL_CPU_DISPATCH(gather_kv, GatherKv)

}  // namespace rlkernel::cpu
