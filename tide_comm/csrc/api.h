// What the .cu files give to bindings.cpp. Functions that return int: 0, or a code whose message `tide_error` has (of this thread).
#pragma once
#include <cstdint>

namespace tide {
struct Op;  // executor.cu; its layout is repeated in engine/cuda/records.py
}

extern "C" {

const char *tide_error();

// memory.cu
int tide_arena_bytes(int device, uint64_t bytes, uint64_t *rounded);
int tide_arena_create(int device, uint64_t bytes, uint64_t *address, uint64_t *handle, int *fd);
int tide_arena_import(int device, int fd, uint64_t bytes, uint64_t *address, uint64_t *handle);
int tide_arena_free(uint64_t address, uint64_t handle, uint64_t bytes);

// ipc.cu
int tide_ipc_create(uint64_t bytes, uint64_t *address, void *handle);
int tide_ipc_open(const void *handle, uint64_t *address);
int tide_ipc_close(uint64_t address);
int tide_ipc_free(uint64_t address);

// multicast.cu
int tide_multicast_supported(int device, int *supported);
int tide_multicast_bytes(int lanes, uint64_t bytes, uint64_t *rounded);
int tide_multicast_create(int lanes, uint64_t bytes, uint64_t *object, int *fd);
int tide_multicast_import(int fd, uint64_t *object);
int tide_multicast_add(uint64_t object, int device);
int tide_multicast_bind(uint64_t object, uint64_t memory, uint64_t bytes);
int tide_multicast_map(uint64_t object, int device, int lanes, uint64_t bytes, uint64_t *address);
int tide_multicast_unmap(uint64_t address, uint64_t bytes);
int tide_multicast_free(uint64_t object, int device, int bound, uint64_t bytes);
int tide_multicast_probe(int device);

// executor.cu
int tide_engine_create(uint64_t seed, void **engine);
void tide_engine_free(void *engine);
const uint32_t *tide_report(void *engine);
int tide_stream_create(uint64_t *stream);
int tide_stream_free(uint64_t stream);
int tide_stream_busy(uint64_t stream);
int tide_event_reserve(void *engine, int count);
int tide_event_wait(void *engine, int number, uint64_t stream);
int tide_event_busy(void *engine, int number);
int tide_table(void *engine, const void *rows, uint64_t bytes, uint64_t *address);
int tide_rail(void *engine, const uint64_t *functions, int count);
int tide_rail_channel(void *engine, int stream, uint64_t comm, uint64_t window);
int tide_peek(void *engine, uint64_t address, uint64_t bytes, void *out);
int tide_costs(void *engine, int on, uint64_t *out);
int tide_launch(void *engine, const tide::Op *ops, int n, const uint64_t *streams, const uint64_t *base_list, int base_count, const uint32_t *values,
                float scale, uint32_t tag, const uint64_t *tags, int tag_count);

}  // extern "C"
