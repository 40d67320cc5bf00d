#include "pages.h"

#include <cstdint>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace rlkernel::cpu {

void advise_huge_pages(void* start, std::size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t kHuge = 2 << 20;  // madvise wants whole pages; those of its size alone can become huge
  const std::uintptr_t from = (reinterpret_cast<std::uintptr_t>(start) + kHuge - 1) / kHuge * kHuge;
  const std::uintptr_t to = (reinterpret_cast<std::uintptr_t>(start) + bytes) / kHuge * kHuge;
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#else
  (void)start;
  (void)bytes;
#endif
}

}  // namespace rlkernel::cpu
