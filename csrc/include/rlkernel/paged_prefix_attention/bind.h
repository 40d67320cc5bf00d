// The arguments of attention over a paged KV cache in Python. A plan comes from outside, so all that it points to is compared
// with what there is: this reads each of its numbers once, where the kernel reads the keys that they stand for.
#pragma once
#include "rlkernel/call.h"
#include "rlkernel/paged_prefix_attention/arguments.h"

namespace rlkernel::calls {

using namespace bind;

struct AttentionRule {
  double scale, softcap;
  int64_t window;
};

RLKERNEL_FIELDS(AttentionRule, scale, softcap, window)
inline const char* annotation(const AttentionRule&) { return "PagedRule"; }

struct paged_prefix_attention {
  Tensor query, key_cache, value_cache, rows, positions, pages, items, starts, slots, launches, states;
  Optional sinks;
  AttentionRule rule;
  Tensor out, lse;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    query.want_rank(3);
    query.want_unit_stride();
    key_cache.want_rank(4);
    const int64_t total = query.size(0), heads = query.size(1), dim = query.size(2), kv_heads = key_cache.size(2);
    value_cache.want_rank(4);
    const int64_t value_dim = value_cache.size(3);
    key_cache.want_shape({key_cache.size(0), key_cache.size(1), kv_heads, dim});
    value_cache.want_shape({key_cache.size(0), key_cache.size(1), kv_heads, value_dim});
    out.want_shape({total, heads, value_dim});
    out.want_dense();
    for (const Tensor* x : {&key_cache, &value_cache, &out})
      if (!x->has_type_of(query)) x->refuse("be of the dtype of query", x->type_text());
    if (kv_heads == 0 || heads % kv_heads != 0)
      key_cache.refuse("have heads that divide the " + std::to_string(heads) + " of query", std::to_string(kv_heads));
    if (key_cache.size(1) == 0) key_cache.refuse("have keys in a block", "none");
    states.want_rank(3);
    const int64_t slot_count = states.size(0);
    states.want_shape({slot_count, heads, value_dim + kPagedState});
    const PagedAttention a = {
        query.dtype(), query.data(), query.stride(0), query.stride(1), key_cache.data(), value_cache.data(),
        {key_cache.stride(0), key_cache.stride(1), key_cache.stride(2), key_cache.stride(3)},
        {value_cache.stride(0), value_cache.stride(1), value_cache.stride(2), value_cache.stride(3)},
        key_cache.size(1), heads, kv_heads, dim, value_dim, rows.dense<const int32_t>(total),
        positions.dense<const int32_t>(total), pages.dense<const int32_t>(pages.elements()),
        table(items, kPagedItem), starts.dense<const int32_t>(total + 1), slots.dense<const int32_t>(slots.elements()),
        table(launches, kPagedLaunch), total, launches.size(0),
        states.dense<float>(slot_count * heads * (value_dim + kPagedState)), sinks.dense<const float>(heads), out.data(),
        lse.matrix<float>(heads, total), rule.scale, rule.softcap, rule.window};
    lse.want_dense();
    want_in("rows", rows, a.rows, total, 0, total);
    want_in("positions", positions, a.positions, total, 0, int64_t{1} << 31);
    want_in("pages", pages, a.pages, pages.elements(), 0, key_cache.size(0));
    want_in("slots", slots, a.slots, slots.elements(), 0, slot_count);
    want_rising(starts, a.starts, total, slots.elements());
    want_items(a, slot_count);
    want_launches(a);
    return launch(a, stream);
  }

 private:
  static const int32_t* table(const Tensor& x, int64_t columns) {
    x.want_rank(2);
    x.want_shape({x.size(0), columns});
    return x.dense<const int32_t>(x.elements());
  }

  static void want_in(const char* name, const Tensor& x, const int32_t* data, int64_t count, int64_t least, int64_t end) {
    int32_t low = 0, high = -1;  // of none
    if (count != 0) {
      low = *std::min_element(data, data + count);
      high = *std::max_element(data, data + count);
    }
    if (low < least || high >= end)
      x.refuse("hold numbers from " + std::to_string(least) + " below " + std::to_string(end),
               std::string(name) + " from " + std::to_string(low) + " to " + std::to_string(high));
  }

  static void want_rising(const Tensor& x, const int32_t* data, int64_t count, int64_t last) {
    for (int64_t i = 0; i < count; ++i)
      if (data[i] < 0 || data[i] > data[i + 1]) x.refuse("rise from 0", std::to_string(data[i + 1]) + " at " + std::to_string(i + 1));
    if (data[count] != last) x.refuse("end with the " + std::to_string(last) + " of slots", std::to_string(data[count]));
  }

  void want_items(const PagedAttention& a, int64_t slot_count) const {
    for (int64_t i = 0; i < items.size(0); ++i) {
      const auto at = [&](PagedItem column) { return int64_t{a.items[i * kPagedItem + static_cast<int>(column)]}; };
      const int64_t first = at(PagedItem::first), end = at(PagedItem::end), page = at(PagedItem::page), slot = at(PagedItem::slot);
      const int64_t position = at(PagedItem::position), keys = at(PagedItem::keys);
      bool good = first >= 0 && first <= end && end <= a.total && slot >= 0 && slot + end - first <= slot_count;
      good = good && position >= 0 && keys >= 0;
      if (good && keys > 0) {
        const int64_t last = page + (position + keys - 1) / a.block_size - position / a.block_size;
        good = page >= 0 && last < pages.elements();
      }
      if (!good) items.refuse("hold rows, pages and slots that there are", "others in item " + std::to_string(i));
    }
  }

  // Each item and each row once, in their order.
  void want_launches(const PagedAttention& a) const {
    int64_t item = 0, row = 0;
    for (int64_t i = 0; i < a.launch_count; ++i) {
      const auto at = [&](PagedLaunch column) { return int64_t{a.launches[i * kPagedLaunch + static_cast<int>(column)]}; };
      const bool follows = at(PagedLaunch::first_item) == item && at(PagedLaunch::end_item) >= item &&
                           (at(PagedLaunch::first_row) == row || at(PagedLaunch::first_row) == at(PagedLaunch::end_row)) &&
                           at(PagedLaunch::end_row) >= at(PagedLaunch::first_row);
      if (!follows) launches.refuse("follow each other", "another order at " + std::to_string(i));
      item = at(PagedLaunch::end_item);
      if (at(PagedLaunch::first_row) < at(PagedLaunch::end_row)) row = at(PagedLaunch::end_row);
    }
    if (item != items.size(0) || row != a.total)
      launches.refuse("hold the " + std::to_string(items.size(0)) + " items and " + std::to_string(a.total) + " rows",
                      std::to_string(item) + " and " + std::to_string(row));
  }
};

RLKERNEL_FIELDS(paged_prefix_attention, query, key_cache, value_cache, rows, positions, pages, items, starts, slots, launches,
                states, sinks, rule, out, lse)

}  // namespace rlkernel::calls
