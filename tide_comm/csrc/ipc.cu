// Symmetric memory where POSIX descriptors do not work: cudaMalloc and CUDA IPC handles. The current device is the caller's.
#include <cstring>

#include "api.h"
#include "driver.h"

using namespace tide;

static_assert(sizeof(cudaIpcMemHandle_t) == 64, "the size of a handle is repeated in engine/cuda/allocations.py");

extern "C" {

// Allocates `bytes`, zeroed, and writes a handle of 64 bytes that another process opens.
int tide_ipc_create(uint64_t bytes, uint64_t *address, void *handle) {
  void *made = nullptr;
  if (int e = int(cudaMalloc(&made, bytes))) return fail(1, "cudaMalloc of %lu bytes: error %d", (unsigned long)bytes, e);
  // A handle stands for the whole allocation: peers would be off if ours were a part of one.
  const auto range = reinterpret_cast<decltype(&cuMemGetAddressRange)>(driver_call("cuMemGetAddressRange", 12000));
  CUdeviceptr start = 0;
  size_t size = 0;
  cudaIpcMemHandle_t exported;
  int code = 0;
  if (!range) code = 2;
  else if (CUresult e = range(&start, &size, CUdeviceptr(made))) code = fail(2, "cuMemGetAddressRange: error %d", int(e));
  else if (start != CUdeviceptr(made)) code = fail(2, "cudaMalloc gave a part of a larger allocation, which CUDA IPC cannot share alone");
  // Before anybody else can have it: a word that a peer has raised must not be cleared.
  else if (cudaMemset(made, 0, bytes) || cudaDeviceSynchronize()) code = fail(3, "clearing the arena failed");
  else if (int e = int(cudaIpcGetMemHandle(&exported, made))) code = fail(4, "cudaIpcGetMemHandle: error %d", e);
  if (code) {
    cudaFree(made);
    return code;
  }
  memcpy(handle, &exported, sizeof exported);
  *address = reinterpret_cast<uint64_t>(made);
  return 0;
}

// Maps what another process made. The handle must not be this process's own.
int tide_ipc_open(const void *handle, uint64_t *address) {
  cudaIpcMemHandle_t theirs;
  memcpy(&theirs, handle, sizeof theirs);
  void *mapped = nullptr;
  if (int e = int(cudaIpcOpenMemHandle(&mapped, theirs, cudaIpcMemLazyEnablePeerAccess))) {
    cudaGetLastError();  // or the next launch would report it
    return fail(5, "cudaIpcOpenMemHandle: error %d", e);
  }
  *address = reinterpret_cast<uint64_t>(mapped);
  return 0;
}

int tide_ipc_close(uint64_t address) {
  if (int e = int(cudaIpcCloseMemHandle(reinterpret_cast<void *>(address)))) return fail(6, "cudaIpcCloseMemHandle: error %d", e);
  return 0;
}

// Not before every peer has closed it.
int tide_ipc_free(uint64_t address) {
  if (int e = int(cudaFree(reinterpret_cast<void *>(address)))) return fail(7, "cudaFree: error %d", e);
  return 0;
}

}  // extern "C"
