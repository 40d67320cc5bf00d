// What batch_invariant puts in the place of an operation of torch: C++ takes the calls of plain CPU tensors, of which a decoding
// step has hundreds, and Python's function all others. Neither changes a bit of what the other makes.
//
//   function = _C.replaced(op, name=..., otherwise=..., asides=..., ...)        function(keyset, *args, **kwargs), as torch calls it
#pragma once
#include <cmath>
#include <cstddef>

#include "rlkernel/direct.h"

namespace rlkernel::direct {

// Of a call in the dispatcher.
struct Place {
  py::object otherwise;  // Python's function
  py::list asides;       // threads in which torch's operations are its own: those calls are Python's
  py::object used;       // notes the backend for an operation that torch makes of this one
  py::tuple counted;     // how a call is reported: operation and backend
};

// In autograd's place, where nobody has looked yet whether a backward follows or who else looks on.
template <class Call, class = void>
struct IsWhole : std::false_type {};
template <class Call>
struct IsWhole<Call, std::void_t<decltype(Call::kWhole)>> : std::true_type {};

template <class Launch>
struct Replacement {
  Settings settings;
  Place place;
  Launch launch;
  PyMethodDef method;
};

inline void count(const Settings& settings, const Place& place) {
  static PyObject *const calls = name("calls"), *const backend = name("backend");
  const py::tuple& counted = place.counted;
  if (PyObject_SetAttr(place.used.ptr(), backend, PyTuple_GET_ITEM(counted.ptr(), 1)) != 0) throw py::error_already_set();
  PyObject* levels = settings.levels.ptr();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(levels); ++i) {
    const auto counter = py::reinterpret_steal<py::object>(PyObject_GetAttr(PyList_GET_ITEM(levels, i), calls));
    if (!counter) throw py::error_already_set();
    PyObject* before = PyDict_GetItemWithError(counter.ptr(), counted.ptr());
    if (PyDict_SetItem(counter.ptr(), counted.ptr(), py::int_((before ? PyLong_AsLongLong(before) : 0) + 1).ptr()) != 0)
      throw py::error_already_set();
  }
}

template <class Call, class Launch>
py::object taken(const Replacement<Launch>& here, PyObject* args, PyObject* kwargs) {
  if (PyList_GET_SIZE(here.place.asides.ptr()) != 0) return {};
  Caller caller(here.settings);
  Call call{};
  if (!caller.has_own_kernels() || !caller.take_all(args, kwargs, call, 1)) return {};
  if constexpr (IsWhole<Call>::value)
    if (caller.is_of_ranks() || !caller.is_alone() || !caller.is_one_way() || caller.trains()) return {};
  py::object made = call.run(caller, here.launch);
  if (made) count(here.settings, here.place);
  return made;
}

template <class Call, class Launch>
PyObject* replace(PyObject* self, PyObject* args, PyObject* kwargs) noexcept {
  const auto& here = *static_cast<const Replacement<Launch>*>(PyCapsule_GetPointer(self, nullptr));
  try {
    if (py::object made = taken<Call>(here, args, kwargs)) return made.release().ptr();
  } catch (py::error_already_set&) {  // Python's function meets it again
  } catch (const std::exception&) {
  }
  PyErr_Clear();
  return PyObject_Call(here.place.otherwise.ptr(), args, kwargs);
}

template <class Call, class Launch>
py::object define(const char* op, Launch launch, Settings settings, Place place) {
  using Here = Replacement<Launch>;
  // as long as whoever holds the function
  auto* here = new Here{std::move(settings), std::move(place), launch, {}};
  const auto entry = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&replace<Call, Launch>));
  here->method = {op, entry, METH_VARARGS | METH_KEYWORDS, nullptr};
  const py::capsule self(static_cast<void*>(here), [](void* held) { delete static_cast<Here*>(held); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&here->method, self.ptr()));
}

// Elementwise, of so few elements that one thread has them.
constexpr int64_t kFew = 1 << 14;

inline bool is_small(const Plain& x) {
  return x.elements() > 0 && x.elements() <= kFew && x.is_dense() && x.holds(bind::type_of<float>());
}

template <class Formula>
py::object each(const Caller& caller, const Plain& x, Formula formula) {
  Plain out;
  py::object made = caller.empty(x.object, out);
  const auto* from = static_cast<const float*>(x.data());
  auto* to = static_cast<float*>(out.data());
  for (int64_t i = 0, count = x.elements(); i < count; ++i) to[i] = formula(from[i]);
  return made;
}

// The nearest root, and the quotient.
struct rsqrt {
  static constexpr int kPlaces = 1;
  Plain x;

  py::object run(const Caller& caller, std::nullptr_t) const {
    if (!is_small(x)) return {};
    return each(caller, x, [](float v) { return 1 / static_cast<float>(std::sqrt(static_cast<double>(v))); });
  }
};

RLKERNEL_FIELDS(rsqrt, x)

// Squares alone.
struct power {
  static constexpr int kPlaces = 2;
  Plain x;
  int64_t exponent = 0;

  py::object run(const Caller& caller, std::nullptr_t) const {
    if (exponent != 2 || !is_small(x)) return {};
    return each(caller, x, [](float v) { return v * v; });
  }
};

RLKERNEL_FIELDS(power, x, exponent)

}  // namespace rlkernel::direct
