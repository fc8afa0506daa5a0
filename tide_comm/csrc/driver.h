// Driver calls, resolved at run time: the library loads on a machine without a GPU.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace tide {

struct Driver {
  decltype(&cuMemCreate) memCreate;
  decltype(&cuMemRelease) memRelease;
  decltype(&cuMemAddressReserve) addressReserve;
  decltype(&cuMemAddressFree) addressFree;
  decltype(&cuMemMap) memMap;
  decltype(&cuMemUnmap) memUnmap;
  decltype(&cuMemSetAccess) memSetAccess;
  decltype(&cuMemExportToShareableHandle) memExport;
  decltype(&cuMemImportFromShareableHandle) memImport;
  decltype(&cuMemGetAllocationGranularity) granularity;
  decltype(&cuDeviceGetAttribute) deviceAttribute;
  decltype(&cuStreamBatchMemOp) streamBatchMemOp;
};

// The table, or nullptr when there is no driver; says why through `fail`.
const Driver *driver();

// One driver call, with the signature that the driver had in `version` (12000: CUDA 12.0); nullptr where it has none, and says so through `fail`.
void *driver_call(const char *name, int version);

// Maps `handle`'s `bytes` for `device` to read and write, at an address of at least that alignment (0: any that fits). 0, or a code.
int map_memory(const Driver *d, CUmemGenericAllocationHandle handle, uint64_t bytes, int device, uint64_t *address, uint64_t alignment = 0);

// Keeps a message for `tide_error` and returns `code`.
int fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace tide
