// Starts kernels that Triton compiled by one call of CUDA's driver, for plans that repeat a launch
// (python/torchweld/dispatch/warm/leaf.py). All but addresses is packed once. Triton's launcher takes
// 1.2 to 1.7 us to look at each argument again, and Python 0.1 us to read each address.
#include <cstring>

#include "core/dispatch.h"
#include "python/objects.h"
#if __has_include(<cuda.h>)
#include <cuda.h>
#endif

namespace torchweld {
namespace {

// The driver's own types: the build needs no CUDA.
struct Attribute {
  int id;
  alignas(8) uint32_t value[16];
};
struct Config {
  uint32_t grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  uint32_t count;
};
constexpr int kCooperative = 2, kCluster = 4, kSpread = 5, kSerialization = 6;
constexpr int kInterleaveNone = 0, kPromote128 = 2, kFillZeros = 0, kFillNan = 1;
#if defined(CUDA_VERSION)
static_assert(sizeof(Attribute) == sizeof(CUlaunchAttribute));
static_assert(offsetof(Attribute, value) == offsetof(CUlaunchAttribute, value));
static_assert(sizeof(Config) == sizeof(CUlaunchConfig));
static_assert(offsetof(Config, stream) == offsetof(CUlaunchConfig, hStream));
static_assert(offsetof(Config, count) == offsetof(CUlaunchConfig, numAttrs));
static_assert(kCooperative == CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
static_assert(kCluster == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
static_assert(kSpread == CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE);
static_assert(kSerialization == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
static_assert(kPromote128 == CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
static_assert(kFillNan == CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA);
#endif

constexpr size_t kBytes = 4096, kMapBytes = 128, kParameters = 256;
constexpr int kRank = 5;

struct Driver {
  int (*launch)(const Config*, void* function, void** parameters, void** extra);
  int (*encode)(void* map, int dtype, uint32_t rank, void* address, const uint64_t* sizes,
                const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave,
                int swizzle, int promotion, int fill);
  int version;
};
Driver driver{};

// A tensor as TMA sees it, innermost dimension first.
struct Map {
  int dtype, rank, swizzle, fill;
  uint64_t sizes[kRank], strides[kRank];
  uint32_t box[kRank];
  bool is_small;
};

// A parameter that each call gives: an address, or a number of this size. `map` is its map's or -1.
struct Slot {
  int at, size, map;
};

struct Leaf {
  void* function;
  Config config;
  Attribute attributes[4];
  std::string values;  // of all parameters
  std::vector<int> places;
  std::vector<Slot> slots;
  std::vector<Map> maps;
  uint64_t near;  // addresses below may be offsets in a storage that was freed
  PyObject *check, *twin;
};

// Writes a tensor's map. A driver up to 13.1 marks small tensors wrongly, as CUTLASS and Triton know.
bool encode(const Map& map, uint64_t address, char* to) {
  static const uint32_t steps[kRank] = {1, 1, 1, 1, 1};
  if (driver.encode(to, map.dtype, map.rank, reinterpret_cast<void*>(address), map.sizes,
                    map.strides, map.box, steps, kInterleaveNone, map.swizzle, kPromote128,
                    map.fill) != 0)
    return false;
  if (driver.version <= 13010 && map.is_small) {
    uint64_t word;
    std::memcpy(&word, to + 8, 8);
    word &= ~(uint64_t{1} << 21);
    std::memcpy(to + 8, &word, 8);
  }
  return true;
}

enum class Found { yes, no, error };

// The number of an integer, or the address of a tensor.
Found find_value(const Leaf& leaf, PyObject* given, uint64_t& value) {
  if (PyLong_Check(given)) {
    value = PyLong_AsUnsignedLongLongMask(given);
    return Found::yes;
  }
  void* address;
  if (!is_plain(given) || aoti_torch_get_data_ptr(borrow(given), &address) != 0) return Found::no;
  value = reinterpret_cast<uint64_t>(address);
  if (value >= leaf.near) return Found::yes;
  PyObject* checked = PyObject_CallFunctionObjArgs(leaf.check, given, nullptr);
  Py_XDECREF(checked);
  return checked ? Found::yes : Found::error;
}

// Starts the kernel: (stream, what the slots take). Where the driver refuses, the twin tries again:
// it makes a context for a new thread, and raises Triton's errors.
PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  const Leaf& leaf = *static_cast<Leaf*>(PyCapsule_GetPointer(self, nullptr));
  if (count != static_cast<Py_ssize_t>(leaf.slots.size()) + 1)
    return call_twin(leaf.twin, given, count);
  alignas(kMapBytes) char values[kBytes];
  std::memcpy(values, leaf.values.data(), leaf.values.size());
  for (Py_ssize_t i = 1; i < count; ++i) {
    const Slot& slot = leaf.slots[i - 1];
    uint64_t value;
    const Found found = find_value(leaf, given[i], value);
    if (found == Found::error) return nullptr;
    if (found == Found::no) return call_twin(leaf.twin, given, count);
    if (slot.map < 0)
      std::memcpy(values + slot.at, &value, slot.size);
    else if (!encode(leaf.maps[slot.map], value, values + slot.at))
      return call_twin(leaf.twin, given, count);
  }
  void* parameters[kParameters];
  for (size_t i = 0; i < leaf.places.size(); ++i) parameters[i] = values + leaf.places[i];
  Config config = leaf.config;
  config.stream = PyLong_AsVoidPtr(given[0]);
  PyThreadState* state = PyEval_SaveThread();
  const int failed = driver.launch(&config, leaf.function, parameters, nullptr);
  PyEval_RestoreThread(state);
  if (failed) return call_twin(leaf.twin, given, count);
  Py_RETURN_NONE;
}

void destroy(PyObject* self) {
  auto* leaf = static_cast<Leaf*>(PyCapsule_GetPointer(self, nullptr));
  Py_DECREF(leaf->check);
  Py_DECREF(leaf->twin);
  delete leaf;
}

PyMethodDef definition = define("launch", call);

void add(Leaf& leaf, int id, uint32_t x, uint32_t y = 0, uint32_t z = 0) {
  leaf.attributes[leaf.config.count++] = {id, {x, y, z}};
}

// The numbers of a tuple, which has at most `most`; their count, or -1.
template <class T>
int read_numbers(PyObject* tuple, T* to, Py_ssize_t most) {
  const Py_ssize_t count = PyTuple_Size(tuple);
  for (Py_ssize_t i = 0; i < count && i < most; ++i)
    to[i] = static_cast<T>(PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(tuple, i)));
  return count > most || PyErr_Occurred() ? -1 : static_cast<int>(count);
}

bool read_map(PyObject* told, Leaf& leaf) {
  Map map{};
  int has_nan, element;
  PyObject *sizes, *strides, *box;
  if (!PyArg_ParseTuple(told, "iiipOOO", &map.dtype, &element, &map.swizzle, &has_nan, &sizes,
                        &strides, &box))
    return false;
  map.rank = read_numbers(sizes, map.sizes, kRank);
  if (map.rank < 1 || read_numbers(strides, map.strides, kRank) != map.rank - 1 ||
      read_numbers(box, map.box, kRank) != map.rank)
    return false;
  map.fill = has_nan ? kFillNan : kFillZeros;
  uint64_t last = (map.sizes[0] - 1) * element;
  for (int i = 1; i < map.rank; ++i) last += (map.sizes[i] - 1) * map.strides[i - 1];
  map.is_small = last + 1 < 128 * 1024;
  leaf.maps.push_back(map);
  return true;
}

bool read(PyObject* told, Leaf& leaf) {
  PyObject *function, *values, *places, *slots, *maps;
  int clusters, is_cooperative, is_serialized;
  if (!PyArg_ParseTuple(told, "OIIIippOOOOKOO", &function, &leaf.config.grid[0],
                        &leaf.config.block[0], &leaf.config.shared, &clusters, &is_cooperative,
                        &is_serialized, &values, &places, &slots, &maps, &leaf.near, &leaf.check,
                        &leaf.twin))
    return false;
  leaf.function = PyLong_AsVoidPtr(function);
  leaf.values.assign(PyBytes_AsString(values), PyBytes_Size(values));
  leaf.places.resize(PyTuple_Size(places));
  if (leaf.values.size() > kBytes || leaf.places.size() > kParameters ||
      read_numbers(places, leaf.places.data(), kParameters) < 0)
    return false;
  for (Py_ssize_t i = 0; i < PyTuple_Size(slots); ++i) {
    int slot[3];
    if (read_numbers(PyTuple_GetItem(slots, i), slot, 3) != 3) return false;
    leaf.slots.push_back({slot[0], slot[1], slot[2]});
  }
  for (Py_ssize_t i = 0; i < PyTuple_Size(maps); ++i)
    if (!read_map(PyTuple_GetItem(maps, i), leaf)) return false;
  leaf.config.grid[0] *= clusters;
  for (uint32_t* sizes : {leaf.config.grid, leaf.config.block}) sizes[1] = sizes[2] = 1;
  if (is_serialized) add(leaf, kSerialization, 1);
  if (is_cooperative) add(leaf, kCooperative, 1);
  if (clusters != 1) {
    add(leaf, kCluster, clusters, 1, 1);
    add(leaf, kSpread, 1);
  }
  leaf.config.attributes = leaf.attributes;
  return true;
}

}  // namespace
}  // namespace torchweld

// Takes the addresses of cuLaunchKernelEx and cuTensorMapEncodeTiled, and the driver's version.
TW_EXPORT PyObject* torchweld_use_driver(PyObject* told) {
  using namespace torchweld;
  PyObject *launch, *encode;
  if (!PyArg_ParseTuple(told, "OOi", &launch, &encode, &driver.version)) return nullptr;
  driver.launch = reinterpret_cast<decltype(driver.launch)>(PyLong_AsVoidPtr(launch));
  driver.encode = reinterpret_cast<decltype(driver.encode)>(PyLong_AsVoidPtr(encode));
  Py_RETURN_NONE;
}

// A function that starts a kernel, as `leaf.py` tells it.
TW_EXPORT PyObject* torchweld_make_launch(PyObject* told) {
  using namespace torchweld;
  auto* leaf = new Leaf{};
  if (!read(told, *leaf)) {
    delete leaf;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "a launch has too many parameters");
    return nullptr;
  }
  Py_INCREF(leaf->check);
  Py_INCREF(leaf->twin);
  return make_function(definition, leaf, destroy);
}
