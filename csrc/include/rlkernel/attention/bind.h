// The arguments of attention's backward pass in Python. The requests come from outside: what they point to is compared with
// what there is, and groups with each other, because each is a thread's.
#pragma once
#include "rlkernel/attention/arguments.h"
#include "rlkernel/paged_prefix_attention/bind.h"

namespace rlkernel::calls {

using namespace bind;

struct attention_backward {
  Tensor q, k, v, out, lse, grad, rows, key_offsets, keys, group_offsets;
  AttentionRule rule;
  Tensor dq, dk, dv;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    q.want_rank(3);
    k.want_rank(3);
    v.want_rank(3);
    const int64_t total = q.size(0), heads = q.size(1), dim = q.size(2);
    const int64_t tokens = k.size(0), kv_heads = k.size(1), value_dim = v.size(2);
    k.want_shape({tokens, kv_heads, dim});
    v.want_shape({tokens, kv_heads, value_dim});
    out.want_shape({total, heads, value_dim});
    grad.want_shape({total, heads, value_dim});
    for (const Tensor* x : {&k, &v, &out, &grad})
      if (!x->has_type_of(q)) x->refuse("be of the dtype of q", x->type_text());
    if (kv_heads == 0 || heads % kv_heads != 0)
      k.refuse("have heads that divide the " + std::to_string(heads) + " of q", std::to_string(kv_heads));
    rows.want_rank(2);
    const int64_t requests = rows.size(0), groups = group_offsets.intervals();
    rows.want_shape({requests, 2});
    const AttentionBackward a = {
        q.dtype(), of(q), of(k), of(v), of(out), of(grad), lse.matrix<const float>(heads, total),
        rows.dense<const int64_t>(2 * requests), key_offsets.offsets(requests, keys), keys.dense<const int64_t>(keys.elements()),
        group_offsets.dense<const int64_t>(groups + 1), groups, total, heads, kv_heads, dim, value_dim,
        dq.dense<float>(total * heads * dim), dk.dense<float>(tokens * kv_heads * dim),
        dv.dense<float>(tokens * kv_heads * value_dim), rule.scale, rule.softcap, rule.window};
    lse.want_dense();
    want_rising(key_offsets, a.key_offsets, requests, keys.elements());
    want_rising(group_offsets, a.group_offsets, groups, requests);
    want_requests(a, tokens);
    return launch(a, stream);
  }

 private:
  static HeadRows of(const Tensor& x) {
    x.want_unit_stride();
    return {x.data(), x.stride(0), x.stride(1)};
  }

  static void want_rising(const Tensor& x, const int64_t* data, int64_t count, int64_t last) {
    bool rises = data[0] == 0 && data[count] == last;
    for (int64_t i = 0; i < count; ++i) rises = rises && data[i] <= data[i + 1];
    if (!rises) x.refuse("rise from 0 to " + std::to_string(last), "others");
  }

  // Rows in their order within a group and of one request each, keys that there are and of one group each.
  void want_requests(const AttentionBackward& a, int64_t tokens) const {
    std::vector<int64_t> group_of(tokens, -1), asked(a.total, 0);
    for (int64_t group = 0; group < a.groups; ++group)
      for (int64_t r = a.group_offsets[group]; r < a.group_offsets[group + 1]; ++r) {
        const int64_t first = a.rows[2 * r], end = a.rows[2 * r + 1], count = a.key_offsets[r + 1] - a.key_offsets[r];
        if (first < 0 || first > end || end > a.total || end - first > count)
          rows.refuse("hold rows that there are, no more than keys", "others in request " + std::to_string(r));
        for (int64_t i = first; i < end; ++i)
          if (asked[i]++ != 0) rows.refuse("hold each row once", std::to_string(i) + " again in request " + std::to_string(r));
        for (int64_t i = a.key_offsets[r]; i < a.key_offsets[r + 1]; ++i) {
          const int64_t key = a.keys[i];
          if (key < 0 || key >= tokens) keys.refuse("hold rows of k", std::to_string(key) + " at " + std::to_string(i));
          if (group_of[key] != -1 && group_of[key] != group) keys.refuse("be of one group each", std::to_string(key) + " of two");
          group_of[key] = group;
        }
      }
  }
};

RLKERNEL_FIELDS(attention_backward, q, k, v, out, lse, grad, rows, key_offsets, keys, group_offsets, rule, dq, dk, dv)

}  // namespace rlkernel::calls
