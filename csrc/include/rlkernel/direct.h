// The short way of a public call: from Python's arguments to its result without Python between. It is for plain tensors of a CPU
// where no backward follows and no setting says otherwise; all else is declined, and goes the long way through Python, which also
// words the errors. A small norm takes a microsecond, the long way several.
//
//   function = _C.direct(op, forced=..., ...)        function(args, kwargs) -> the result, or None: declined
#pragma once
#include <cfloat>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <utility>

#include "rlkernel/call.h"

namespace rlkernel::direct {

namespace py = pybind11;

// What Python hands over once, as long as the process: settings that must be at rest, and what is asked of torch.
struct Settings {
  py::object forced, asked;        // context variables: "auto" or these kernels, and None
  py::object last;                 // the backend that ran each op: the first call goes the long way, which chooses it
  py::object emulated;             // other kernels for tensors of a CPU: none
  py::object debug;                // context variable: None where the environment decides
  py::object levels;               // the blocks of batch_invariant
  py::object forward_ad;           // the names of torch.autograd.forward_ad
  py::object is_grad_enabled, empty_like, parameter, contiguous, float32;
  py::object module;               // the backend's, of this op
  py::object has_modes, transforms, traces;  // what else may look on; false, None or 0 where nothing does
  py::object has_function_modes;             // 0 where nobody records a graph of torch's functions
};

inline py::object value_of(const py::object& variable) {
  PyObject* value = nullptr;
  if (PyContextVar_Get(variable.ptr(), nullptr, &value) != 0) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

inline PyObject* name(const char* text) { return PyUnicode_InternFromString(text); }

inline bool is_text(PyObject* object, PyObject* text) { return object == text || (PyUnicode_Check(object) && bind::equal(object, text)); }

// A tensor, and the object that it was read of.
struct Plain : bind::Tensor {
  PyObject* object = nullptr;
  bool needs_gradient = false;
};

// May be None.
struct Maybe : Plain {};

// Only None.
struct Absent {};

// A list of one number.
struct OneNumber {
  bool given = false;
  int64_t number = 0;
};

// A record of Python's.
struct Record {
  PyObject* object = nullptr;

  PyObject* operator[](Py_ssize_t i) const {
    if (object == nullptr || !PyTuple_Check(object) || i >= PyTuple_GET_SIZE(object)) throw std::invalid_argument("no such field");
    return PyTuple_GET_ITEM(object, i);
  }
};

// Makes one, as NamedTuples are made, without the function of Python around it; null is None.
template <class... Fields>
py::object made(PyObject* type, const Fields&... fields) {
  const auto held = [](const py::object& x) { return x ? x : py::none(); };
  const py::tuple arguments = py::make_tuple(py::make_tuple(held(fields)...));
  auto found = py::reinterpret_steal<py::object>(PyTuple_Type.tp_new(reinterpret_cast<PyTypeObject*>(type), arguments.ptr(), nullptr));
  if (!found) throw py::error_already_set();
  return found;
}

inline PyObject* type_named(const char* module, const char* type) {
  return py::object(py::module_::import(module).attr(type)).release().ptr();
}

inline py::object borrowed(PyObject* object) { return py::reinterpret_borrow<py::object>(object == nullptr ? Py_None : object); }

// One call: its settings, and what it makes.
class Caller {
 public:
  explicit Caller(const Settings& settings) : settings_(settings) {}

  bool has_own_kernels() const { return PyList_GET_SIZE(settings_.emulated.ptr()) == 0; }

  bool is_at_rest(PyObject* op) const {
    static PyObject *const automatic = name("auto"), *const native = name("native");
    PyObject* last = PyDict_GetItemWithError(settings_.last.ptr(), op);
    if (last == nullptr || !is_text(last, native) || !has_own_kernels()) return false;
    const py::object forced = value_of(settings_.forced);
    return value_of(settings_.asked).is_none() && (is_text(forced.ptr(), automatic) || is_text(forced.ptr(), native));
  }

  // Whether nobody records torch's operations, among which a kernel does not show.
  bool is_unrecorded() const {
    return says_no(settings_.has_function_modes) && says_no(settings_.traces);
  }

  // Notes whether a backward may follow for some tensor; false where a tangent may.
  bool is_one_way() {
    if (says_no(settings_.is_grad_enabled)) return true;
    if (!has_no_tangents()) return false;
    trains_ = needs_gradient_;
    return true;
  }

  // Whether nothing but autograd looks on: what records or transforms operations gets to see torch's.
  bool is_alone() const {
    return has_no_tangents() && says_no(settings_.has_modes) && says_no(settings_.transforms) && says_no(settings_.traces);
  }

  bool trains() const { return trains_; }

  // Of a call whose backward may follow: what opaque.Op connects with its sources.
  py::object computed(const py::object& call, const py::object& results) const {
    py::list found(3);
    found[0] = settings_.module, found[1] = call, found[2] = results;
    return found;
  }

  bool take(PyObject* object, Plain& out) {
    static PyObject* const requires_grad = name("requires_grad");
    if (Py_TYPE(object) != bind::torch().tensor && reinterpret_cast<PyObject*>(Py_TYPE(object)) != settings_.parameter.ptr())
      return false;
    const auto needs = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, requires_grad));
    out.needs_gradient = needs.ptr() != Py_False;
    needs_gradient_ |= out.needs_gradient;
    out.object = object;
    return out.lent(dlpack::kCpu, object) && !(out.is_part_of_complex() && is_negative(object));
  }

  bool take(PyObject* object, Maybe& out) { return object == Py_None || take(object, static_cast<Plain&>(out)); }
  bool take(PyObject* object, Absent&) { return object == Py_None; }
  bool take(PyObject* object, Record& out) { return out.object = object, true; }
  bool take(PyObject* object, bool& out) {
    out = object == Py_True;
    return PyBool_Check(object);
  }
  bool take(PyObject* object, double& out) {
    if (!PyFloat_CheckExact(object)) return false;
    out = PyFloat_AS_DOUBLE(object);
    return true;
  }
  bool take(PyObject* object, int64_t& out) {
    if (!PyLong_CheckExact(object)) return false;
    int overflow;
    out = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow == 0;
  }
  bool take(PyObject* object, OneNumber& out) {
    if (!PyList_CheckExact(object) || PyList_GET_SIZE(object) != 1) return false;
    return out.given = take(PyList_GET_ITEM(object, 0), out.number);
  }
  template <class Enum, std::enable_if_t<std::is_enum_v<Enum>, int> = 0>
  bool take(PyObject* object, Enum& out) {
    const auto& names = bind::names_in_python<Enum>();
    for (size_t i = 0; i < names.size(); ++i)
      if (is_text(object, names[i])) return out = static_cast<Enum>(i), true;
    return false;
  }

  // The arguments by place, those from `first` on, and by name; the fields that are not given keep what they hold.
  template <class Call>
  bool take_all(PyObject* args, PyObject* kwargs, Call& call, Py_ssize_t first = 0) {
    const auto& names = bind::keywords<Call>();
    const Py_ssize_t places = PyTuple_GET_SIZE(args) - first;
    Py_ssize_t named = kwargs == nullptr ? 0 : PyDict_GET_SIZE(kwargs), i = 0;
    if (places > Call::kPlaces) return false;
    bool taken = true;
    bind::each_keyword(call, [&](const char*, auto& field) {
      PyObject* given = nullptr;
      if (i < places) given = PyTuple_GET_ITEM(args, first + i);
      else if (named > 0 && (given = PyDict_GetItemWithError(kwargs, names[i])) != nullptr) --named;
      ++i;
      if (taken && given != nullptr) taken = take(given, field);
    });
    return taken && named == 0;
  }

  // Dense and empty, of the shape and the dtype of `like`, or of fp32.
  py::object empty(PyObject* like, Plain& out, bool wide = false) const {
    static PyObject* const names = PyTuple_Pack(2, name("memory_format"), name("dtype"));
    static PyObject* const one = PyTuple_Pack(1, name("memory_format"));
    PyObject* arguments[] = {like, settings_.contiguous.ptr(), settings_.float32.ptr()};
    auto made = py::reinterpret_steal<py::object>(PyObject_Vectorcall(settings_.empty_like.ptr(), arguments, 1, wide ? names : one));
    if (!made) throw py::error_already_set();
    return read(made, out);
  }

  // Of this shape, and of the dtype of `like` or of fp32.
  py::object new_empty(PyObject* like, const int64_t* shape, int rank, bool wide, Plain& out) const {
    static PyObject *const method = name("new_empty"), *const names = PyTuple_Pack(1, name("dtype"));
    py::tuple sizes(rank);
    for (int d = 0; d < rank; ++d) sizes[d] = py::int_(shape[d]);
    PyObject* arguments[] = {like, sizes.ptr(), settings_.float32.ptr()};
    auto made = py::reinterpret_steal<py::object>(PyObject_VectorcallMethod(method, arguments, 2, wide ? names : nullptr));
    if (!made) throw py::error_already_set();
    return read(made, out);
  }

  bool is_debugging() const {
    const py::object forced = value_of(settings_.debug);
    if (!forced.is_none()) return !forced.is(py::bool_(false));
    const char* value = std::getenv("RLKERNEL_DEBUG");
    return value != nullptr && *value != '\0' && std::string(value) != "0";
  }

  // Whether it holds for all blocks of batch_invariant.
  template <class Holds>
  bool each_level(Holds holds) const {
    PyObject* levels = settings_.levels.ptr();
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(levels); ++i)
      if (!holds(PyList_GET_ITEM(levels, i))) return false;
    return true;
  }

  bool is_of_ranks() const {
    static PyObject* const level = name("level");
    static PyObject* const batch = name("batch");
    PyObject* levels = settings_.levels.ptr();
    const Py_ssize_t count = PyList_GET_SIZE(levels);
    if (count == 0) return false;
    const auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(PyList_GET_ITEM(levels, count - 1), level));
    return !found || !is_text(found.ptr(), batch);
  }

 private:
  static bool says_no(const py::object& function) {
    const auto found = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(function.ptr()));
    return found && (found.is_none() || found.ptr() == Py_False || (PyLong_CheckExact(found.ptr()) && PyLong_AsLong(found.ptr()) == 0));
  }

  bool has_no_tangents() const {
    static PyObject* const level = name("_current_level");
    PyObject* found = PyDict_GetItemWithError(settings_.forward_ad.ptr(), level);
    return found != nullptr && PyLong_AsLong(found) < 0;
  }

  // What torch negates where it reads it: memory holds other values.
  static bool is_negative(PyObject* object) {
    static PyObject* const method = name("is_neg");
    const auto found = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(object, method));
    return found.ptr() != Py_False;
  }

  py::object read(py::object made, Plain& out) const {
    // a mode of torch's may have made what only looks like a tensor
    if (Py_TYPE(made.ptr()) != bind::torch().tensor || !out.lent(dlpack::kCpu, made.ptr()))
      throw std::invalid_argument("not a plain tensor");
    return made;
  }

  const Settings& settings_;
  bool needs_gradient_ = false, trains_ = false;
};

template <class... Fields>
py::object needs_of(const Fields&... fields) { return py::make_tuple(py::bool_(fields.needs_gradient)...); }

// Of what a norm keeps of each row.
inline py::object of_rows(const Caller& caller, const Plain& x, Plain& out) {
  int64_t shape[64];
  for (int d = 0; d + 1 < x.rank(); ++d) shape[d] = x.size(d);
  return caller.new_empty(x.object, shape, x.rank() - 1, true, out);
}

// Other threads of Python run meanwhile where that pays.
template <class Launch>
void launched(int64_t elements, Launch launch) {
  PyThreadState* state = elements >= (1 << 14) ? PyEval_SaveThread() : nullptr;
  int error = -1;
  std::exception_ptr thrown;
  try {
    error = launch();
  } catch (...) {
    thrown = std::current_exception();
  }
  if (state != nullptr) PyEval_RestoreThread(state);
  if (thrown) std::rethrow_exception(thrown);
  if (error) throw std::runtime_error("the kernel failed");
}

// [..., H] of floats as kernels of rows take them without a copy.
inline bool are_rows(const bind::Tensor& x) {
  return x.given && x.rank() > 0 && x.elements() > 0 && x.is_float() && (x.is_dense() || (x.rank() <= 3 && x.stride(x.rank() - 1) == 1));
}

// The number that these bits of a float16 or a bfloat16 are.
inline float wide_of(const Plain& x, int64_t i) {
  if (x.dtype() == Dtype::f32) return static_cast<const float*>(x.data())[i];
  const uint32_t narrow = static_cast<const uint16_t*>(x.data())[i];
  uint32_t bits = narrow << 16;
  float value;
  if (x.dtype() == Dtype::f16) {
    const uint32_t exponent = narrow >> 10 & 31, fraction = narrow & 1023, sign = (narrow & 0x8000) << 16;
    if (exponent == 0) {
      value = static_cast<float>(fraction) * 0x1p-24f;
      return sign ? -value : value;
    }
    bits = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
  }
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// In fp32; null where nothing is given or it is fp32 already.
inline std::unique_ptr<float[]> widened(const Plain& x) {
  if (!x.given || x.dtype() == Dtype::f32) return nullptr;
  std::unique_ptr<float[]> values(new float[x.elements()]);
  for (int64_t i = 0; i < x.elements(); ++i) values[i] = wide_of(x, i);
  return values;
}

// [H] of floats, or None.
inline bool is_row(const bind::Tensor& x, int64_t length) {
  return !x.given || (x.rank() == 1 && x.size(0) == length && x.is_float() && x.is_dense());
}

// Calls that torch's dispatcher makes, for which neither a backend is chosen nor a backward follows.
template <class Call, class = void>
struct IsBelowAutograd : std::false_type {};
template <class Call>
struct IsBelowAutograd<Call, std::void_t<decltype(Call::kBelowAutograd)>> : std::true_type {};

template <class Call>
bool is_plain(Caller& caller, PyObject* op, PyObject* args, PyObject* kwargs, Call& call) {
  if constexpr (IsBelowAutograd<Call>::value) return caller.has_own_kernels() && caller.take_all(args, kwargs, call);
  else
    return caller.is_at_rest(op) && caller.is_unrecorded() && caller.take_all(args, kwargs, call) && caller.is_one_way() &&
           (Call::kTrains || !caller.trains());
}

template <class Launch>
struct Function {
  Settings settings;
  PyObject* op;
  Launch launch;
  PyMethodDef method;
};

template <class Call, class Launch>
PyObject* invoke(PyObject* self, PyObject* const* arguments, Py_ssize_t count) noexcept {
  if (count == 2 && PyTuple_CheckExact(arguments[0]) && PyDict_CheckExact(arguments[1])) {
    const auto& function = *static_cast<const Function<Launch>*>(PyCapsule_GetPointer(self, nullptr));
    try {
      Caller caller(function.settings);
      Call call{};
      if (is_plain(caller, function.op, arguments[0], arguments[1], call))
        if (py::object made = call.run(caller, function.launch)) return made.release().ptr();
    } catch (py::error_already_set&) {  // the long way meets it again
    } catch (const std::exception&) {
    }
    PyErr_Clear();
  }
  Py_RETURN_NONE;
}

template <class Call, class Launch>
py::object define(const char* op, Launch launch, Settings settings) {
  auto* function = new Function<Launch>{std::move(settings), name(op), launch, {}};  // as long as the process
  const auto entry = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&invoke<Call, Launch>));
  function->method = {op, entry, METH_FASTCALL, nullptr};
  const py::capsule self(static_cast<void*>(function));
  return py::reinterpret_steal<py::object>(PyCFunction_New(&function->method, self.ptr()));
}

}  // namespace rlkernel::direct
