// The five functions of ROCm's device library that the kernels reach, as that library defines them. Debian's clang has no
// device library for gfx942; without these definitions every thread index would be a call, and the registers and scratch
// that the compiler reports would be those of the calling convention. For the compile check only.
#pragma once

#include <hip/hip_runtime.h>

extern "C" __device__ __attribute__((const)) inline size_t __ockl_get_local_id(uint) {
  return __builtin_amdgcn_workitem_id_x();
}
extern "C" __device__ __attribute__((const)) inline size_t __ockl_get_group_id(uint) {
  return __builtin_amdgcn_workgroup_id_x();
}
extern "C" __device__ __attribute__((const)) inline size_t __ockl_get_local_size(uint) {
  return __builtin_amdgcn_workgroup_size_x();
}
extern "C" __device__ __attribute__((const)) inline size_t __ockl_get_num_groups(uint) {
  return __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x();
}
extern "C" __device__ inline void __atomic_work_item_fence(__cl_mem_fence_flags, __memory_order, __memory_scope) {
  __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup");
}
