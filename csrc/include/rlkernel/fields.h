// The fields of a struct by name: what Python calls a kernel with, and the rules that it hands over.
#pragma once

#define RLKERNEL_PARENTHESES ()
#define RLKERNEL_EXPAND(...) RLKERNEL_EXPAND3(RLKERNEL_EXPAND3(RLKERNEL_EXPAND3(RLKERNEL_EXPAND3(__VA_ARGS__))))
#define RLKERNEL_EXPAND3(...) RLKERNEL_EXPAND2(RLKERNEL_EXPAND2(RLKERNEL_EXPAND2(RLKERNEL_EXPAND2(__VA_ARGS__))))
#define RLKERNEL_EXPAND2(...) RLKERNEL_EXPAND1(RLKERNEL_EXPAND1(RLKERNEL_EXPAND1(RLKERNEL_EXPAND1(__VA_ARGS__))))
#define RLKERNEL_EXPAND1(...) __VA_ARGS__
#define RLKERNEL_NEXT() RLKERNEL_VISIT
#define RLKERNEL_VISIT(field, ...)     \
  visit(#field, fields_of_this.field); \
  __VA_OPT__(RLKERNEL_NEXT RLKERNEL_PARENTHESES(__VA_ARGS__))

// Calls `visit` with the name of each field and the field. The names must be as many as the struct has fields, or this does
// not compile.
#define RLKERNEL_FIELDS(Struct, ...)                                                                 \
  template <class Visit>                                                                             \
  void each_field(Struct& fields_of_this, Visit&& visit) {                                           \
    [[maybe_unused]] const auto count = [](Struct& all) { [[maybe_unused]] auto& [__VA_ARGS__] = all; }; \
    RLKERNEL_EXPAND(RLKERNEL_VISIT(__VA_ARGS__))                                                     \
  }
