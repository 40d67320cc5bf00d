// How Python calls a kernel: by keywords, each of which is a field of the op's struct of arguments, so that a field is written
// once, with its type. The struct's `run` says what each buffer must hold, and launches.
//
//   _C.<part>.<kernel>(stream=0, /, *, <field>=...)
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "rlkernel/fields.h"
#include "rlkernel/names.h"
#include "rlkernel/tensor.h"

namespace rlkernel::bind {

struct NamedKernel {
  const char* name;
  int32_t device;  // DLPack's kind: where its tensors are
  const char* (*describe)(int);
  PyMethodDef method;
  std::string signature;
};

template <class Launch>
struct Kernel : NamedKernel {
  Launch launch;
};

// The names of an enum, interned: Python's literals are the same objects.
inline std::vector<PyObject*> interned(const std::string& names) {
  std::vector<PyObject*> found;
  for (size_t start = 0; start < names.size();) {
    const size_t comma = std::min(names.find(',', start), names.size());
    const size_t first = names.find_first_not_of(" \n", start);
    found.push_back(PyUnicode_InternFromString(names.substr(first, comma - first).c_str()));
    start = comma + 1;
  }
  return found;
}

template <class Enum>
const std::vector<PyObject*>& names_in_python() {
  static const std::vector<PyObject*> names = interned(names_of(Enum{}));
  return names;
}

inline bool equal(PyObject* a, PyObject* b) { return a == b || PyUnicode_Compare(a, b) == 0; }

struct Visitor {
  template <class T>
  void operator()(const char*, T&) const {}
};

// Reads one argument or one field of a record after the other.
class Reader {
 public:
  Reader(const char* kernel, int32_t device) : kernel_(kernel), device_(device) {}

  void read(const char* name, PyObject* object, Tensor& out) {
    if (!PyObject_TypeCheck(object, torch().tensor)) refuse(name, "a tensor", object);
    out.call(kernel_, name);
    out.read(device_, object);
    if (first_ == nullptr) first_ = &out;
    else out.on_device_of(*first_);
  }

  void read(const char* name, PyObject* object, Optional& out) {
    out.call(kernel_, name);
    if (object != Py_None) read(name, object, static_cast<Tensor&>(out));
  }

  template <class T>
  void read(const char* name, PyObject* object, Each<T>& out) {
    if (PyFloat_Check(object) || PyLong_Check(object)) read(name, object, out.all);
    else read(name, object, out.rows);
  }

  void read(const char* name, PyObject* object, bool& out) {
    if (!PyBool_Check(object)) refuse(name, "a bool", object);
    out = object == Py_True;
  }

  void read(const char* name, PyObject* object, double& out) {
    if (!PyFloat_Check(object) && !PyLong_Check(object)) refuse(name, "a number", object);
    out = PyFloat_AsDouble(object);
    if (out == -1 && PyErr_Occurred()) throw py::error_already_set();
  }

  void read(const char* name, PyObject* object, float& out) {
    double wide;
    read(name, object, wide);
    out = static_cast<float>(wide);
  }

  void read(const char* name, PyObject* object, int64_t& out) {
    if (!PyLong_Check(object)) refuse(name, "an int", object);
    out = PyLong_AsLongLong(object);
    if (out == -1 && PyErr_Occurred()) throw py::error_already_set();
  }

  void read(const char* name, PyObject* object, uint32_t& out) {
    int64_t wide;
    read(name, object, wide);
    if (wide < 0 || wide > std::numeric_limits<uint32_t>::max()) refuse(name, "an int of 32 bits", object);
    out = static_cast<uint32_t>(wide);
  }

  // By its name; in a rule by its number, whose names are compared when the kernels are loaded.
  template <class Enum, std::enable_if_t<std::is_enum_v<Enum>, int> = 0>
  void read(const char* name, PyObject* object, Enum& out) {
    const auto& names = names_in_python<Enum>();
    if (PyUnicode_Check(object)) {
      for (size_t i = 0; i < names.size(); ++i)
        if (equal(names[i], object)) return void(out = static_cast<Enum>(i));
    } else {
      int64_t number;
      read(name, object, number);
      if (number >= 0 && number < static_cast<int64_t>(names.size())) return void(out = static_cast<Enum>(number));
    }
    refuse(name, std::string("one of ") + names_of(Enum{}), object);
  }

  template <class T, int most>
  void read(const char* name, PyObject* object, Several<T, most>& out) {
    if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) < 1 || PyTuple_GET_SIZE(object) > most)
      refuse(name, "a tuple of 1 to " + std::to_string(most), object);
    out.count = static_cast<int>(PyTuple_GET_SIZE(object));
    for (int i = 0; i < out.count; ++i) read(name, PyTuple_GET_ITEM(object, i), out.items[i]);
  }

  // A NamedTuple whose fields are the struct's, name for name: compared once for each type.
  template <class Struct, class = decltype(each_field(std::declval<Struct&>(), Visitor{}))>
  void read(const char* name, PyObject* object, Struct& out) {
    static PyTypeObject* known = nullptr;
    if (Py_TYPE(object) != known) {
      compare_fields<Struct>(name, object);
      Py_INCREF(Py_TYPE(object));
      known = Py_TYPE(object);
    }
    Py_ssize_t i = 0;
    each_field(out, [&](const char* field, auto& value) { read(field, PyTuple_GET_ITEM(object, i++), value); });
  }

 private:
  template <class Struct>
  void compare_fields(const char* name, PyObject* object) {
    const py::object fields = py::getattr(py::type::handle_of(object), "_fields", py::none());
    if (!PyTuple_Check(object) || !PyTuple_Check(fields.ptr())) refuse(name, "a NamedTuple", object);
    std::string ours, theirs;
    Struct sample{};
    each_field(sample, [&](const char* field, auto&) { ours += std::string(ours.empty() ? "" : " ") + field; });
    for (const py::handle field : fields) theirs += (theirs.empty() ? "" : " ") + field.cast<std::string>();
    if (ours != theirs)
      throw std::invalid_argument(std::string(kernel_) + ": " + name + " must have the fields " + ours + ", got " + theirs);
  }

  [[noreturn]] void refuse(const char* name, const std::string& wanted, PyObject* got) {
    throw py::type_error(std::string(kernel_) + ": " + name + " must be " + wanted + ", got " +
                         py::repr(got).cast<std::string>());
  }

  const char* kernel_;
  int32_t device_;
  const Tensor* first_ = nullptr;
};

// Structs that several kernels start with: their fields are keywords too.
template <class T, class = void>
struct IsShared : std::false_type {};
template <class T>
struct IsShared<T, std::void_t<typename T::shared_fields>> : std::true_type {};

template <class Call, class Visit>
void each_keyword(Call& call, Visit&& visit) {
  each_field(call, [&](const char* name, auto& field) {
    if constexpr (IsShared<std::decay_t<decltype(field)>>::value) each_keyword(field, visit);
    else visit(name, field);
  });
}

// Python's type of a field.
inline const char* annotation(const Optional&) { return "Tensor | None"; }
inline const char* annotation(const Tensor&) { return "Tensor"; }
inline const char* annotation(bool) { return "bool"; }
inline const char* annotation(float) { return "float"; }
inline const char* annotation(double) { return "float"; }
inline const char* annotation(int64_t) { return "int"; }
inline const char* annotation(uint32_t) { return "int"; }
inline const char* annotation(const Each<float>&) { return "float | Tensor"; }
inline const char* annotation(const Each<double>&) { return "float | Tensor"; }
inline const char* annotation(const Each<int64_t>&) { return "int | Tensor"; }
template <class Enum, std::enable_if_t<std::is_enum_v<Enum>, int> = 0>
const char* annotation(Enum) {
  return "str";
}

// What does not follow from the kernel is a function of its own, here and below: a copy for every field of every kernel would take
// most of the time to compile.
inline void add_keyword(std::vector<PyObject*>& names, const char* field) { names.push_back(PyUnicode_InternFromString(field)); }
inline void add_annotation(std::string& text, const char* field, const char* type) {
  text.append(", ").append(field).append(": ").append(type);
}

template <class Call>
const std::vector<PyObject*>& keywords() {
  static const std::vector<PyObject*> names = [] {
    std::vector<PyObject*> found;
    Call sample{};
    each_keyword(sample, [&](const char* field, auto&) { add_keyword(found, field); });
    return found;
  }();
  return names;
}

template <class Call>
std::string signature() {
  std::string text = "(stream: int = 0, /, *";
  Call sample{};
  each_keyword(sample, [&](const char* field, auto& value) { add_annotation(text, field, annotation(value)); });
  return text + ") -> None";
}

[[noreturn]] inline void refuse_keywords(const char* kernel, const std::vector<PyObject*>& wanted, PyObject* given) {
  const auto text = [](auto begin, auto end) {
    std::string names;
    for (; begin != end; ++begin) names += (names.empty() ? "" : ", ") + py::str(*begin).cast<std::string>();
    return names;
  };
  const py::tuple got = given != nullptr ? py::reinterpret_borrow<py::tuple>(given) : py::tuple();
  throw py::type_error(std::string(kernel) + " takes the keywords " + text(wanted.begin(), wanted.end()) + ", got " +
                       text(got.begin(), got.end()));
}

// What Python handed over, by keyword.
class Given {
 public:
  Given(const char* kernel, const std::vector<PyObject*>& names, PyObject* const* arguments, Py_ssize_t count, PyObject* given)
      : kernel_(kernel), names_(names), values_(arguments + count), given_(given) {
    if (count > 1 || given == nullptr || PyTuple_GET_SIZE(given) != fields()) refuse_keywords(kernel, names, given);
  }

  // Of the next field.
  PyObject* next() {
    Py_ssize_t at = i_;  // callers mostly keep the order
    if (PyTuple_GET_ITEM(given_, at) != names_[i_])
      for (at = 0; at < fields() && !equal(PyTuple_GET_ITEM(given_, at), names_[i_]);) ++at;
    if (at == fields()) refuse_keywords(kernel_, names_, given_);
    ++i_;
    return values_[at];
  }

 private:
  Py_ssize_t fields() const { return static_cast<Py_ssize_t>(names_.size()); }

  const char* kernel_;
  const std::vector<PyObject*>& names_;
  PyObject* const* values_;
  PyObject* given_;
  Py_ssize_t i_ = 0;
};

template <class Call, class Launch>
int read_and_run(const NamedKernel& kernel, Given& given, void* stream) {
  Call call{};
  Reader reader(kernel.name, kernel.device);
  each_keyword(call, [&](const char* name, auto& out) { reader.read(name, given.next(), out); });
  const py::gil_scoped_release release;
  return call.run(static_cast<const Kernel<Launch>&>(kernel).launch, stream);
}

inline PyObject* invoke_named(const NamedKernel& kernel, const std::vector<PyObject*>& names, PyObject* const* arguments,
                              Py_ssize_t count, PyObject* keywords, int (*run)(const NamedKernel&, Given&, void*)) noexcept {
  try {
    Given given(kernel.name, names, arguments, count, keywords);
    void* stream = count ? PyLong_AsVoidPtr(arguments[0]) : nullptr;
    if (stream == nullptr && PyErr_Occurred()) throw py::error_already_set();
    if (const int error = run(kernel, given, stream))
      throw std::runtime_error(std::string(kernel.name) + ": " + kernel.describe(error));
    Py_RETURN_NONE;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <class Call, class Launch>
PyObject* invoke(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* given) noexcept {
  const auto& kernel = *static_cast<const NamedKernel*>(PyCapsule_GetPointer(self, nullptr));
  return invoke_named(kernel, keywords<Call>(), arguments, count, given, &read_and_run<Call, Launch>);
}

inline void add_function(py::module_& m, NamedKernel& kernel, PyCFunction function) {
  kernel.method = {kernel.name, function, METH_FASTCALL | METH_KEYWORDS, kernel.signature.c_str()};
  const py::capsule self(static_cast<void*>(&kernel));
  m.add_object(kernel.name, py::reinterpret_steal<py::object>(PyCFunction_New(&kernel.method, self.ptr())));
}

template <class Call, class Launch>
void define(py::module_& m, const char* name, int32_t device, Launch launch, const char* (*describe)(int)) {
  auto* kernel = new Kernel<Launch>{{name, device, describe, {}, signature<Call>()}, launch};  // as long as the process
  const auto function = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&invoke<Call, Launch>));
  add_function(m, *kernel, function);
}

}  // namespace rlkernel::bind
