// The Python signatures of the kernels around shared prefixes: flat arguments in the order of the structs of
// prefix_shared_attention.h, a pair as two.
#pragma once
#include "rlkernel/bind.h"
#include "rlkernel/prefix_shared_attention.h"

namespace rlkernel::bind {

template <class Launch, class Describe>
void attention_merge(py::module_& m, const char* name, Launch launch, Describe describe) {
  m.def(
      name,
      [=](Address out, int dtype, int64_t out_stride, int64_t out_head_stride, Address lse, int64_t lse_stride, Address part,
          int64_t part_stride, int64_t part_head_stride, Address part_lse, int64_t part_lse_stride, Address sinks, int64_t rows,
          int64_t heads, int64_t head_dim, Address stream) {
        const AttentionMerge arguments{pointer<void>(out),
                                       static_cast<Dtype>(dtype),
                                       out_stride,
                                       out_head_stride,
                                       pointer<float>(lse),
                                       lse_stride,
                                       pointer<const void>(part),
                                       part_stride,
                                       part_head_stride,
                                       pointer<const float>(part_lse),
                                       part_lse_stride,
                                       pointer<const float>(sinks),
                                       rows,
                                       heads,
                                       head_dim};
        check(name, launch(arguments, pointer<void>(stream)), describe);
      },
      py::arg("out"), py::arg("dtype"), py::arg("out_stride"), py::arg("out_head_stride"), py::arg("lse"),
      py::arg("lse_stride"), py::arg("part"), py::arg("part_stride"), py::arg("part_head_stride"), py::arg("part_lse"),
      py::arg("part_lse_stride"), py::arg("sinks"), py::arg("rows"), py::arg("heads"), py::arg("head_dim"), py::arg("stream"),
      py::call_guard<py::gil_scoped_release>());
}

template <class Launch, class Describe>
void segment_reduce(py::module_& m, const char* name, Launch launch, Describe describe) {
  m.def(
      name,
      [=](Address source_k, Address source_v, int dtype, int64_t source_k_stride, int64_t source_v_stride, Address index,
          Address offsets, int64_t rows, int64_t width, Address out_k, Address out_v, int out_dtype, int64_t out_k_stride,
          int64_t out_v_stride, Address stream) {
        const SegmentReduce arguments{{pointer<const void>(source_k), pointer<const void>(source_v)},
                                      static_cast<Dtype>(dtype),
                                      {source_k_stride, source_v_stride},
                                      pointer<const int64_t>(index),
                                      pointer<const int64_t>(offsets),
                                      rows,
                                      width,
                                      {pointer<void>(out_k), pointer<void>(out_v)},
                                      static_cast<Dtype>(out_dtype),
                                      {out_k_stride, out_v_stride}};
        check(name, launch(arguments, pointer<void>(stream)), describe);
      },
      py::arg("source_k"), py::arg("source_v"), py::arg("dtype"), py::arg("source_k_stride"), py::arg("source_v_stride"),
      py::arg("index"), py::arg("offsets"), py::arg("rows"), py::arg("width"), py::arg("out_k"), py::arg("out_v"),
      py::arg("out_dtype"), py::arg("out_k_stride"), py::arg("out_v_stride"), py::arg("stream"),
      py::call_guard<py::gil_scoped_release>());
}

template <class Launch, class Describe>
void gather_kv(py::module_& m, const char* name, Launch launch, Describe describe) {
  m.def(
      name,
      [=](Address k, Address v, int bytes, int64_t k_stride, int64_t v_stride, int64_t k_head_stride, int64_t v_head_stride,
          Address index, int64_t rows, int64_t heads, int64_t head_dim, Address out_k, Address out_v, Address stream) {
        const GatherKv arguments{{pointer<const void>(k), pointer<const void>(v)},
                                 bytes,
                                 {k_stride, v_stride},
                                 {k_head_stride, v_head_stride},
                                 pointer<const int64_t>(index),
                                 rows,
                                 heads,
                                 head_dim,
                                 {pointer<void>(out_k), pointer<void>(out_v)}};
        check(name, launch(arguments, pointer<void>(stream)), describe);
      },
      py::arg("k"), py::arg("v"), py::arg("bytes"), py::arg("k_stride"), py::arg("v_stride"), py::arg("k_head_stride"),
      py::arg("v_head_stride"), py::arg("index"), py::arg("rows"), py::arg("heads"), py::arg("head_dim"), py::arg("out_k"),
      py::arg("out_v"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace rlkernel::bind
