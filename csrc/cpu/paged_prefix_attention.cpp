#include "rlkernel/paged_prefix_attention/arguments.h"

#include "isa.h"

namespace rlkernel::cpu {

RLKERNEL_CPU_DISPATCH(paged_prefix_attention, PagedAttention)

}  // namespace rlkernel::cpu
