// What the bindings of every op share: a pointer is an int in Python, an error code an exception.
#pragma once
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

namespace rlkernel::bind {

namespace py = pybind11;
using Address = std::uintptr_t;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

inline void check(const char* name, int error, const char* (*describe)(int)) {
  if (error) throw std::runtime_error(std::string(name) + ": " + describe(error));
}

}  // namespace rlkernel::bind
