// A thread of control with its own stack, registered with ASan and TSan if they are in use.
#pragma once

#include <pthread.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(TW_TSAN)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#endif

// Saves the callee-saved registers on the stack and the stack pointer in *from, then resumes `to`.
extern "C" void emulator_switch(void** from, void* to);

#if defined(__x86_64__)
__asm__(
    ".text\n.globl emulator_switch\n.hidden emulator_switch\n.type emulator_switch,@function\n"
    "emulator_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n");
constexpr int kFrameWords = 8;  // one of them aligns the stack as a call would
constexpr int kReturnWord = 6;
#elif defined(__aarch64__)
__asm__(
    ".text\n.globl emulator_switch\n.hidden emulator_switch\n.type emulator_switch,%function\n"
    "emulator_switch:\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n  ret\n");
constexpr int kFrameWords = 20;
constexpr int kReturnWord = 11;
#else
#error "emulator_switch is written for x86-64 and aarch64"
#endif

namespace emulator {

class Fiber {
 public:
  // The fiber of the running OS thread.
  Fiber() {
#if defined(__SANITIZE_ADDRESS__)
    pthread_attr_t attributes;
    void* bottom = nullptr;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &bottom, &stack_bytes_);
    pthread_attr_destroy(&attributes);
    stack_ = static_cast<char*>(bottom);
#endif
#if defined(TW_TSAN)
    tsan_ = __tsan_get_current_fiber();
#endif
  }

  // A new fiber that will run entry(). entry() never returns.
  explicit Fiber(void (*entry)()) {
    stack_ = static_cast<char*>(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stack_ == MAP_FAILED) std::abort();
#if defined(TW_TSAN)
    tsan_ = __tsan_create_fiber(0);
#endif
    restart(entry);
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Discards the fiber's state, so that it starts over with entry().
  void restart(void (*entry)()) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack_, kStackBytes);
#endif
    uintptr_t* top = reinterpret_cast<uintptr_t*>(stack_ + kStackBytes) - 8;
    uintptr_t* frame = top - kFrameWords;
    for (uintptr_t* word = frame; word < top; ++word) *word = 0;
    frame[kReturnWord] = reinterpret_cast<uintptr_t>(entry);
    sp_ = frame;
    fake_stack_ = nullptr;
  }

  // Resumes `other`, and returns when something switches back. The switch orders no memory
  // accesses: only barriers do.
  void switch_to(Fiber& other) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&fake_stack_, other.stack_, other.stack_bytes_);
#endif
#if defined(TW_TSAN)
    __tsan_switch_to_fiber(other.tsan_, /*no synchronisation*/ 1);
#endif
    emulator_switch(&sp_, other.sp_);
    arrive();
  }

  // A fiber calls this first after a switch; at the start `entry` must call it.
  void arrive() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
  }

#if defined(__SANITIZE_ADDRESS__)
  static constexpr size_t kStackBytes = 256 << 10;
#else
  static constexpr size_t kStackBytes = 64 << 10;
#endif

 private:
  char* stack_ = nullptr;
  size_t stack_bytes_ = kStackBytes;
  void* sp_ = nullptr;
  void* fake_stack_ = nullptr;
#if defined(TW_TSAN)
  void* tsan_ = nullptr;
#endif
};

}  // namespace emulator
