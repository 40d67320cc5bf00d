// The product of a gated MLP. An element's bits are its own: the last vector of a row is computed as the others are, and
// nothing depends on the threads or the instruction set.
#define RLKERNEL_FUSED
#include "rlkernel/swiglu/terms.h"

#include "vectors.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

struct Vector {
  using F = Floats;
  using W = Bits;
  static F of(float x) { return broadcast(x); }
  static F fma(F a, F b, F c) { return fused::fma(a, b, c); }
};

// Calls body with the function from x to the activated x and its slope.
template <class Body>
void with_activation(Activation activation, Body body) {
  switch (activation) {
    case Activation::silu: return body([](Floats x) { return swiglu::silu<Vector>(x); });
    case Activation::gelu: return body([](Floats x) { return swiglu::gelu<Vector>(x); });
    case Activation::gelu_tanh: return body([](Floats x) { return swiglu::gelu_tanh<Vector>(x); });
  }
}

constexpr int64_t kPiece = 1 << 12;  // elements that a thread takes at a time

// Calls body(row, first, end) for pieces of all rows.
template <class Body>
void each_piece(int64_t rows, int64_t length, Body body) {
  const int64_t pieces = (length + kPiece - 1) / kPiece;
#pragma omp parallel for schedule(static) if (rows * length >= kParallel)
  for (int64_t i = 0; i < rows * pieces; ++i) {
    const int64_t r = i / pieces, first = i % pieces * kPiece;
    body(r, first, first + kPiece < length ? first + kPiece : length);
  }
}

template <class T>
T* at(const StridedRows& rows, int64_t r, int64_t i) {
  return rows.start == nullptr ? nullptr : row_at<T>(rows, r) + i;
}

// Calls body with std::true_type or std::false_type: a branch for every vector would show.
template <class Body>
void with_flag(bool flag, Body body) {
  if (flag) body(std::true_type{});
  else body(std::false_type{});
}

template <class T, class Activate>
void forward(SwigluForward f, Activate activate) {
  if (lie_dense(f.gate, f.rows, f.length) && lie_dense(f.up, f.rows, f.length) && lie_dense(f.product, f.rows, f.length))
    f.length *= f.rows, f.rows = f.rows > 0;
  each_piece(f.rows, f.length, [&](int64_t r, int64_t first, int64_t end) {
    const T *gate = at<T>(f.gate, r, first), *up = at<T>(f.up, r, first);
    T* product = at<T>(f.product, r, first);
    with_flag(up != nullptr, [&](auto gated) {
      with_flag(f.round_first, [&](auto round_first) {
        each_vector(end - first, [&](int64_t i, int count) {
          Floats y = activate(load(gate + i, count)).value;
          if constexpr (gated) {
            if constexpr (round_first) y = rounded<T>(y);
            y *= load(up + i, count);
          }
          store(product + i, y, count);
        });
      });
    });
  });
}

template <class T, class Activate>
void backward(SwigluBackward b, Activate activate) {
  const auto dense = [&](const StridedRows& rows) { return lie_dense(rows, b.rows, b.length); };
  if (dense(b.gate) && dense(b.up) && dense(b.grad) && dense(b.grad_gate) && dense(b.grad_up))
    b.length *= b.rows, b.rows = b.rows > 0;
  each_piece(b.rows, b.length, [&](int64_t r, int64_t first, int64_t end) {
    const T *gate = at<T>(b.gate, r, first), *up = at<T>(b.up, r, first), *grad = at<T>(b.grad, r, first);
    T *grad_gate = at<T>(b.grad_gate, r, first), *grad_up = at<T>(b.grad_up, r, first);
    with_flag(up != nullptr && grad_gate != nullptr && grad_up != nullptr, [&](auto all) {
      with_flag(b.round_first, [&](auto round_first) {
        const auto as_held = [&](Floats x) { return round_first ? rounded<T>(x) : x; };
        each_vector(end - first, [&](int64_t i, int count) {
          const auto [value, slope] = activate(load(gate + i, count));
          const Floats g = load(grad + i, count);
          if (all || grad_up != nullptr) store(grad_up + i, g * as_held(value), count);
          if (!all && grad_gate == nullptr) return;
          const Floats of_activated = all || up != nullptr ? as_held(g * load(up + i, count)) : g;
          store(grad_gate + i, of_activated * slope, count);
        });
      });
    });
  });
}

}  // namespace

int swiglu_forward(const SwigluForward& f) {
  with_type(f.dtype, [&](auto type) {
    with_activation(f.activation, [&](auto activate) { forward<decltype(type)>(f, activate); });
  });
  return 0;
}

int swiglu_backward(const SwigluBackward& b) {
  with_type(b.dtype, [&](auto type) {
    with_activation(b.activation, [&](auto activate) { backward<decltype(type)>(b, activate); });
  });
  return 0;
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
