#pragma once
#include <cstddef>

namespace rlkernel::cpu {

// Asks for huge pages under memory that is about to be written for the first time: the 65,536 page faults of a fresh
// 256 MiB result take longer than the kernel that fills it. Advice only, and nothing where the system has no such call.
void advise_huge_pages(void* start, std::size_t bytes);

}  // namespace rlkernel::cpu
