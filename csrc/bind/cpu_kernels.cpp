// The CPU kernels in use. There is one shared object per instruction set. Python chooses one and
// passes the handles from dlopen.
#include <dlfcn.h>

#include <map>

#include "bind/launch.h"
#include "core/dispatch.h"

// dlsym moved into libc with glibc 2.34. Its old version keeps the library loadable on older
// systems.
#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver dlsym,dlsym@GLIBC_2.2.5");
#elif defined(__aarch64__) && defined(__GLIBC__)
__asm__(".symver dlsym,dlsym@GLIBC_2.17");
#endif

namespace torchweld {
namespace {

void* selected_kernels = nullptr;
void* baseline_kernels = nullptr;

void use_cpu_kernels(int64_t selected, int64_t baseline) {
  selected_kernels = reinterpret_cast<void*>(selected);
  baseline_kernels = reinterpret_cast<void*>(baseline);
}

// Filled while the library is loaded.
std::map<std::string, Boxed>& kept_kernels() {
  static std::map<std::string, Boxed> kept;
  return kept;
}

}  // namespace

void keep_kernel(const char* overload, Boxed kernel) { kept_kernels()[overload] = kernel; }

void* cpu_symbol(const char* name, bool baseline) {
  void* kernels = baseline ? baseline_kernels : selected_kernels;
  STD_TORCH_CHECK(kernels, "no CPU kernels are loaded");
  void* address = dlsym(kernels, name);
  STD_TORCH_CHECK(address, "the CPU kernels have no ", name);
  return address;
}

STABLE_TORCH_LIBRARY_IMPL(torchweld, CompositeExplicitAutograd, m) {
  m.impl("use_cpu_kernels", TORCH_BOX(&use_cpu_kernels));
}

}  // namespace torchweld

// The address of an overload's boxed kernel; null without one. For csrc/python.
TW_EXPORT void* torchweld_find_kernel(const char* overload) {
  const auto& kept = torchweld::kept_kernels();
  const auto found = kept.find(overload);
  return found == kept.end() ? nullptr : reinterpret_cast<void*>(found->second);
}
