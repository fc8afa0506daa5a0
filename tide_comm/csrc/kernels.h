// The two kernels: one adds, one copies and casts. Each walks a segment table in device memory, whose addresses are a base's number and an
// offset; bases are bound at launch and passed by value.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace tide {

constexpr int MAX_SOURCES = 8;
constexpr int FEW_BASES = 128, MAX_BASES = 1024;
constexpr int TILE = 16384;  // elements that a block does at a time

enum Dtype : int32_t { F32 = 0, BF16 = 1, F16 = 2, F64 = 3, BYTES = 4 };

// What a launch binds. Kernels get a copy by value, in the smaller of two sizes that it fits: 8 KiB of arguments cost host time at every launch.
struct Bases {
  const uint64_t *at;
  int count;
};

// Rows of `width` elements, `pitch` elements apart. The layout of these structs is repeated in engine/cuda/records.py.
struct Place {
  uint64_t offset;  // bytes
  uint64_t pitch;   // elements
  uint32_t base;
  uint32_t pad;
};

struct Segment {
  uint64_t elements;    // rows * width
  uint64_t width;
  uint64_t first_tile;  // tiles of the segments before
  int32_t src_dtype, dst_dtype;
  Place dst;
  Place src[MAX_SOURCES];
};

// What a sum checks before it writes: every peer's tag must be ours.
struct Check {
  const uint32_t *tags[MAX_SOURCES];
  uint32_t ranks[MAX_SOURCES];
  int count;
  uint32_t expected;
  uint32_t *failed;  // device memory: set for good, later sums write nothing
  uint32_t *report;  // host memory: {1, rank, tag found, tag expected}
};

cudaError_t launch_reduce(const Segment *table, int segments, uint64_t tiles, int sources, bool carry, float scale, int blocks,
                          const Bases &bases, const Check &check, cudaStream_t stream, int src_dtype, int dst_dtype);
// The same with one source of fp32 at an address of a multicast mapping: the switch adds all lanes' copies, so `sources` is 1. sm_90.
cudaError_t launch_multimem(const Segment *table, int segments, uint64_t tiles, int sources, bool carry, float scale, int blocks,
                            const Bases &bases, const Check &check, cudaStream_t stream, int src_dtype, int dst_dtype);
cudaError_t launch_cast(const Segment *table, int segments, uint64_t tiles, int blocks, const Bases &bases, cudaStream_t stream);
cudaError_t launch_spin(uint64_t nanoseconds, cudaStream_t stream);
// Loads every kernel now: loading one while streams wait for peers would synchronise with them.
cudaError_t load_kernels();

}  // namespace tide
