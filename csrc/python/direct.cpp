// Calls kernels of the bindings from Python without torch's dispatcher, for calls that
// python/torchweld/dispatch/warm/direct.py has found to need nothing of it. It uses CPython's limited
// API and torch's stable ABI, so one library serves every Python and every torch.
#include <cstring>

#include "core/dispatch.h"
#include "python/objects.h"

namespace torchweld {
namespace {

namespace stable = torch::stable::detail;
using Boxed = void (*)(StableIValue*, uint64_t, uint64_t);

constexpr int kMost = 32;  // arguments

// A kernel. `kinds` has a letter for each argument, a small one if it is optional: Tensor,
// Gradient (a tensor that no guard has seen), All (a list of tensors), List of integers, Float, Integer, Bool, String, Dtype.
struct Kernel {
  Boxed run;
  char kinds[kMost + 1];
  int arguments, results;
  bool has_gradients;
  PyObject* twin;  // takes the same arguments, of any kind
};

// What Python told at load.
PyObject *wrap, *count_modes, *has_transforms, *is_negative, *is_without_memory, *dtypes;

bool is_true(PyObject* result) {  // steals it; an error counts as true
  const bool answer = !result || PyObject_IsTrue(result);
  Py_XDECREF(result);
  if (PyErr_Occurred()) PyErr_Clear();
  return answer;
}

Py_ssize_t length_of(PyObject* value) {
  return PyTuple_Check(value) ? PyTuple_Size(value) : PyList_Check(value) ? PyList_Size(value) : -1;
}
PyObject* item_of(PyObject* value, Py_ssize_t i) {
  return PyTuple_Check(value) ? PyTuple_GetItem(value, i) : PyList_GetItem(value, i);
}

bool fits(char kind, PyObject* value) {
  if (value == Py_None) return kind >= 'a';
  switch (kind & ~0x20) {
    case 'T':
      return is_plain(value);
    case 'G':
      if (!is_plain(value)) return false;
      for (PyObject* is_lazy : {is_negative, is_without_memory})
        if (is_true(PyObject_CallMethodObjArgs(value, is_lazy, nullptr))) return false;
      return true;
    case 'A': {
      const Py_ssize_t length = length_of(value);
      for (Py_ssize_t i = 0; i < length; ++i)
        if (!is_plain(item_of(value, i))) return false;
      return length >= 0;
    }
    case 'L': {
      const Py_ssize_t length = length_of(value);
      for (Py_ssize_t i = 0; i < length; ++i)
        if (!PyLong_Check(item_of(value, i))) return false;
      return length >= 0;
    }
    case 'F':
      return PyFloat_Check(value);
    case 'I':
      return PyLong_Check(value) && !PyBool_Check(value);
    case 'B':
      return PyBool_Check(value);
    case 'S':
      return PyUnicode_Check(value);
    default:
      return PyDict_GetItem(dtypes, value) != nullptr;
  }
}

StableIValue box(char kind, PyObject* value) {
  if (kind >= 'a') {
    if (value == Py_None) return stable::from(std::nullopt);
    return stable::from(new StableIValue(box(kind & ~0x20, value)));
  }
  switch (kind) {
    case 'T':
    case 'G': {
      AtenTensorHandle handle;
      TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(borrow(value), &handle));
      return stable::from(handle);
    }
    case 'A':
    case 'L': {
      const Py_ssize_t length = length_of(value);
      StableListHandle list;
      TORCH_ERROR_CODE_CHECK(torch_new_list_reserve_size(length, &list));
      for (Py_ssize_t i = 0; i < length; ++i) {
        PyObject* item = item_of(value, i);
        const StableIValue boxed =
            kind == 'A' ? box('T', item)
                        : stable::from(static_cast<int64_t>(PyLong_AsLongLong(item)));
        TORCH_ERROR_CODE_CHECK(torch_list_push_back(list, boxed));
      }
      return stable::from(list);
    }
    case 'F':
      return stable::from(PyFloat_AsDouble(value));
    case 'I':
      return stable::from(static_cast<int64_t>(PyLong_AsLongLong(value)));
    case 'B':
      return stable::from(value == Py_True);
    case 'S': {
      Py_ssize_t length = 0;
      const char* text = PyUnicode_AsUTF8AndSize(value, &length);
      return stable::from(std::string(text, length));
    }
    default:
      return stable::from(static_cast<ScalarType>(PyLong_AsLong(PyDict_GetItem(dtypes, value))));
  }
}

// Whether the kernel may run: the arguments have its types, and nothing of torch is to see the
// call. The guards of a forward call have answered the second question.
bool is_direct(const Kernel& kernel, PyObject* const* given, Py_ssize_t count) {
  if (count != kernel.arguments) return false;
  for (Py_ssize_t i = 0; i < count; ++i)
    if (!fits(kernel.kinds[i], given[i])) return false;
  return !kernel.has_gradients || (!is_true(PyObject_CallNoArgs(count_modes)) &&
                                   !is_true(PyObject_CallNoArgs(has_transforms)));
}

// The results as Python's tensors, wrapped in one call; a single one without a tuple.
PyObject* unbox(const StableIValue* stack, int count) {
  if (count == 0) Py_RETURN_NONE;
  PyObject* handles = PyList_New(count);
  for (int i = 0; i < count; ++i)
    PyList_SetItem(handles, i,
                   PyCapsule_New(stable::to<AtenTensorHandle>(stack[i]), nullptr, nullptr));
  PyObject* made = PyObject_CallFunctionObjArgs(wrap, handles, nullptr);
  Py_DECREF(handles);
  if (!made) return nullptr;
  PyObject* result = count == 1 ? PyList_GetItem(made, 0) : PyList_AsTuple(made);
  if (count == 1) Py_INCREF(result);
  Py_DECREF(made);
  return result;
}

PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  const Kernel& kernel = *static_cast<Kernel*>(PyCapsule_GetPointer(self, nullptr));
  if (!is_direct(kernel, given, count)) return call_twin(kernel.twin, given, count);
  StableIValue stack[kMost];
  std::string fault;
  try {
    for (Py_ssize_t i = 0; i < count; ++i) stack[i] = box(kernel.kinds[i], given[i]);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  PyThreadState* state = PyEval_SaveThread();
  try {
    kernel.run(stack, count, kernel.results);
  } catch (const std::exception& error) {
    fault = error.what();
    if (fault.empty()) fault = "the kernel failed";
  }
  PyEval_RestoreThread(state);
  if (fault.empty()) return unbox(stack, kernel.results);
  // Gradients that autograd has batched (is_grads_batched) have no memory; the dispatcher serves them.
  if (kernel.has_gradients) return call_twin(kernel.twin, given, count);
  PyErr_SetString(PyExc_RuntimeError, fault.c_str());
  return nullptr;
}

PyMethodDef definition = define("kernel", call);

}  // namespace
}  // namespace torchweld

// Takes what the calls need to know; returns the offset of a tensor's at::Tensor, or None.
TW_EXPORT PyObject* torchweld_prepare(PyObject* told) {
  using namespace torchweld;
  PyObject *example, *address;
  Py_ssize_t size;
  if (!PyArg_ParseTuple(told, "OOOOnOOOOOO", &tensor_class, &parameter_class, &example, &address,
                        &size, &wrap, &count_modes, &has_transforms, &is_negative,
                        &is_without_memory, &dtypes))
    return nullptr;
  Py_INCREF(told);  // and with it all that it holds
  void* const wanted = PyLong_AsVoidPtr(address);
  for (offset = sizeof(PyObject); offset + 8 <= size; offset += 8) {
    void* found;
    std::memcpy(&found, reinterpret_cast<char*>(example) + offset, sizeof(found));
    if (found == wanted) return PyLong_FromSsize_t(offset);
  }
  Py_RETURN_NONE;
}

// A function that calls the kernel at an address: (address, kinds, results, twin).
TW_EXPORT PyObject* torchweld_make_call(PyObject* told) {
  using namespace torchweld;
  PyObject *address, *twin;
  const char* kinds;
  int results;
  if (!PyArg_ParseTuple(told, "OsiO", &address, &kinds, &results, &twin)) return nullptr;
  const size_t count = std::strlen(kinds);
  if (count > kMost || results > kMost) {
    Py_INCREF(twin);
    return twin;
  }
  Py_INCREF(twin);  // kernels live as long as the process
  auto* kernel = new Kernel{reinterpret_cast<Boxed>(PyLong_AsVoidPtr(address)),
                            {},
                            static_cast<int>(count),
                            results,
                            std::strpbrk(kinds, "Gg") != nullptr,
                            twin};
  std::memcpy(kernel->kinds, kinds, count + 1);
  return make_function(definition, kernel);
}
