// A fiber: a function with a stack of its own, entered and left by switching stacks. On x86-64 by eight instructions,
// elsewhere by ucontext, which saves the signal mask with a system call each time.
#pragma once

#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace rlkernel::emulation {

#if defined(__x86_64__)
extern "C" void rlkernel_switch_stack(void** saved, void* target);
asm(R"(
.text
.type rlkernel_switch_stack,@function
rlkernel_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size rlkernel_switch_stack, .-rlkernel_switch_stack
)");
#endif

class Context {
 public:
  // The thread that runs already.
  Context() = default;

  // Prepares `entry`, which must not return, on a stack.
  void prepare(char* stack, size_t size, void (*entry)()) {
    bottom_ = stack;
    size_ = size;
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack, size);  // a fiber that was abandoned left its frames marked
#endif
#if defined(__x86_64__)
    void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + size) & ~uintptr_t{15});
    *--top = nullptr;  // keeps the stack aligned as after a call
    *--top = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    stack_pointer_ = top;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = size;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#endif
  }

  void switch_to(Context& other) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&fake_stack_, other.bottom_, other.size_);
#endif
#if defined(__x86_64__)
    rlkernel_switch_stack(&stack_pointer_, other.stack_pointer_);
#else
    swapcontext(&context_, &other.context_);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
  }

  // To be called first on a fresh stack; learns where the stack of the thread that started it lies.
  static void entered(Context& from) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &from.bottom_, &from.size_);
#else
    (void)from;
#endif
  }

 private:
  const void* bottom_ = nullptr;
  size_t size_ = 0;
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack_ = nullptr;
#endif
#if defined(__x86_64__)
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_ = {};
#endif
};

}  // namespace rlkernel::emulation
