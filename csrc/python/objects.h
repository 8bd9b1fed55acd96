// What functions of this library share: how they find a tensor in Python's object, and their twins.
#pragma once

#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include "bind/tensor.h"

namespace torchweld {

// What Python told at load.
inline Py_ssize_t offset = 0;  // of the at::Tensor in a Python object
inline PyObject *tensor_class, *parameter_class;

inline bool is_plain(PyObject* value) {
  const auto type = reinterpret_cast<PyObject*>(Py_TYPE(value));
  return type == tensor_class || type == parameter_class;
}

// The tensor of a plain object, which keeps it.
inline AtenTensorHandle borrow(PyObject* value) {
  return reinterpret_cast<AtenTensorHandle>(reinterpret_cast<char*>(value) + offset);
}

// A tuple of the arguments; null, with an error, without memory.
inline PyObject* pack(PyObject* const* given, Py_ssize_t count) {
  PyObject* all = PyTuple_New(count);
  for (Py_ssize_t i = 0; all && i < count; ++i) {
    Py_INCREF(given[i]);
    PyTuple_SetItem(all, i, given[i]);
  }
  return all;
}

// Calls what takes the same arguments, of any kind.
inline PyObject* call_twin(PyObject* twin, PyObject* const* given, Py_ssize_t count) {
  PyObject* all = pack(given, count);
  if (!all) return nullptr;
  PyObject* result = PyObject_Call(twin, all, nullptr);
  Py_DECREF(all);
  return result;
}

using Function = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

inline PyMethodDef define(const char* name, Function function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), METH_FASTCALL,
          nullptr};
}

// A function of Python's that keeps `held`, which it gets as the capsule `self`.
inline PyObject* make_function(PyMethodDef& definition, void* held,
                               PyCapsule_Destructor destroy = nullptr) {
  PyObject* self = PyCapsule_New(held, nullptr, destroy);
  PyObject* function = PyCFunction_NewEx(&definition, self, nullptr);
  Py_DECREF(self);
  return function;
}

}  // namespace torchweld
