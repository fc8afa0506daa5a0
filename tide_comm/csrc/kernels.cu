// Compiled with -fmad=false; additions and multiplications are spelled out besides, so that no flag can contract them.
#include "kernels.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

#include "loaders.cuh"

namespace tide {

constexpr int SUM_THREADS = 1024;  // one block then moves as much as two: short-lived blocks are few by intent
constexpr int CAST_THREADS = 512;
constexpr int VECTOR = 4;                             // elements an access: 8 bytes of bf16, 16 of fp32, whole sectors a warp
constexpr int SUM_UNROLL = TILE / (SUM_THREADS * VECTOR);  // accesses in flight a thread and source
constexpr int CAST_UNROLL = TILE / (CAST_THREADS * VECTOR);

template <int N> struct BaseList {
  uint64_t at[N];
};

template <class T> struct Item;
template <> struct Item<float> {
  using Pack = float4;
  static __device__ float get(float x) { return x; }
  static __device__ float put(float x) { return x; }
  static __device__ float4 widen(float4 v) { return v; }
  static __device__ float4 narrow(float4 v) { return v; }
};
template <> struct Item<__nv_bfloat16> {
  using Pack = uint2;
  static __device__ float get(__nv_bfloat16 x) { return __bfloat162float(x); }
  static __device__ __nv_bfloat16 put(float x) { return __float2bfloat16_rn(x); }
  static __device__ float4 widen(uint2 v) {
    return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u), __uint_as_float(v.y << 16), __uint_as_float(v.y & 0xffff0000u));
  }
  static __device__ uint2 narrow(float4 f) {
    __nv_bfloat162 h[2] = {__floats2bfloat162_rn(f.x, f.y), __floats2bfloat162_rn(f.z, f.w)};
    return *reinterpret_cast<uint2 *>(h);
  }
};
template <> struct Item<__half> {
  using Pack = uint2;
  static __device__ float get(__half x) { return __half2float(x); }
  static __device__ __half put(float x) { return __float2half_rn(x); }
  static __device__ float4 widen(uint2 v) {
    const __half2 a = *reinterpret_cast<__half2 *>(&v.x), b = *reinterpret_cast<__half2 *>(&v.y);
    return make_float4(__low2float(a), __high2float(a), __low2float(b), __high2float(b));
  }
  static __device__ uint2 narrow(float4 f) {
    __half2 h[2] = {__floats2half2_rn(f.x, f.y), __floats2half2_rn(f.z, f.w)};
    return *reinterpret_cast<uint2 *>(h);
  }
};
template <> struct Item<double> {
  static __device__ float get(double x) { return float(x); }
};

// The segment that tile t belongs to: the last one that starts at or before it.
static __device__ const Segment &segment_of(const Segment *table, int segments, uint64_t tile) {
  int lo = 0, hi = segments - 1;
  while (lo < hi) {
    const int middle = (lo + hi + 1) / 2;
    if (table[middle].first_tile <= tile) lo = middle; else hi = middle - 1;
  }
  return table[lo];
}

static __device__ uint64_t at(const Place &place, uint64_t i, uint64_t width) { return i < width ? i : i / width * place.pitch + i % width; }

template <class T> static __device__ T *pointer(const Place &place, const Bases &bases) {
  return reinterpret_cast<T *>(bases.at[place.base] + place.offset);
}

// Whether all accesses of VECTOR elements are aligned and stay inside a row.
template <class T> static __device__ bool fits(const Place &place, const Bases &bases, uint64_t elements, uint64_t width) {
  const bool rows = elements > width;
  return (reinterpret_cast<uint64_t>(pointer<T>(place, bases)) % (VECTOR * sizeof(T))) == 0 && (!rows || (place.pitch % VECTOR == 0 && width % VECTOR == 0));
}

static __device__ float4 add(float4 a, float4 b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}
static __device__ float4 times(float4 a, float s) {
  return make_float4(__fmul_rn(a.x, s), __fmul_rn(a.y, s), __fmul_rn(a.z, s), __fmul_rn(a.w, s));
}

static __device__ uint64_t at_or_flat(const Place &place, uint64_t i, uint64_t width, bool flat) { return flat ? i : at(place, i, width); }

// The vectors of one tile. Load: how a source is read (loaders.cuh). N: the number of sources where it is known, so that all their loads are in flight at once; 0: any number.
template <class Load, class S, class D, int N>
static __device__ void sum_vectors(const Segment &s, const Bases &bases, int sources, bool carry, float scale, uint64_t mine, uint64_t done) {
  using SPack = typename Item<S>::Pack;
  using DPack = typename Item<D>::Pack;
  const uint64_t width = s.width;
  const bool flat = s.elements <= width;
  D *out = pointer<D>(s.dst, bases);
  if constexpr (N > 0) {
    SPack v[N][SUM_UNROLL];
#pragma unroll
    for (int k = 0; k < N; k++) {
      const S *source = pointer<S>(s.src[k], bases);
#pragma unroll
      for (int u = 0; u < SUM_UNROLL; u++) {
        const uint64_t i = mine + uint64_t(u) * SUM_THREADS * VECTOR;
        if (i < done) v[k][u] = Load::pack(reinterpret_cast<const SPack *>(source + at_or_flat(s.src[k], i, width, flat)));
      }
    }
#pragma unroll
    for (int u = 0; u < SUM_UNROLL; u++) {
      const uint64_t i = mine + uint64_t(u) * SUM_THREADS * VECTOR;
      if (i < done) {
        float4 sum = Item<S>::widen(v[0][u]);
#pragma unroll
        for (int k = 1; k < N; k++) sum = add(sum, Item<S>::widen(v[k][u]));
        __stcs(reinterpret_cast<DPack *>(out + at_or_flat(s.dst, i, width, flat)), Item<D>::narrow(times(sum, scale)));
      }
    }
  } else {
    float4 sum[SUM_UNROLL];
    if (carry) {
#pragma unroll
      for (int u = 0; u < SUM_UNROLL; u++) {
        const uint64_t i = mine + uint64_t(u) * SUM_THREADS * VECTOR;
        if (i < done) sum[u] = Item<D>::widen(*reinterpret_cast<const DPack *>(out + at_or_flat(s.dst, i, width, flat)));
      }
    }
    for (int k = 0; k < sources; k++) {
      const S *source = pointer<S>(s.src[k], bases);
      SPack v[SUM_UNROLL];
#pragma unroll
      for (int u = 0; u < SUM_UNROLL; u++) {
        const uint64_t i = mine + uint64_t(u) * SUM_THREADS * VECTOR;
        if (i < done) v[u] = Load::pack(reinterpret_cast<const SPack *>(source + at_or_flat(s.src[k], i, width, flat)));
      }
#pragma unroll
      for (int u = 0; u < SUM_UNROLL; u++) sum[u] = k == 0 && !carry ? Item<S>::widen(v[u]) : add(sum[u], Item<S>::widen(v[u]));
    }
#pragma unroll
    for (int u = 0; u < SUM_UNROLL; u++) {
      const uint64_t i = mine + uint64_t(u) * SUM_THREADS * VECTOR;
      if (i < done) __stcs(reinterpret_cast<DPack *>(out + at_or_flat(s.dst, i, width, flat)), Item<D>::narrow(times(sum[u], scale)));
    }
  }
}

template <class Load, class S, class D, int N, int B>
__global__ void __launch_bounds__(SUM_THREADS) reduce_kernel(const Segment *table, int segments, uint64_t tiles, int sources, bool carry, float scale,
                                                         const __grid_constant__ BaseList<B> list, Check check) {
  const Bases bases{list.at, B};
  __shared__ bool stop;
  if (threadIdx.x == 0) {
    stop = check.failed && *static_cast<volatile uint32_t *>(check.failed);
    for (int k = 0; k < check.count && !stop; k++) {
      const uint32_t theirs = *static_cast<const volatile uint32_t *>(check.tags[k]);
      if (theirs == check.expected) continue;
      stop = true;
      *static_cast<volatile uint32_t *>(check.failed) = 1;
      if (blockIdx.x == 0) {
        check.report[1] = check.ranks[k], check.report[2] = theirs, check.report[3] = check.expected;
        __threadfence_system();
        *static_cast<volatile uint32_t *>(check.report) = 1;
      }
    }
  }
  __syncthreads();
  if (stop) return;
  for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Segment &s = segment_of(table, segments, tile);
    const uint64_t width = s.width, n = s.elements, first = (tile - s.first_tile) * TILE, last = min(first + TILE, n);
    D *out = pointer<D>(s.dst, bases);
    bool vector = fits<D>(s.dst, bases, n, width);
    for (int k = 0; k < sources; k++) vector = vector && fits<S>(s.src[k], bases, n, width);
    uint64_t done = first;
    if (vector) {
      done = first + (last - first) / VECTOR * VECTOR;
      sum_vectors<Load, S, D, N>(s, bases, sources, carry, scale, first + threadIdx.x * VECTOR, done);
    }
    for (uint64_t i = done + threadIdx.x; i < last; i += SUM_THREADS) {
      const uint64_t to = at(s.dst, i, width);
      float sum = carry ? Item<D>::get(out[to]) : Item<S>::get(Load::one(pointer<S>(s.src[0], bases) + at(s.src[0], i, width)));
      for (int k = carry ? 0 : 1; k < sources; k++) sum = __fadd_rn(sum, Item<S>::get(Load::one(pointer<S>(s.src[k], bases) + at(s.src[k], i, width))));
      out[to] = Item<D>::put(__fmul_rn(sum, scale));
    }
  }
}

// Elements [first, last) of a segment as units of type U, unchanged.
template <class U> static __device__ void copy_units(const Segment &s, const Bases &bases, uint64_t first, uint64_t last) {
  const U *src = pointer<U>(s.src[0], bases);
  U *dst = pointer<U>(s.dst, bases);
  const uint64_t width = s.width / sizeof(U);
  Place from = s.src[0], to = s.dst;
  from.pitch /= sizeof(U), to.pitch /= sizeof(U);
  first /= sizeof(U), last /= sizeof(U);
  for (uint64_t i = first + threadIdx.x; i < last; i += 4 * CAST_THREADS) {
    U v[4];
#pragma unroll
    for (int u = 0; u < 4; u++) if (i + u * CAST_THREADS < last) v[u] = src[at(from, i + u * CAST_THREADS, width)];
#pragma unroll
    for (int u = 0; u < 4; u++) if (i + u * CAST_THREADS < last) dst[at(to, i + u * CAST_THREADS, width)] = v[u];
  }
}

static __device__ void copy_tile(const Segment &s, const Bases &bases, uint64_t first, uint64_t last) {
  uint64_t bits = (bases.at[s.src[0].base] + s.src[0].offset) | (bases.at[s.dst.base] + s.dst.offset) | s.elements;
  if (s.elements > s.width) bits |= s.width | s.src[0].pitch | s.dst.pitch;
  if (bits % 16 == 0) copy_units<uint4>(s, bases, first, last);
  else if (bits % 4 == 0) copy_units<uint32_t>(s, bases, first, last);
  else if (bits % 2 == 0) copy_units<uint16_t>(s, bases, first, last);
  else copy_units<uint8_t>(s, bases, first, last);
}

template <class S, class D> static __device__ void cast_tile(const Segment &s, const Bases &bases, uint64_t first, uint64_t last) {
  const S *src = pointer<S>(s.src[0], bases);
  D *dst = pointer<D>(s.dst, bases);
  uint64_t done = first;
  if constexpr (sizeof(S) <= 4) {
    if (fits<S>(s.src[0], bases, s.elements, s.width) && fits<D>(s.dst, bases, s.elements, s.width)) {
      done = first + (last - first) / VECTOR * VECTOR;
      float4 v[CAST_UNROLL];
      const uint64_t mine = first + threadIdx.x * VECTOR;
#pragma unroll
      for (int u = 0; u < CAST_UNROLL; u++) {
        const uint64_t i = mine + uint64_t(u) * CAST_THREADS * VECTOR;
        if (i < done) v[u] = Item<S>::widen(__ldcs(reinterpret_cast<const typename Item<S>::Pack *>(src + at(s.src[0], i, s.width))));
      }
#pragma unroll
      for (int u = 0; u < CAST_UNROLL; u++) {
        const uint64_t i = mine + uint64_t(u) * CAST_THREADS * VECTOR;
        if (i < done) __stcs(reinterpret_cast<typename Item<D>::Pack *>(dst + at(s.dst, i, s.width)), Item<D>::narrow(v[u]));
      }
    }
  }
  for (uint64_t i = done + threadIdx.x; i < last; i += CAST_THREADS) dst[at(s.dst, i, s.width)] = Item<D>::put(Item<S>::get(src[at(s.src[0], i, s.width)]));
}

template <class S> static __device__ void cast_from(const Segment &s, const Bases &bases, uint64_t first, uint64_t last) {
  if (s.dst_dtype == F32) cast_tile<S, float>(s, bases, first, last);
  else if (s.dst_dtype == BF16) cast_tile<S, __nv_bfloat16>(s, bases, first, last);
  else cast_tile<S, __half>(s, bases, first, last);
}

template <int B>
__global__ void __launch_bounds__(CAST_THREADS) cast_kernel(const Segment *table, int segments, uint64_t tiles, const __grid_constant__ BaseList<B> list) {
  const Bases bases{list.at, B};
  for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Segment &s = segment_of(table, segments, tile);
    // Bytes go by larger tiles: TILE * 2 of them are a tile's share.
    const uint64_t step = s.src_dtype == BYTES ? 2 * TILE : TILE, first = (tile - s.first_tile) * step, last = min(first + step, s.elements);
    switch (s.src_dtype) {
      case BYTES: copy_tile(s, bases, first, last); break;
      case F32: cast_from<float>(s, bases, first, last); break;
      case BF16: cast_from<__nv_bfloat16>(s, bases, first, last); break;
      case F16: cast_from<__half>(s, bases, first, last); break;
      default: cast_from<double>(s, bases, first, last);
    }
  }
}

__global__ void spin_kernel(uint64_t nanoseconds) {
  uint64_t start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}

template <int B> static BaseList<B> listed(const Bases &bases) {
  BaseList<B> list;
  memcpy(list.at, bases.at, bases.count * sizeof(uint64_t));
  return list;
}

template <class S, class D, int B>
static void reduce_sized(const Segment *table, int segments, uint64_t tiles, int sources, bool carry, float scale, int blocks, const Bases &bases,
                         const Check &check, cudaStream_t stream) {
  const auto kernel = sources == 2 && !carry ? reduce_kernel<Loads, S, D, 2, B> : reduce_kernel<Loads, S, D, 0, B>;
  kernel<<<blocks, SUM_THREADS, 0, stream>>>(table, segments, tiles, sources, carry, scale, listed<B>(bases), check);
}

template <class S, class D>
static cudaError_t reduce_as(const Segment *table, int segments, uint64_t tiles, int sources, bool carry, float scale, int blocks, const Bases &bases,
                             const Check &check, cudaStream_t stream) {
  if (bases.count <= FEW_BASES) reduce_sized<S, D, FEW_BASES>(table, segments, tiles, sources, carry, scale, blocks, bases, check, stream);
  else reduce_sized<S, D, MAX_BASES>(table, segments, tiles, sources, carry, scale, blocks, bases, check, stream);
  return cudaGetLastError();
}

template <class S>
static cudaError_t reduce_from(const Segment *table, int segments, uint64_t tiles, int sources, bool carry, float scale, int blocks, const Bases &bases,
                               const Check &check, cudaStream_t stream, int dst_dtype) {
  if (dst_dtype == F32) return reduce_as<S, float>(table, segments, tiles, sources, carry, scale, blocks, bases, check, stream);
  return reduce_as<S, __nv_bfloat16>(table, segments, tiles, sources, carry, scale, blocks, bases, check, stream);
}

cudaError_t launch_reduce(const Segment *table, int segments, uint64_t tiles, int sources, bool carry, float scale, int blocks, const Bases &bases,
                          const Check &check, cudaStream_t stream, int src_dtype, int dst_dtype) {
  const int grid = int(min(uint64_t(blocks), tiles));
  if (src_dtype == F32) return reduce_from<float>(table, segments, tiles, sources, carry, scale, grid, bases, check, stream, dst_dtype);
  if (src_dtype == BF16) return reduce_from<__nv_bfloat16>(table, segments, tiles, sources, carry, scale, grid, bases, check, stream, dst_dtype);
  return reduce_from<__half>(table, segments, tiles, sources, carry, scale, grid, bases, check, stream, dst_dtype);
}

template <int B>
static void multimem_sized(const Segment *table, int segments, uint64_t tiles, bool carry, float scale, int blocks, const Bases &bases, const Check &check,
                           cudaStream_t stream, int dst_dtype) {
  const auto kernel = dst_dtype == F32 ? reduce_kernel<Multimem, float, float, 0, B> : reduce_kernel<Multimem, float, __nv_bfloat16, 0, B>;
  kernel<<<blocks, SUM_THREADS, 0, stream>>>(table, segments, tiles, 1, carry, scale, listed<B>(bases), check);
}

cudaError_t launch_multimem(const Segment *table, int segments, uint64_t tiles, int sources, bool carry, float scale, int blocks, const Bases &bases,
                            const Check &check, cudaStream_t stream, int src_dtype, int dst_dtype) {
  if (src_dtype != F32 || sources != 1 || (dst_dtype != F32 && dst_dtype != BF16)) return cudaErrorInvalidValue;
  const int grid = int(min(uint64_t(blocks), tiles));
  if (bases.count <= FEW_BASES) multimem_sized<FEW_BASES>(table, segments, tiles, carry, scale, grid, bases, check, stream, dst_dtype);
  else multimem_sized<MAX_BASES>(table, segments, tiles, carry, scale, grid, bases, check, stream, dst_dtype);
  return cudaGetLastError();
}

cudaError_t launch_cast(const Segment *table, int segments, uint64_t tiles, int blocks, const Bases &bases, cudaStream_t stream) {
  const int grid = int(min(uint64_t(blocks), tiles));
  if (bases.count <= FEW_BASES) cast_kernel<<<grid, CAST_THREADS, 0, stream>>>(table, segments, tiles, listed<FEW_BASES>(bases));
  else cast_kernel<<<grid, CAST_THREADS, 0, stream>>>(table, segments, tiles, listed<MAX_BASES>(bases));
  return cudaGetLastError();
}

cudaError_t launch_spin(uint64_t nanoseconds, cudaStream_t stream) {
  spin_kernel<<<1, 1, 0, stream>>>(nanoseconds);
  return cudaGetLastError();
}

template <class S, class D, int B> static cudaError_t load_both() {
  cudaFuncAttributes attributes;
  cudaError_t e = cudaFuncGetAttributes(&attributes, reduce_kernel<Loads, S, D, 0, B>);
  return e ? e : cudaFuncGetAttributes(&attributes, reduce_kernel<Loads, S, D, 2, B>);
}
template <class S, int B> static cudaError_t load_reduce() {
  cudaError_t e = load_both<S, float, B>();
  return e ? e : load_both<S, __nv_bfloat16, B>();
}
template <int B> static cudaError_t load_sized() {
  cudaFuncAttributes attributes;
  cudaError_t e = load_reduce<float, B>();
  if (!e) e = load_reduce<__nv_bfloat16, B>();
  if (!e) e = load_reduce<__half, B>();
  if (!e) e = cudaFuncGetAttributes(&attributes, reduce_kernel<Multimem, float, float, 0, B>);
  if (!e) e = cudaFuncGetAttributes(&attributes, reduce_kernel<Multimem, float, __nv_bfloat16, 0, B>);
  return e ? e : cudaFuncGetAttributes(&attributes, cast_kernel<B>);
}

cudaError_t load_kernels() {
  cudaFuncAttributes attributes;
  cudaError_t e = load_sized<FEW_BASES>();
  if (!e) e = load_sized<MAX_BASES>();
  if (!e) e = cudaFuncGetAttributes(&attributes, spin_kernel);
  return e;
}

}  // namespace tide
