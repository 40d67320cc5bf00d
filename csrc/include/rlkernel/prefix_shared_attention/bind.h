// The arguments of the kernels around shared prefixes in Python.
#pragma once
#include "rlkernel/call.h"
#include "rlkernel/prefix_shared_attention/arguments.h"

namespace rlkernel::calls {

using namespace bind;

struct attention_merge {
  Tensor out, lse;
  Optional part, part_lse, sinks;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    out.want_rank(3);
    out.want_unit_stride();
    out.want_apart();
    const Dtype dtype = out.dtype();
    const int64_t rows = out.size(0), heads = out.size(1), head_dim = out.size(2);
    if (part.given != part_lse.given) (part.given ? part_lse : part).refuse("be given with the other of the two", "None");
    if (part.given) {
      part.want_shape({rows, heads, head_dim});
      part.want_unit_stride();
      if (part.dtype() != dtype) part.refuse("be of the dtype of out", part.type_text());
    }
    return launch({out.data(), dtype, out.stride(0), out.stride(1), lse.matrix<float>(heads, rows), lse.row_stride(),
                   part.data(), part.given ? part.stride(0) : 0, part.given ? part.stride(1) : 0,
                   part_lse.matrix<const float>(heads, rows), part_lse.row_stride(), sinks.dense<const float>(heads), rows,
                   heads, head_dim},
                  stream);
  }
};

RLKERNEL_FIELDS(attention_merge, out, lse, part, part_lse, sinks)

struct segment_reduce {
  Tensor source_k, source_v, index, offsets, out_k, out_v;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    source_k.want_rank(3);
    const int64_t rows = offsets.intervals(), width = source_k.size(1) * source_k.size(2);
    if (!source_v.has_shape_of(source_k)) source_v.refuse_shape_of(source_k);
    if (source_v.dtype() != source_k.dtype()) source_v.refuse("be of the dtype of source_k", source_v.type_text());
    if (out_v.dtype() != out_k.dtype()) out_v.refuse("be of the dtype of out_k", out_v.type_text());
    if (out_k.dtype() != Dtype::f32 && out_k.dtype() != source_k.dtype())
      out_k.refuse("be float32 or of the dtype of source_k", out_k.type_text());
    source_k.want_dense();
    source_v.want_dense();
    return launch({{source_k.data(), source_v.data()}, source_k.dtype(), {width, width},
                   index.dense<const int64_t>(index.elements()), offsets.offsets(rows, index), rows, width,
                   {out_k.dense_floats(rows * width), out_v.dense_floats(rows * width)}, out_k.dtype(), {width, width}},
                  stream);
  }
};

RLKERNEL_FIELDS(segment_reduce, source_k, source_v, index, offsets, out_k, out_v)

struct gather_kv {
  Tensor k, v, index, out_k, out_v;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    k.want_rank(3);
    const int64_t rows = index.elements(), heads = k.size(1), head_dim = k.size(2), bytes = rows * heads * head_dim * k.item_bytes();
    v.want_shape({k.size(0), heads, head_dim});
    for (const Tensor* x : {&v, &out_k, &out_v})
      if (!x->has_type_of(k)) x->refuse("be of the dtype of k", x->type_text());
    k.want_unit_stride();
    v.want_unit_stride();
    for (const Tensor* x : {&out_k, &out_v}) {
      x->want_bytes(bytes);
      x->want_dense();
    }
    return launch({{k.data(), v.data()}, static_cast<int>(k.item_bytes()), {k.stride(0), v.stride(0)},
                   {k.stride(1), v.stride(1)}, index.dense<const int64_t>(rows), rows, heads, head_dim,
                   {out_k.data(), out_v.data()}},
                  stream);
  }
};

RLKERNEL_FIELDS(gather_kv, k, v, index, out_k, out_v)

}  // namespace rlkernel::calls
