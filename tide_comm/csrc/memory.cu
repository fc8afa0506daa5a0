// Symmetric memory: one cuMemCreate allocation an arena, shared by POSIX file descriptor.
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <mutex>

#include "api.h"
#include "driver.h"

namespace tide {

static thread_local char message[512] = "";

int fail(int code, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(message, sizeof message, format, args);
  va_end(args);
  return code;
}

void *driver_call(const char *name, int version) {
  void *found = nullptr;
  cudaDriverEntryPointQueryResult result;
  cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess || found == nullptr) {
    fail(1, "the CUDA driver has no %s (error %d)", name, int(error));
    return nullptr;
  }
  return found;
}

template <class F>
static bool resolve(const char *name, F *function) {
  // 12.0: every call below has the signature that cuda.h of 12 and 13 declares.
  *function = reinterpret_cast<F>(driver_call(name, 12000));
  return *function != nullptr;
}

const Driver *driver() {
  static Driver table;
  static bool ready = false;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (ready) return &table;
  ready = resolve("cuMemCreate", &table.memCreate) && resolve("cuMemRelease", &table.memRelease) &&
          resolve("cuMemAddressReserve", &table.addressReserve) && resolve("cuMemAddressFree", &table.addressFree) &&
          resolve("cuMemMap", &table.memMap) && resolve("cuMemUnmap", &table.memUnmap) &&
          resolve("cuMemSetAccess", &table.memSetAccess) && resolve("cuMemExportToShareableHandle", &table.memExport) &&
          resolve("cuMemImportFromShareableHandle", &table.memImport) &&
          resolve("cuMemGetAllocationGranularity", &table.granularity) &&
          resolve("cuDeviceGetAttribute", &table.deviceAttribute) &&
          resolve("cuStreamBatchMemOp", &table.streamBatchMemOp);
  return ready ? &table : nullptr;
}

static CUmemAllocationProp properties(const Driver *d, int device, bool rdma) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  int capable = 0;
  d->deviceAttribute(&capable, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device);
  prop.allocFlags.gpuDirectRDMACapable = rdma && capable;
  return prop;
}

int map_memory(const Driver *d, CUmemGenericAllocationHandle handle, uint64_t bytes, int device, uint64_t *address, uint64_t alignment) {
  CUdeviceptr at = 0;
  if (CUresult e = d->addressReserve(&at, bytes, alignment, 0, 0)) return fail(2, "cuMemAddressReserve of %lu bytes: error %d", (unsigned long)bytes, int(e));
  if (CUresult e = d->memMap(at, bytes, 0, handle, 0)) {
    d->addressFree(at, bytes);
    return fail(3, "cuMemMap: error %d", int(e));
  }
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  if (CUresult e = d->memSetAccess(at, bytes, &access, 1)) {
    d->memUnmap(at, bytes);
    d->addressFree(at, bytes);
    return fail(4, "cuMemSetAccess for device %d: error %d (no peer access?)", device, int(e));
  }
  *address = uint64_t(at);
  return 0;
}

}  // namespace tide

using namespace tide;

extern "C" {

const char *tide_error() { return message; }

// The size that an arena of `bytes` takes: a multiple of 2 MiB and of the allocation's granularity.
int tide_arena_bytes(int device, uint64_t bytes, uint64_t *rounded) {
  const Driver *d = driver();
  if (!d) return 1;
  cudaFree(nullptr);  // makes the primary context current
  CUmemAllocationProp prop = properties(d, device, true);
  size_t step = 0;
  if (CUresult e = d->granularity(&step, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)) return fail(2, "cuMemGetAllocationGranularity: error %d", int(e));
  if (step < (2u << 20)) step = 2u << 20;
  *rounded = (bytes + step - 1) / step * step;
  return 0;
}

// Allocates `bytes` (from tide_arena_bytes), zeroed, maps them for `device` and exports a file descriptor that the caller closes.
int tide_arena_create(int device, uint64_t bytes, uint64_t *address, uint64_t *handle, int *fd) {
  const Driver *d = driver();
  if (!d) return 1;
  CUmemGenericAllocationHandle made = 0;
  CUmemAllocationProp prop = properties(d, device, true);
  CUresult e = d->memCreate(&made, bytes, &prop, 0);
  if (e && prop.allocFlags.gpuDirectRDMACapable) {
    prop = properties(d, device, false);
    e = d->memCreate(&made, bytes, &prop, 0);
  }
  if (e) return fail(5, "cuMemCreate of %lu bytes on device %d: error %d", (unsigned long)bytes, device, int(e));
  if (int code = map_memory(d, made, bytes, device, address)) {
    d->memRelease(made);
    return code;
  }
  // Before anybody else can have it: a word that a peer has raised must not be cleared.
  if (cudaMemset(reinterpret_cast<void *>(*address), 0, bytes) || cudaDeviceSynchronize()) return fail(6, "clearing the arena failed");
  if (CUresult x = d->memExport(fd, made, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)) return fail(7, "cuMemExportToShareableHandle: error %d", int(x));
  *handle = made;
  return 0;
}

// Maps a peer's arena of `bytes` for `device`. The file descriptor stays the caller's.
int tide_arena_import(int device, int fd, uint64_t bytes, uint64_t *address, uint64_t *handle) {
  const Driver *d = driver();
  if (!d) return 1;
  CUmemGenericAllocationHandle theirs = 0;
  if (CUresult e = d->memImport(&theirs, reinterpret_cast<void *>(uintptr_t(fd)), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)) {
    return fail(8, "cuMemImportFromShareableHandle: error %d", int(e));
  }
  if (int code = map_memory(d, theirs, bytes, device, address)) {
    d->memRelease(theirs);
    return code;
  }
  *handle = theirs;
  return 0;
}

int tide_arena_free(uint64_t address, uint64_t handle, uint64_t bytes) {
  const Driver *d = driver();
  if (!d) return 1;
  d->memUnmap(CUdeviceptr(address), bytes);
  d->addressFree(CUdeviceptr(address), bytes);
  d->memRelease(CUmemGenericAllocationHandle(handle));
  return 0;
}

}  // extern "C"
