// NVLink multicast: an object over the GPUs of a machine, to which each binds its arena; what is written to its mapping reaches all of them.
// On hosts where making such an object does harm it is switched off by environment variables; nothing here gets near the driver while one
// of them is set.
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <strings.h>
#include <unistd.h>

#include "api.h"
#include "driver.h"

using namespace tide;

// The same rules as `off_by_environment` in engine/cuda/multicast.py: what is not clearly permitted is off.
static bool off_by_environment() {
  if (const char *value = getenv("NCCL_NVLS_ENABLE"); value && *value) {
    char *end = nullptr;
    const long number = strtol(value, &end, 10);
    if (*end || number <= 0) {
      fail(100, "NCCL_NVLS_ENABLE=%s", value);
      return true;
    }
  }
  for (const char *name : {"TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"}) {
    const char *value = getenv(name);
    if (!value || !*value) continue;
    bool permitted = false;
    for (const char *no : {"0", "false", "off", "no"}) permitted = permitted || !strcasecmp(value, no);
    if (!permitted) {
      fail(100, "%s=%s", name, value);
      return true;
    }
  }
  return false;
}

// Its own table, filled only after the check.
struct Multicast {
  decltype(&cuMulticastCreate) create;
  decltype(&cuMulticastAddDevice) addDevice;
  decltype(&cuMulticastBindMem) bindMem;
  decltype(&cuMulticastUnbind) unbind;
  decltype(&cuMulticastGetGranularity) granularity;
  const Driver *driver;
};

template <class F> static bool find(const char *name, F *function) {
  *function = reinterpret_cast<F>(driver_call(name, 12010));  // 12.1: the first that has them
  return *function != nullptr;
}

static Multicast table;
static bool ready = false;
static std::mutex mutex;

// The table; nullptr where multicast is switched off or the driver does not know it, and says so through `fail`.
static const Multicast *allowed() {
  if (off_by_environment()) return nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  if (ready) return &table;
  table.driver = driver();
  ready = table.driver && find("cuMulticastCreate", &table.create) && find("cuMulticastAddDevice", &table.addDevice) &&
          find("cuMulticastBindMem", &table.bindMem) && find("cuMulticastUnbind", &table.unbind) &&
          find("cuMulticastGetGranularity", &table.granularity);
  return ready ? &table : nullptr;
}

// The table if something has been made with it: that must be given back, whatever the variables say by then. Else as `allowed`.
static const Multicast *used() {
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (ready) return &table;
  }
  return allowed();
}

static CUmulticastObjectProp properties(int lanes, uint64_t bytes) {
  CUmulticastObjectProp prop{};
  prop.numDevices = unsigned(lanes);
  prop.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  prop.size = bytes;
  return prop;
}

// 0 after `fail`.
static uint64_t step_of(const Multicast *m, int lanes, uint64_t bytes, CUmulticastGranularity_flags which) {
  const CUmulticastObjectProp prop = properties(lanes, bytes);
  size_t step = 0;
  if (CUresult e = m->granularity(&step, &prop, which)) {
    fail(4, "cuMulticastGetGranularity: error %d", int(e));
    return 0;
  }
  return step;
}

extern "C" {

// CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED; makes nothing.
int tide_multicast_supported(int device, int *supported) {
  const Driver *d = driver();
  if (!d) return 1;
  if (CUresult e = d->deviceAttribute(supported, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, device)) return fail(2, "cuDeviceGetAttribute: error %d", int(e));
  return 0;
}

// The size of an object over `lanes` GPUs that holds `bytes`. The recommended granularity may be hundreds of MiB: it is taken where it costs at
// most an eighth.
int tide_multicast_bytes(int lanes, uint64_t bytes, uint64_t *rounded) {
  const Multicast *m = allowed();
  if (!m) return 100;
  for (const auto which : {CU_MULTICAST_GRANULARITY_RECOMMENDED, CU_MULTICAST_GRANULARITY_MINIMUM}) {
    const uint64_t step = step_of(m, lanes, bytes, which);
    if (!step) return 4;
    *rounded = (bytes + step - 1) / step * step;
    if (*rounded - bytes <= bytes / 8) break;
  }
  return 0;
}

// An object over `lanes` GPUs, of `bytes` (from tide_multicast_bytes), and a file descriptor of it that the caller closes.
int tide_multicast_create(int lanes, uint64_t bytes, uint64_t *object, int *fd) {
  const Multicast *m = allowed();
  if (!m) return 100;
  const CUmulticastObjectProp prop = properties(lanes, bytes);
  CUmemGenericAllocationHandle made = 0;
  if (CUresult e = m->create(&made, &prop)) return fail(5, "cuMulticastCreate of %lu bytes over %d GPUs: error %d", (unsigned long)bytes, lanes, int(e));
  if (CUresult e = m->driver->memExport(fd, made, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)) {
    m->driver->memRelease(made);
    return fail(6, "cuMemExportToShareableHandle of a multicast object: error %d", int(e));
  }
  *object = made;
  return 0;
}

// Another process's object. The file descriptor stays the caller's.
int tide_multicast_import(int fd, uint64_t *object) {
  const Multicast *m = allowed();
  if (!m) return 100;
  CUmemGenericAllocationHandle theirs = 0;
  if (CUresult e = m->driver->memImport(&theirs, reinterpret_cast<void *>(uintptr_t(fd)), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)) {
    return fail(7, "cuMemImportFromShareableHandle of a multicast object: error %d", int(e));
  }
  *object = theirs;
  return 0;
}

// Each GPU once, before any of them binds memory.
int tide_multicast_add(uint64_t object, int device) {
  const Multicast *m = allowed();
  if (!m) return 100;
  if (CUresult e = m->addDevice(object, device)) return fail(8, "cuMulticastAddDevice of GPU %d: error %d", device, int(e));
  return 0;
}

// `memory`: the handle of this GPU's arena, of `bytes` too.
int tide_multicast_bind(uint64_t object, uint64_t memory, uint64_t bytes) {
  const Multicast *m = allowed();
  if (!m) return 100;
  if (CUresult e = m->bindMem(object, 0, memory, 0, bytes, 0)) return fail(9, "cuMulticastBindMem: error %d", int(e));
  return 0;
}

// The address at which `device` reaches all of them; it lies at a multiple of the object's granularity.
int tide_multicast_map(uint64_t object, int device, int lanes, uint64_t bytes, uint64_t *address) {
  const Multicast *m = allowed();
  if (!m) return 100;
  uint64_t step = step_of(m, lanes, bytes, CU_MULTICAST_GRANULARITY_RECOMMENDED);
  if (step && bytes % step) step = step_of(m, lanes, bytes, CU_MULTICAST_GRANULARITY_MINIMUM);
  return step ? map_memory(m->driver, object, bytes, device, address, step) : 4;
}

int tide_multicast_unmap(uint64_t address, uint64_t bytes) {
  const Multicast *m = used();
  if (!m) return 100;
  m->driver->memUnmap(CUdeviceptr(address), bytes);
  m->driver->addressFree(CUdeviceptr(address), bytes);
  return 0;
}

// Gives the object back; `bound`: this GPU's memory is bound to it. No GPU may write to the object's mapping any more.
int tide_multicast_free(uint64_t object, int device, int bound, uint64_t bytes) {
  const Multicast *m = used();
  if (!m) return 100;
  const CUresult e = bound ? m->unbind(object, device, 0, bytes) : CUDA_SUCCESS;
  m->driver->memRelease(object);
  return e ? fail(10, "cuMulticastUnbind: error %d", int(e)) : 0;
}

// The calls above in their order, over one GPU, for a process of its own: it may hang or crash. 0: all went well. 100: switched off by a variable,
// nothing was touched. Else what failed.
int tide_multicast_probe(int device) {
  if (off_by_environment()) return 100;
  if (int e = int(cudaSetDevice(device))) return fail(2, "cudaSetDevice: error %d", e);
  cudaFree(nullptr);  // makes the primary context current
  int supported = 0;
  if (int code = tide_multicast_supported(device, &supported)) return code;
  if (!supported) return fail(3, "the device says that it has no multicast");
  uint64_t bytes = 0, made = 0, object = 0, own = 0, memory = 0, together = 0;
  int fd = -1, own_fd = -1;
  if (int code = tide_multicast_bytes(1, 2u << 20, &bytes)) return code;
  if (int code = tide_arena_create(device, bytes, &own, &memory, &own_fd)) return code;
  close(own_fd);
  int code = tide_multicast_create(1, bytes, &made, &fd);
  if (!code) {
    code = tide_multicast_import(fd, &object);
    close(fd);
    if (!code) code = tide_multicast_add(object, device);
    const bool bound = !code && !(code = tide_multicast_bind(object, memory, bytes));
    if (!code) code = tide_multicast_map(object, device, 1, bytes, &together);
    if (together) tide_multicast_unmap(together, bytes);
    for (const uint64_t handle : {object, made}) {
      const int last = handle ? tide_multicast_free(handle, device, bound && handle == object, bytes) : 0;
      if (!code) code = last;
    }
  }
  tide_arena_free(own, memory, bytes);
  return code;
}

}  // extern "C"
