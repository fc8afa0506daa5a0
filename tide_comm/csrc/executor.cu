// Walks a compiled program: one call a launch, no host synchronisation, no waiting on SMs.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "api.h"
#include "driver.h"
#include "kernels.h"

namespace tide {

// The numbers and the layout of Op are repeated in engine/cuda/records.py.
enum Kind : int32_t { COPY = 0, COPY2D, WRITE, WAIT, RECORD, AFTER, CAST, REDUCE, FILL, AGREE, PUT, CLEAR, KINDS };

struct Op {
  int32_t kind, stream;
  uint64_t dst, src;           // offsets, bytes; src of CAST and REDUCE: address of the segment table
  uint64_t bytes;              // of a row; CAST, REDUCE: tiles
  uint64_t dst_pitch, src_pitch;  // REDUCE that checks tags: how many, and the first of them
  uint32_t dst_base, src_base;
  uint32_t rows;               // CAST, REDUCE: segments
  int32_t aux;                 // WRITE, WAIT: index into values, -1: the tag; RECORD, AFTER: event; CAST, REDUCE: blocks; PUT: machine
  int32_t sources, src_dtype, dst_dtype, flags;  // REDUCE; flags: 1 carry, 2 scaled, 4 check tags, 8 multimem
};

constexpr uint64_t PEEK_BYTES = 64 << 10;
constexpr int PEEK_SECONDS = 2;
constexpr int MAX_STREAMS = 16;
// Puts that may be in flight on a communicator: NCCL's proxy has a short queue, and the host spins where it is full.
constexpr int PUTS_IN_FLIGHT = 32;

// NCCL's own functions, from the library that the process has loaded already (engine/cuda/nccl.py): nothing is linked. The enums of nccl.h are int.
struct Nccl {
  int (*putSignal)(const void *, size_t, int, int, void *, size_t, int, int, unsigned, void *, cudaStream_t) = nullptr;
  int (*groupStart)() = nullptr;
  int (*groupEnd)() = nullptr;
  const char *(*errorString)(int) = nullptr;
};
constexpr int NCCL_INT8 = 0;

// What a stream puts through: NCCL carries the operations of one communicator out one after the other, whatever their streams.
struct Channel {
  void *comm = nullptr, *window = nullptr;
};

struct Engine {
  Nccl nccl;
  Channel channels[MAX_STREAMS];
  std::vector<cudaEvent_t> events;
  std::vector<bool> recorded;
  uint32_t *failed = nullptr;   // device
  uint32_t *report = nullptr;   // host, mapped
  uint64_t noise = 0;           // state of the delays' random numbers; 0: no delays
  std::vector<void *> tables;
  cudaStream_t peek = nullptr;  // only the watchdog's
  void *peeked = nullptr;       // host
  bool blind = false;
  bool timed = false;
  uint64_t calls[KINDS] = {}, nanoseconds[KINDS] = {};
};

static uint64_t next(uint64_t &state) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return state;
}

static int busy(cudaError_t e) {
  if (e == cudaSuccess) return 0;
  if (e != cudaErrorNotReady) return fail(2, "the GPU reports error %d: %s", int(e), cudaGetErrorString(e));
  cudaGetLastError();  // or the next kernel's launch would be taken for failed
  return 1;
}

static bool is_word(const Op &op) { return op.kind == WRITE || op.kind == WAIT || op.kind == AGREE; }

}  // namespace tide

using namespace tide;

#define TRY(call)                                                                                              \
  do {                                                                                                         \
    if (int error_ = int(call)) return fail(i + 1, "operation %d (kind %d): error %d in %s", i, op.kind, error_, #call); \
  } while (0)

extern "C" {

int tide_engine_create(uint64_t seed, void **engine) {
  if (!driver()) return 1;
  auto *e = new Engine;
  e->noise = seed ? seed * 0x9E3779B97F4A7C15ull | 1 : 0;
  if (int x = int(cudaMalloc(&e->failed, 4))) return fail(2, "cudaMalloc: error %d", x);
  if (int x = int(cudaMemset(e->failed, 0, 4))) return fail(2, "cudaMemset: error %d", x);
  if (int x = int(cudaHostAlloc(&e->report, 16, cudaHostAllocMapped))) return fail(2, "cudaHostAlloc: error %d", x);
  memset(e->report, 0, 16);
  if (int x = int(cudaHostAlloc(&e->peeked, PEEK_BYTES, 0))) return fail(2, "cudaHostAlloc: error %d", x);
  if (int x = int(cudaStreamCreateWithFlags(&e->peek, cudaStreamNonBlocking))) return fail(2, "cudaStreamCreate: error %d", x);
  if (int x = int(load_kernels())) return fail(2, "the kernels do not load on this GPU: error %d", x);
  *engine = e;
  return 0;
}

void tide_engine_free(void *engine) {
  auto *e = static_cast<Engine *>(engine);
  for (cudaEvent_t event : e->events) cudaEventDestroy(event);
  for (void *table : e->tables) cudaFree(table);
  cudaStreamDestroy(e->peek);
  cudaFree(e->failed);
  cudaFreeHost(e->report);
  cudaFreeHost(e->peeked);
  delete e;
}

// {1, position of the peer among those checked, its tag, ours} once ranks have disagreed.
const uint32_t *tide_report(void *engine) { return static_cast<Engine *>(engine)->report; }

int tide_stream_create(uint64_t *stream) {
  int least, greatest;
  cudaDeviceGetStreamPriorityRange(&least, &greatest);
  cudaStream_t made;
  if (int e = int(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, greatest))) return fail(1, "cudaStreamCreate: error %d", e);
  *stream = reinterpret_cast<uint64_t>(made);
  return 0;
}
int tide_stream_free(uint64_t stream) { return int(cudaStreamDestroy(reinterpret_cast<cudaStream_t>(stream))); }
// 0: idle, 1: busy, else an error.
int tide_stream_busy(uint64_t stream) {
  return busy(cudaStreamQuery(reinterpret_cast<cudaStream_t>(stream)));
}

// Events are numbered from 0; a new one is made whenever `number` is not there yet.
int tide_event_reserve(void *engine, int count) {
  auto *e = static_cast<Engine *>(engine);
  while (int(e->events.size()) < count) {
    cudaEvent_t made;
    if (int x = int(cudaEventCreateWithFlags(&made, cudaEventDisableTiming))) return fail(1, "cudaEventCreate: error %d", x);
    e->events.push_back(made);
    e->recorded.push_back(false);
  }
  return 0;
}
int tide_event_wait(void *engine, int number, uint64_t stream) {
  auto *e = static_cast<Engine *>(engine);
  if (int x = int(cudaStreamWaitEvent(reinterpret_cast<cudaStream_t>(stream), e->events[number], 0))) return fail(1, "cudaStreamWaitEvent: error %d", x);
  return 0;
}
// 0: reached, 1: not yet, else an error.
int tide_event_busy(void *engine, int number) {
  return busy(cudaEventQuery(static_cast<Engine *>(engine)->events[number]));
}

// A segment table in device memory, for the engine's life. Copied on a stream of its own: nothing here waits for other streams.
int tide_table(void *engine, const void *rows, uint64_t bytes, uint64_t *address) {
  auto *e = static_cast<Engine *>(engine);
  void *made = nullptr;
  cudaStream_t stream;
  if (int x = int(cudaMalloc(&made, bytes))) return fail(1, "cudaMalloc: error %d", x);
  if (int x = int(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking))) return fail(1, "cudaStreamCreate: error %d", x);
  int x = int(cudaMemcpyAsync(made, rows, bytes, cudaMemcpyHostToDevice, stream));
  if (!x) x = int(cudaStreamSynchronize(stream));
  cudaStreamDestroy(stream);
  if (x) return fail(1, "copying a segment table: error %d", x);
  e->tables.push_back(made);
  *address = reinterpret_cast<uint64_t>(made);
  return 0;
}

// The rail: functions are the addresses of ncclPutSignal, ncclGroupStart, ncclGroupEnd and ncclGetErrorString.
int tide_rail(void *engine, const uint64_t *functions, int count) {
  if (count != 4) return fail(1, "a rail takes 4 functions; got %d", count);
  Nccl &nccl = static_cast<Engine *>(engine)->nccl;
  nccl.putSignal = reinterpret_cast<decltype(nccl.putSignal)>(functions[0]);
  nccl.groupStart = reinterpret_cast<decltype(nccl.groupStart)>(functions[1]);
  nccl.groupEnd = reinterpret_cast<decltype(nccl.groupEnd)>(functions[2]);
  nccl.errorString = reinterpret_cast<decltype(nccl.errorString)>(functions[3]);
  return 0;
}
// The communicator and the arena's window through which stream number `stream` of a launch puts.
int tide_rail_channel(void *engine, int stream, uint64_t comm, uint64_t window) {
  if (stream < 0 || stream >= MAX_STREAMS) return fail(1, "stream %d cannot have a channel", stream);
  static_cast<Engine *>(engine)->channels[stream] = {reinterpret_cast<void *>(comm), reinterpret_cast<void *>(window)};
  return 0;
}

// Copies device memory to `out` for the watchdog, beside whatever else is under way. Gives up after PEEK_SECONDS: where hardware queues are
// shared the copy may stand behind a stream that waits for ever. Once it has given up it always does: the buffer may still be written.
int tide_peek(void *engine, uint64_t address, uint64_t bytes, void *out) {
  auto *e = static_cast<Engine *>(engine);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(PEEK_SECONDS);
  for (uint64_t at = 0; at < bytes; at += PEEK_BYTES) {
    if (e->blind) return fail(2, "the GPU has not answered");
    const uint64_t n = std::min(PEEK_BYTES, bytes - at);
    int x = int(cudaMemcpyAsync(e->peeked, reinterpret_cast<const void *>(address + at), n, cudaMemcpyDeviceToHost, e->peek));
    if (x) return fail(1, "reading %lu bytes of the arena: error %d", (unsigned long)bytes, x);
    while ((x = busy(cudaStreamQuery(e->peek))) == 1 && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    e->blind = x != 0;
    if (x) return x == 1 ? fail(1, "the GPU does not answer") : x;
    memcpy(static_cast<char *>(out) + at, e->peeked, n);
  }
  return 0;
}

// The host's time by kind of operation since the last call: out[kind] calls of the driver, out[KINDS + kind] nanoseconds. `on`: count from here on.
int tide_costs(void *engine, int on, uint64_t *out) {
  auto *e = static_cast<Engine *>(engine);
  memcpy(out, e->calls, sizeof e->calls);
  memcpy(out + KINDS, e->nanoseconds, sizeof e->nanoseconds);
  memset(e->calls, 0, sizeof e->calls);
  memset(e->nanoseconds, 0, sizeof e->nanoseconds);
  e->timed = on;
  return 0;
}

// Carries out ops[0..n). 0, or 1 + the index of the operation that failed. `tags`: addresses, with the rank whose tag it is in the upper 16 bits.
int tide_launch(void *engine, const Op *ops, int n, const uint64_t *streams, const uint64_t *base_list, int base_count, const uint32_t *values,
                float scale, uint32_t tag, const uint64_t *tags, int tag_count) {
  auto *e = static_cast<Engine *>(engine);
  const Driver *d = driver();
  if (base_count > MAX_BASES) return fail(1, "too many addresses: %d bases", base_count);
  const Bases bases{base_list, base_count};
  static thread_local std::vector<void *> dsts;
  static thread_local std::vector<const void *> srcs;
  static thread_local std::vector<size_t> sizes;
  static thread_local std::vector<CUstreamBatchMemOpParams> words;
  for (int i = 0; i < n; i++) {
    const Op &op = ops[i];
    const cudaStream_t stream = reinterpret_cast<cudaStream_t>(streams[op.stream]);
    if (e->noise && next(e->noise) % 4 == 0) TRY(launch_spin(next(e->noise) % 400000, stream));
    const auto started = e->timed ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point();
    auto dst = [&](const Op &o) { return reinterpret_cast<void *>(bases.at[o.dst_base] + o.dst); };
    auto src = [&](const Op &o) { return reinterpret_cast<const void *>(bases.at[o.src_base] + o.src); };
    switch (op.kind) {
      case COPY: {
        dsts.clear(), srcs.clear(), sizes.clear();
        int k = i;
        for (; k < n && ops[k].kind == COPY && ops[k].stream == op.stream; k++) {
          dsts.push_back(dst(ops[k])), srcs.push_back(src(ops[k])), sizes.push_back(ops[k].bytes);
        }
        if (k == i + 1) {
          TRY(cudaMemcpyAsync(dsts[0], srcs[0], sizes[0], cudaMemcpyDeviceToDevice, stream));
        } else {
          cudaMemcpyAttributes attributes{};
          attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
          attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
          size_t from = 0;
          TRY(cudaMemcpyBatchAsync(dsts.data(), srcs.data(), sizes.data(), dsts.size(), &attributes, &from, 1, stream));
        }
        i = k - 1;
        break;
      }
      case COPY2D: TRY(cudaMemcpy2DAsync(dst(op), op.dst_pitch, src(op), op.src_pitch, op.bytes, op.rows, cudaMemcpyDeviceToDevice, stream)); break;
      case WRITE:
      case WAIT:
      case AGREE: {
        words.clear();
        int k = i;
        for (; k < n && is_word(ops[k]) && ops[k].stream == op.stream; k++) {
          CUstreamBatchMemOpParams p{};
          const CUdeviceptr address = CUdeviceptr(bases.at[ops[k].dst_base] + ops[k].dst);
          const uint32_t value = ops[k].aux < 0 ? tag : values[ops[k].aux];
          if (ops[k].kind == WRITE) {
            p.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
            p.writeValue.address = address;
            p.writeValue.value = value;
          } else {
            p.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
            p.waitValue.address = address;
            p.waitValue.value = value;
            // Ranks that disagree never pass an AGREE: nobody uses what they have gathered. The watchdog sees the stall and compares.
            p.waitValue.flags = ops[k].kind == AGREE ? CU_STREAM_WAIT_VALUE_EQ : CU_STREAM_WAIT_VALUE_GEQ;
          }
          words.push_back(p);
        }
        // The driver takes at most 256 a call.
        for (size_t from = 0; from < words.size(); from += 256) {
          TRY(d->streamBatchMemOp(reinterpret_cast<CUstream>(stream), unsigned(std::min<size_t>(256, words.size() - from)), words.data() + from, 0));
        }
        i = k - 1;
        break;
      }
      case RECORD:
        TRY(cudaEventRecord(e->events[op.aux], stream));
        e->recorded[op.aux] = true;
        break;
      case AFTER:
        if (e->recorded[op.aux]) TRY(cudaStreamWaitEvent(stream, e->events[op.aux], 0));
        break;
      case CAST:
        TRY(launch_cast(reinterpret_cast<const Segment *>(op.src), int(op.rows), op.bytes, op.aux, bases, stream));
        break;
      case REDUCE: {
        Check check{};
        check.failed = e->failed, check.report = e->report, check.expected = tag;
        if (op.flags & 4) {
          if (op.dst_pitch > MAX_SOURCES || op.src_pitch + op.dst_pitch > uint64_t(tag_count)) return fail(i + 1, "operation %d checks %d tags", i, int(op.dst_pitch));
          check.count = int(op.dst_pitch);
          for (int k = 0; k < check.count; k++) {
            const uint64_t entry = tags[op.src_pitch + k];
            check.tags[k] = reinterpret_cast<const uint32_t *>(entry & 0xFFFFFFFFFFFFull);
            check.ranks[k] = uint32_t(entry >> 48);
          }
        }
        const auto launch = op.flags & 8 ? launch_multimem : launch_reduce;
        TRY(launch(reinterpret_cast<const Segment *>(op.src), int(op.rows), op.bytes, op.sources, op.flags & 1, op.flags & 2 ? scale : 1.0f, op.aux,
                   bases, check, stream, op.src_dtype, op.dst_dtype));
        break;
      }
      case PUT: {
        const Nccl &nccl = e->nccl;
        const Channel channel = op.stream < MAX_STREAMS ? e->channels[op.stream] : Channel();
        if (!nccl.putSignal || !channel.comm || !channel.window) return fail(i + 1, "operation %d puts on stream %d, which has no channel", i, op.stream);
        int k = i;
        int code = nccl.groupStart();
        for (; !code && k < n && k < i + PUTS_IN_FLIGHT && ops[k].kind == PUT && ops[k].stream == op.stream; k++) {
          // A base of another machine's memory is 0: what is left is the offset in its window. The signal that comes with every put is not waited for.
          code = nccl.putSignal(src(ops[k]), ops[k].bytes, NCCL_INT8, ops[k].aux, channel.window, bases.at[ops[k].dst_base] + ops[k].dst, 0, 0, 0,
                                channel.comm, stream);
        }
        const int ended = nccl.groupEnd();
        if (code || ended) return fail(i + 1, "operation %d: ncclPutSignal to machine %d: %s", i, op.aux, nccl.errorString(code ? code : ended));
        i = k - 1;
        break;
      }
      case FILL: TRY(cudaMemsetAsync(dst(op), 0xFF, op.bytes, stream)); break;
      case CLEAR: TRY(cudaMemsetAsync(dst(op), 0, op.bytes, stream)); break;
      default: return fail(i + 1, "operation %d has kind %d", i, op.kind);
    }
    if (e->timed) {
      e->calls[op.kind]++;
      e->nanoseconds[op.kind] += uint64_t((std::chrono::steady_clock::now() - started) / std::chrono::nanoseconds(1));
    }
  }
  return 0;
}

}  // extern "C"
