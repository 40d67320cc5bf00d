// Arguments of attention over a paged KV cache: the launches of a step's plan, each with the merge that ends its pass.
// rlkernel/calls/paged_prefix_attention.py tells what a plan is and what a row's bits depend on.
#pragma once
#include "rlkernel/dtype.h"
#include "rlkernel/kernel.h"
#include "rlkernel/names.h"

namespace rlkernel {

constexpr int kPagedTile = 64;  // keys that are shared in whole or not at all
constexpr int kPagedChunk = 512;  // keys of a partial result

// Columns of an item and of a launch.
RLKERNEL_ENUM(PagedItem, first, end, page, position, keys, slot, carry)
RLKERNEL_ENUM(PagedLaunch, first_item, end_item, first_row, end_row)
constexpr int kPagedItem = 7, kPagedLaunch = 4;

// A partial result of a head is value_dim sums, then the largest score and the total: the sums and the total are of weights
// exp(score - largest). A score is before it is scaled, or behind the softcap where there is one.
constexpr int kPagedState = 2;

struct PagedAttention {
  Dtype dtype;                      // of query, caches and out
  const void* query;                // [total, heads, head_dim], the last contiguous
  int64_t query_stride, query_head_stride;
  const void *keys, *values;        // [blocks, block_size, kv_heads, head_dim], and with value_dim
  int64_t key_strides[4], value_strides[4];
  int64_t block_size, heads, kv_heads, head_dim, value_dim;
  const int32_t *rows, *positions;  // [total]
  const int32_t* pages;
  const int32_t* items;             // [*, kPagedItem]
  const int32_t* starts;            // [total + 1]
  const int32_t* slots;
  const int32_t* launches;          // [launch_count, kPagedLaunch]
  int64_t total, launch_count;
  float* states;                    // [slot_count, heads, value_dim + kPagedState]
  const float* sinks;               // [heads], or null
  void* out;                        // [total, heads, value_dim], contiguous
  float* lse;                       // [heads, total], contiguous
  double scale, softcap;            // softcap 0: none
  int64_t window;                   // 0: all
};

RLKERNEL_KERNEL(paged_prefix_attention, const PagedAttention&)

}  // namespace rlkernel
