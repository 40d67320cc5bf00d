#include "pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace rlkernel::cpu {

#if defined(__linux__)
bool bring_pages(void* first, int64_t bytes) {
#ifdef MADV_POPULATE_WRITE
  constexpr int kPopulate = MADV_POPULATE_WRITE;
#else
  constexpr int kPopulate = 23;  // headers before Linux 5.14; such a system refuses it, and the writes fault as ever
#endif
  static const uintptr_t page = sysconf(_SC_PAGESIZE);
  const uintptr_t address = reinterpret_cast<uintptr_t>(first);
  // the pages at both ends may have come with what lies beside them
  const uintptr_t begin = (address + page - 1) / page * page, end = (address + bytes) / page * page;
  unsigned char resident = 1;
  if (begin >= end || mincore(reinterpret_cast<void*>(begin), page, &resident) != 0 || (resident & 1) != 0) return false;
  madvise(reinterpret_cast<void*>(begin), end - begin, kPopulate);
  return true;
}
#else
bool bring_pages(void*, int64_t) { return false; }
#endif

}  // namespace rlkernel::cpu
