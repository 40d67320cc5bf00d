// Pages of memory that nobody has written yet: a large allocation comes from the system without them.
#pragma once

#include <cstdint>

namespace rlkernel::cpu {

// Whether `bytes` from `first`, which are about to be written, had no pages yet, judged by the first page that lies inside.
// Then they have: asked for together they cost one call of the system, not a fault each. Nothing is allocated that the
// writes would not allocate, so whose memory it is does not matter, and what fails here is left to them.
bool bring_pages(void* first, int64_t bytes);

}  // namespace rlkernel::cpu
