// How a sum reads one source: everything else (table, indices, tails, order, rounding) is the same code for all of them.
#pragma once
#include <cuda_runtime.h>

namespace tide {

// One copy, at any address that is mapped here: this GPU's memory or a peer's.
struct Loads {
  template <class Pack> static __device__ Pack pack(const Pack *p) { return __ldcs(p); }
  template <class T> static __device__ T one(const T *p) { return *p; }
};

// The sum of the copies of all lanes, formed by the switch, at an address of a multicast mapping. fp32 only, in no defined order.
struct Multimem {
  static __device__ float4 pack(const float4 *p) {
    float4 v{};
#if __CUDA_ARCH__ >= 900
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(p)
                 : "memory");
#else
    __trap();
#endif
    return v;
  }
  static __device__ float one(const float *p) {
    float v = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
#else
    __trap();
#endif
    return v;
  }
};

}  // namespace tide
