// A tensor of the caller's and what a kernel may take of it: nothing crosses from Python to a kernel as a bare address. Every
// check raises ValueError, which says the kernel, the argument, what it must be and what it is.
#pragma once
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <type_traits>

#include "rlkernel/dlpack.h"
#include "rlkernel/dtype.h"

namespace rlkernel::bind {

namespace py = pybind11;

// torch.Tensor, what its __torch_dispatch__ is, and the function that reads one: asked of torch once.
struct Torch {
  PyTypeObject* tensor;
  PyObject* dispatch;
  int (*read)(void*, dlpack::Tensor*);
};

inline const Torch& torch() {
  static const Torch found = [] {
    const py::object tensor = py::module_::import("torch").attr("Tensor");
    const py::object capsule = py::getattr(tensor, dlpack::kExchangeAttribute, py::none());
    const auto* api = PyCapsule_IsValid(capsule.ptr(), dlpack::kExchangeCapsule)
                          ? static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kExchangeCapsule))
                          : nullptr;
    while (api != nullptr && api->major > 1) api = api->previous;
    if (api == nullptr || api->major != 1 || api->read == nullptr)
      throw py::import_error("torch must be at least 2.11, this one's torch.Tensor has no " +
                             std::string(dlpack::kExchangeAttribute) + " of DLPack 1");
    const py::object dispatch = tensor.attr("__torch_dispatch__");
    // all live as long as torch
    return Torch{reinterpret_cast<PyTypeObject*>(tensor.inc_ref().ptr()), dispatch.inc_ref().ptr(), api->read};
  }();
  return found;
}

// The dtype of a buffer of T; several elements make one T where T is a struct of doubles.
template <class T>
constexpr dlpack::Type type_of() {
  using Plain = std::remove_const_t<T>;
  if constexpr (std::is_same_v<Plain, uint8_t> || std::is_same_v<Plain, bool>) return {dlpack::kBool, 8, 1};
  else if constexpr (std::is_same_v<Plain, float>) return {dlpack::kFloat, 32, 1};
  else if constexpr (std::is_integral_v<Plain>) return {dlpack::kInt, 8 * sizeof(Plain), 1};
  else return {dlpack::kFloat, 64, 1};
}

inline bool same(dlpack::Type a, dlpack::Type b) { return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes; }

inline std::string text_of(dlpack::Type type) {
  if (type.code == dlpack::kBool) return "bool";
  const char* name = type.code == dlpack::kInt      ? "int"
                     : type.code == dlpack::kUInt   ? "uint"
                     : type.code == dlpack::kFloat  ? "float"
                     : type.code == dlpack::kBfloat ? "bfloat"
                                                    : "another type of bits ";
  return name + std::to_string(type.bits);
}

inline std::string text_of(const int64_t* sizes, int count) {
  std::string text = "[";
  for (int d = 0; d < count; ++d) text += (d ? ", " : "") + std::to_string(sizes[d]);
  return text + "]";
}

inline const char* text_of_device(int32_t device) {
  return device == dlpack::kCpu    ? "the CPU"
         : device == dlpack::kCuda ? "a CUDA device"
         : device == dlpack::kRocm ? "a ROCm device"
                                   : "another kind of device";
}

// An absent one is null to the kernel, as is one without an element.
class Tensor {
 public:
  bool given = false;

  void call(const char* kernel, const char* name) { kernel_ = kernel, name_ = name; }

  void read(int32_t device, PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    // a class that answers operations itself, as fake tensors do, names a device and may have nothing there
    if (type != torch().tensor && py::getattr(py::type::handle_of(object), "__torch_dispatch__").ptr() != torch().dispatch)
      refuse("lie in memory that torch shows", std::string("a ") + type->tp_name);
    if (torch().read(object, &x_) != 0) {
      const std::string reason = py::error_already_set().what();
      refuse("lie in memory that torch shows", reason.substr(0, reason.find('\n')));
    }
    given = true;
    if (x_.device_type != device)
      refuse("be on " + std::string(text_of_device(device)), text_of_device(x_.device_type));
    if (x_.data == nullptr && elements() != 0) refuse("lie in memory that torch shows", "a tensor whose storage was freed");
  }

  // As `read`, of an object whose class is torch's own; false where that would raise.
  bool lent(int32_t device, PyObject* object) {
    if (torch().read(object, &x_) != 0) {
      PyErr_Clear();
      return false;
    }
    given = x_.device_type == device && (x_.data != nullptr || elements() == 0);
    return given;
  }

  void on_device_of(const Tensor& other) const {
    if (x_.device_id != other.x_.device_id)
      refuse("be on device " + std::to_string(other.x_.device_id) + " as " + other.name_ + " is", std::to_string(x_.device_id));
  }

  int rank() const { return x_.ndim; }
  int64_t size(int d) const { return x_.shape[d]; }
  int64_t stride(int d) const { return x_.strides[d]; }
  int64_t last() const { return x_.ndim == 0 ? 1 : x_.shape[x_.ndim - 1]; }
  int64_t elements() const {
    int64_t count = 1;
    for (int d = 0; d < x_.ndim; ++d) count *= x_.shape[d];
    return count;
  }
  int64_t item_bytes() const { return x_.dtype.bits / 8; }
  bool has_shape_of(const Tensor& other) const {
    if (x_.ndim != other.x_.ndim) return false;
    for (int d = 0; d < x_.ndim; ++d)
      if (x_.shape[d] != other.x_.shape[d]) return false;
    return true;
  }
  bool has_strides_of(const Tensor& other) const {
    for (int d = 0; d < x_.ndim; ++d)
      if (x_.strides[d] != other.x_.strides[d]) return false;
    return true;
  }
  bool has_type_of(const Tensor& other) const { return same(x_.dtype, other.x_.dtype); }
  bool holds(dlpack::Type type) const { return given && same(x_.dtype, type); }

  // As torch has it: the strides of a tensor without elements say nothing.
  bool is_dense() const {
    if (elements() == 0) return true;
    int64_t step = 1;
    for (int d = x_.ndim - 1; d >= 0; --d) {
      if (x_.shape[d] != 1 && x_.strides[d] != step) return false;
      step *= x_.shape[d];
    }
    return true;
  }

  // Whether it may be the imaginary part of complex numbers, which torch has as a view of every other number.
  bool is_part_of_complex() const {
    for (int d = 0; d < x_.ndim; ++d)
      if (x_.shape[d] > 1 && x_.strides[d] % 2 != 0) return false;
    return true;
  }

  // Whether each stride is beyond all that the smaller ones reach, so that no two elements have one address.
  // Where there are none, the strides are those of an expanded tensor, as well as any.
  bool is_apart() const {
    if (elements() == 0) return true;
    for (int d = 0; d < x_.ndim; ++d) {
      int64_t reach = 0;
      for (int e = 0; e < x_.ndim; ++e)
        if (e != d && x_.shape[e] > 1 && (x_.strides[e] < x_.strides[d] || (x_.strides[e] == x_.strides[d] && e > d)))
          reach += (x_.shape[e] - 1) * x_.strides[e];
      if (x_.shape[d] > 1 && x_.strides[d] <= reach) return false;
    }
    return true;
  }

  // `count` of T one behind the other, and no more.
  template <class T>
  T* dense(int64_t count) const {
    if (!given) return nullptr;
    want(type_of<T>());
    want_bytes(count * static_cast<int64_t>(sizeof(T)));
    want_dense();
    return static_cast<T*>(data());
  }

  // How many intervals these offsets are of.
  int64_t intervals() const {
    want_rank(1);
    if (x_.shape[0] == 0) refuse("have an element or more", "none");
    return x_.shape[0] - 1;
  }

  // [count + 1], of which the last may be read where that costs nothing: as many elements as that `of` must have.
  const int64_t* offsets(int64_t count, const Tensor& of) const {
    intervals();
    const int64_t* start = dense<const int64_t>(count + 1);
    if (start != nullptr && x_.device_type == dlpack::kCpu && start[count] > of.elements())
      of.refuse("hold the " + std::to_string(start[count]) + " elements of " + name_, std::to_string(of.elements()));
    return start;
  }

  // Of floats of any kind that the kernel knows.
  void* dense_floats(int64_t count) const {
    if (!given) return nullptr;
    dtype();
    want_bytes(count * item_bytes());
    want_dense();
    return data();
  }

  // [rows, length], whatever lies between rows.
  template <class T>
  T* matrix(int64_t rows, int64_t length) const {
    if (!given) return nullptr;
    want(type_of<T>());
    want_matrix(rows, length);
    if (!std::is_const_v<T>) want_apart();
    return static_cast<T*>(data());
  }

  void* matrix_of_floats(int64_t rows, int64_t length) const {
    if (!given) return nullptr;
    dtype();
    want_matrix(rows, length);
    return data();
  }

  int64_t row_stride() const { return given && x_.ndim > 1 ? x_.strides[0] : 0; }

  bool is_float() const {
    return same(x_.dtype, {dlpack::kFloat, 32, 1}) || same(x_.dtype, {dlpack::kFloat, 16, 1}) ||
           same(x_.dtype, {dlpack::kBfloat, 16, 1});
  }

  Dtype dtype() const {
    if (same(x_.dtype, {dlpack::kFloat, 32, 1})) return Dtype::f32;
    if (same(x_.dtype, {dlpack::kFloat, 16, 1})) return Dtype::f16;
    if (same(x_.dtype, {dlpack::kBfloat, 16, 1})) return Dtype::bf16;
    refuse("be float32, float16 or bfloat16", text_of(x_.dtype));
  }

  std::string type_text() const { return text_of(x_.dtype); }

  void* data() const { return static_cast<char*>(x_.data) + x_.byte_offset; }

  void want(dlpack::Type type) const {
    if (!same(x_.dtype, type)) refuse("be " + text_of(type), text_of(x_.dtype));
  }

  void want_bytes(int64_t bytes) const {
    const int64_t held = elements() * item_bytes();
    if (held != bytes) refuse("hold " + std::to_string(bytes) + " bytes", std::to_string(held));
  }

  void want_dense() const {
    if (!is_dense()) refuse("be dense", strides_text());
  }

  // What is written.
  void want_apart() const {
    if (!is_apart()) refuse("hold elements that share no memory", strides_text());
  }

  void want_rank(int rank) const {
    if (x_.ndim != rank) refuse("have " + std::to_string(rank) + " dimensions", std::to_string(x_.ndim));
  }

  void want_shape(std::initializer_list<int64_t> shape) const {
    bool same = x_.ndim == static_cast<int>(shape.size());
    int64_t count = 1;
    for (int d = 0; d < static_cast<int>(shape.size()); ++d) {
      same = same && x_.shape[d] == shape.begin()[d];
      count *= shape.begin()[d];
    }
    if (!same)
      refuse("be " + text_of(shape.begin(), static_cast<int>(shape.size())) + ", " + std::to_string(count * item_bytes()) + " bytes",
             text_of(x_.shape, x_.ndim) + ", " + std::to_string(elements() * item_bytes()) + " bytes");
  }

  [[noreturn]] void refuse_shape_of(const Tensor& other) const {
    refuse("be " + text_of(other.x_.shape, other.x_.ndim) + " as " + other.name_ + " is", text_of(x_.shape, x_.ndim));
  }

  void want_unit_stride() const {
    if (last() > 1 && elements() > 0 && x_.strides[x_.ndim - 1] != 1)
      refuse("have the last stride 1", std::to_string(x_.strides[x_.ndim - 1]));
  }

  [[noreturn]] void refuse(const std::string& wanted, const std::string& got) const { refuse(name_, wanted, got); }

  // A number that is given with this tensor.
  void want_number(const char* name, int64_t number, int64_t least, int64_t most, int64_t step = 1) const {
    if (number >= least && number <= most && number % step == 0) return;
    const std::string multiple = step == 1 ? "" : "a multiple of " + std::to_string(step) + " ";
    refuse(name, "be " + multiple + "from " + std::to_string(least) + " to " + std::to_string(most), std::to_string(number));
  }

 private:
  [[noreturn]] void refuse(const char* name, const std::string& wanted, const std::string& got) const {
    throw std::invalid_argument(std::string(kernel_) + ": " + name + " must " + wanted + ", got " + got);
  }

  std::string strides_text() const { return "strides " + text_of(x_.strides, x_.ndim) + " of shape " + text_of(x_.shape, x_.ndim); }

  void want_matrix(int64_t rows, int64_t length) const {
    want_shape({rows, length});
    want_unit_stride();
  }

  const char *kernel_ = "", *name_ = "";
  dlpack::Tensor x_{};
};

// May be None.
struct Optional : Tensor {};

// A value for each row, or one for all of them.
template <class T>
struct Each {
  Tensor rows;
  T all{};
};

}  // namespace rlkernel::bind
