// The arguments of the kernel of rotary position embedding in Python.
#pragma once
#include "rlkernel/call.h"
#include "rlkernel/rotary/arguments.h"

namespace rlkernel::calls {

using namespace bind;

struct rotary {
  Tensor q;
  Optional k;
  Tensor cos, sin;
  Optional positions;
  int64_t heads, rotary_dim;
  bool interleaved, round_each, inverse;
  Tensor out_q;
  Optional out_k;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    if (q.rank() != 3 && q.rank() != 4) q.want_rank(4);
    q.want_number("heads", heads, 0, q.rank() - 2);
    q.want_number("rotary_dim", rotary_dim, 2, q.last(), 2);
    const int last = cos.rank() - 1;
    if (last < 0) cos.want_rank(2);
    const int64_t width = cos.last();
    if (width != rotary_dim && 2 * width != rotary_dim)
      cos.refuse("have rotary_dim columns or half as many", std::to_string(width));
    if (!sin.has_shape_of(cos)) sin.refuse_shape_of(cos);
    if (!sin.has_type_of(cos)) sin.refuse("be of the dtype of cos", sin.type_text());
    const bool two = q.rank() == 4;
    const int inner = heads == q.rank() - 2 ? q.rank() - 3 : q.rank() - 2, outer = heads == 0 ? 1 : 0;
    const int64_t outer_size = two ? q.size(outer) : 1, inner_size = q.size(inner);
    if (k.given != out_k.given) out_k.refuse("be given where k is", out_k.given ? "a tensor" : "None");
    const auto table = [&](const Tensor& t) -> RotaryTable {
      t.want_unit_stride();
      if (positions.given) {
        t.want_rank(2);
        return {t.data(), 0, t.stride(0)};
      }
      if (two) t.want_shape({outer_size, inner_size, width});
      else t.want_shape({inner_size, width});
      return {t.data(), two ? t.stride(0) : 0, t.stride(two ? 1 : 0)};
    };
    const auto rows = [&](const Tensor& x, const Tensor& out) -> RotaryHeads {
      if (!x.given) return {};
      if (x.rank() != q.rank()) x.want_rank(q.rank());
      for (int d = 0; d < q.rank(); ++d)
        if (d != heads && x.size(d) != q.size(d)) x.refuse_shape_of(q);
      if (!x.has_type_of(q)) x.refuse("be of the dtype of q", x.type_text());
      if (!out.has_shape_of(x)) out.refuse_shape_of(x);
      if (!out.has_type_of(q)) out.refuse("be of the dtype of q", out.type_text());
      x.want_unit_stride();
      out.want_unit_stride();
      out.want_apart();
      const int h = static_cast<int>(heads);
      return {x.data(), out.data(), x.size(h), two ? x.stride(outer) : 0, x.stride(inner), x.stride(h),
              two ? out.stride(outer) : 0, out.stride(inner), out.stride(h)};
    };
    return launch({outer_size, inner_size, q.last(), q.dtype(), cos.dtype(), rows(q, out_q), rows(k, out_k), table(cos),
                   table(sin), positions.dense<const int64_t>(outer_size * inner_size), rotary_dim, width, interleaved,
                   round_each, inverse},
                  stream);
  }
};

RLKERNEL_FIELDS(rotary, q, k, cos, sin, positions, heads, rotary_dim, interleaved, round_each, inverse, out_q, out_k)

}  // namespace rlkernel::calls
