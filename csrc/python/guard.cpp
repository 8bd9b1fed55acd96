// Calls torch's comparison of tensors, which throws at some that it cannot compare, such as nested
// ones: Python's frames would not catch that, and the process would end.
#include "core/dispatch.h"
#include "python/objects.h"

namespace torchweld {
namespace {

// A bound method of a type in C.
struct Check {
  PyObject *method, *self;
  PyCFunctionWithKeywords function;
};

PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  const auto& check = *static_cast<Check*>(PyCapsule_GetPointer(self, nullptr));
  PyObject* all = pack(given, count);
  if (!all) return nullptr;
  PyObject* result;
  try {
    result = check.function(check.self, all, nullptr);
  } catch (...) {
    PyErr_Clear();
    result = Py_False;
    Py_INCREF(result);
  }
  Py_DECREF(all);
  return result;
}

void destroy(PyObject* capsule) {
  auto* check = static_cast<Check*>(PyCapsule_GetPointer(capsule, nullptr));
  Py_DECREF(check->method);
  delete check;
}

PyMethodDef definition = define("check", call);

}  // namespace
}  // namespace torchweld

// A function with the answer of the method, and False where it throws. None for other callables.
TW_EXPORT PyObject* torchweld_make_check(PyObject* method) {
  using namespace torchweld;
  if (!PyCFunction_Check(method) || PyCFunction_GetFlags(method) != (METH_VARARGS | METH_KEYWORDS))
    Py_RETURN_NONE;
  Py_INCREF(method);
  void* function = reinterpret_cast<void*>(PyCFunction_GetFunction(method));
  return make_function(definition,
                       new Check{method, PyCFunction_GetSelf(method),
                                 reinterpret_cast<PyCFunctionWithKeywords>(function)},
                       destroy);
}
