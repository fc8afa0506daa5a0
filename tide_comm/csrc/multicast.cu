// Whether this process's GPU can make a multicast object. On hosts where multicast does harm it is switched off by environment variables;
// nothing here gets near the driver while one of them is set.
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <strings.h>

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
};

template <class F> static bool find(const char *name, F *function) {
  *function = reinterpret_cast<F>(driver_call(name, 12010));  // 12.1: the first that has them
  return *function != nullptr;
}

// With memory bound to it, over one device.
static int make_and_free(const Driver *d, const Multicast &m, int device) {
  CUmulticastObjectProp prop{};
  prop.numDevices = 1;
  prop.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  prop.size = 2u << 20;
  size_t bytes = 0;
  if (CUresult e = m.granularity(&bytes, &prop, CU_MULTICAST_GRANULARITY_RECOMMENDED)) return fail(4, "cuMulticastGetGranularity: error %d", int(e));
  prop.size = bytes;
  CUmemGenericAllocationHandle object = 0, memory = 0;
  if (CUresult e = m.create(&object, &prop)) return fail(5, "cuMulticastCreate: error %d", int(e));
  int code = 0;
  if (CUresult e = m.addDevice(object, device)) code = fail(6, "cuMulticastAddDevice: error %d", int(e));
  if (!code) {
    CUmemAllocationProp own{};
    own.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    own.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    own.location.id = device;
    own.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    if (CUresult e = d->memCreate(&memory, bytes, &own, 0)) code = fail(7, "cuMemCreate: error %d", int(e));
  }
  if (!code) {
    if (CUresult e = m.bindMem(object, 0, memory, 0, bytes, 0)) code = fail(8, "cuMulticastBindMem: error %d", int(e));
    else if (CUresult x = m.unbind(object, device, 0, bytes)) code = fail(9, "cuMulticastUnbind: error %d", int(x));
  }
  if (memory) d->memRelease(memory);
  d->memRelease(object);
  return code;
}

extern "C" {

// CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED; makes nothing.
int tide_multicast_supported(int device, int *supported) {
  const Driver *d = driver();
  if (!d) return 1;
  if (CUresult e = d->deviceAttribute(supported, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, device)) return fail(2, "cuDeviceGetAttribute: error %d", int(e));
  return 0;
}

// 0: a multicast object over `device` was made, bound and freed. 100: switched off by a variable, nothing was touched. Else what failed.
// For a process of its own: it may hang or crash.
int tide_multicast_probe(int device) {
  if (off_by_environment()) return 100;
  const Driver *d = driver();
  if (!d) return 1;
  if (int e = int(cudaSetDevice(device))) return fail(2, "cudaSetDevice: error %d", e);
  cudaFree(nullptr);  // makes the primary context current
  int supported = 0;
  if (int code = tide_multicast_supported(device, &supported)) return code;
  if (!supported) return fail(3, "the device says that it has no multicast");
  Multicast m;
  if (!find("cuMulticastCreate", &m.create) || !find("cuMulticastAddDevice", &m.addDevice) || !find("cuMulticastBindMem", &m.bindMem) ||
      !find("cuMulticastUnbind", &m.unbind) || !find("cuMulticastGetGranularity", &m.granularity)) {
    return 1;
  }
  return make_and_free(d, m, device);
}

}  // extern "C"
