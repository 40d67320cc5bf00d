// Enums whose names Python has too: declared once, the names follow from the declaration.
#pragma once

// `enum class Name : int { ... }`, numbered from 0, and its names as one text with commas between them.
#define RLKERNEL_ENUM(Name, ...)         \
  enum class Name : int { __VA_ARGS__ }; \
  constexpr const char* names_of(Name) { return #__VA_ARGS__; }

namespace rlkernel {

// Up to `most` of T.
template <class T, int most>
struct Several {
  int count;
  T items[most];
};

}  // namespace rlkernel
