// The Python signatures of the value loss kernels: flat arguments in the order of the structs of value_loss.h.
#pragma once
#include "rlkernel/bind.h"
#include "rlkernel/value_loss.h"

namespace rlkernel::bind {

template <class Launch, class Describe>
void value_loss_forward(py::module_& m, const char* name, Launch launch, Describe describe) {
  m.def(
      name,
      [=](Address values, Address returns, Address old_values, int dtype, int other_dtype, Address mask, int64_t values_stride,
          int64_t returns_stride, int64_t old_stride, int64_t mask_stride, int64_t rows, int64_t length, Address cu_seqlens,
          int offset_bytes, float cliprange, float huber_delta, int unit, Address items, double item_count, double factor,
          Address slope, Address partials, Address scale, Address loss, Address metrics, Address stream) {
        const ValueLossForward arguments{pointer<const void>(values),
                                         pointer<const void>(returns),
                                         pointer<const void>(old_values),
                                         static_cast<Dtype>(dtype),
                                         static_cast<Dtype>(other_dtype),
                                         pointer<const uint8_t>(mask),
                                         values_stride,
                                         returns_stride,
                                         old_stride,
                                         mask_stride,
                                         {rows, length, pointer<const void>(cu_seqlens), offset_bytes},
                                         cliprange,
                                         huber_delta,
                                         static_cast<Unit>(unit),
                                         pointer<const float>(items),
                                         item_count,
                                         factor,
                                         pointer<float>(slope),
                                         pointer<ValueSums>(partials),
                                         pointer<float>(scale),
                                         pointer<float>(loss),
                                         pointer<float>(metrics)};
        check(name, launch(arguments, pointer<void>(stream)), describe);
      },
      py::arg("values"), py::arg("returns"), py::arg("old_values"), py::arg("dtype"), py::arg("other_dtype"), py::arg("mask"),
      py::arg("values_stride"), py::arg("returns_stride"), py::arg("old_stride"), py::arg("mask_stride"), py::arg("rows"),
      py::arg("length"), py::arg("cu_seqlens"), py::arg("offset_bytes"), py::arg("cliprange"), py::arg("huber_delta"),
      py::arg("unit"), py::arg("items"), py::arg("item_count"), py::arg("factor"), py::arg("slope"), py::arg("partials"),
      py::arg("scale"), py::arg("loss"), py::arg("metrics"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());
}

template <class Launch, class Describe>
void value_loss_backward(py::module_& m, const char* name, Launch launch, Describe describe) {
  m.def(
      name,
      [=](Address grad_loss, Address slope, Address scale, int64_t rows, int64_t length, Address cu_seqlens, int offset_bytes,
          Address out, int out_dtype, Address stream) {
        const ValueLossBackward arguments{pointer<const float>(grad_loss),
                                          pointer<const float>(slope),
                                          pointer<const float>(scale),
                                          {rows, length, pointer<const void>(cu_seqlens), offset_bytes},
                                          pointer<void>(out),
                                          static_cast<Dtype>(out_dtype)};
        check(name, launch(arguments, pointer<void>(stream)), describe);
      },
      py::arg("grad_loss"), py::arg("slope"), py::arg("scale"), py::arg("rows"), py::arg("length"), py::arg("cu_seqlens"),
      py::arg("offset_bytes"), py::arg("out"), py::arg("out_dtype"), py::arg("stream"),
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace rlkernel::bind
