// The Python module _cuda: every function of api.h under its own name. The engine is a capsule, other addresses and handles are integers, an
// array is any contiguous buffer. A function with numbers as results besides its code returns a tuple, the code first.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include "api.h"

namespace nb = nanobind;

namespace {

// An argument's memory, during the call.
template <int FLAGS>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer &) = delete;
  ~Buffer() {
    if (view_.obj) PyBuffer_Release(&view_);
  }
  bool open(PyObject *object) {
    if (PyObject_GetBuffer(object, &view_, FLAGS) == 0) return true;
    PyErr_Clear();
    return false;
  }

  template <class T>
  T *data() const {
    return static_cast<T *>(view_.buf);
  }
  int count() const { return int(view_.len / view_.itemsize); }
  uint64_t bytes() const { return uint64_t(view_.len); }

 private:
  Py_buffer view_{};
};
using Array = Buffer<PyBUF_SIMPLE>;
using Room = Buffer<PyBUF_WRITABLE>;  // for results

}  // namespace

template <int FLAGS>
struct nanobind::detail::type_caster<Buffer<FLAGS>> {
  NB_TYPE_CASTER(Buffer<FLAGS>, const_name("collections.abc.Buffer"))
  template <class Flags>
  bool from_python(handle source, Flags, cleanup_list *) noexcept {
    return value.open(source.ptr());
  }
};

NB_MODULE(_cuda, m) {
  m.attr("built") = TIDE_BUILT;
  m.def("tide_error", &tide_error);

  // Without the GIL: the driver may block, and the thread that watches must go on.
  const auto def = [&m](const char *name, auto function) { m.def(name, function, nb::call_guard<nb::gil_scoped_release>()); };

  def("tide_arena_bytes", [](int device, uint64_t bytes) {
    uint64_t rounded = 0;
    const int code = tide_arena_bytes(device, bytes, &rounded);
    return std::tuple(code, rounded);
  });
  def("tide_arena_create", [](int device, uint64_t bytes) {
    uint64_t address = 0, handle = 0;
    int fd = -1;
    const int code = tide_arena_create(device, bytes, &address, &handle, &fd);
    return std::tuple(code, address, handle, fd);
  });
  def("tide_arena_import", [](int device, int fd, uint64_t bytes) {
    uint64_t address = 0, handle = 0;
    const int code = tide_arena_import(device, fd, bytes, &address, &handle);
    return std::tuple(code, address, handle);
  });
  def("tide_arena_free", &tide_arena_free);

  def("tide_ipc_create", [](uint64_t bytes, const Room &handle) {
    uint64_t address = 0;
    const int code = tide_ipc_create(bytes, &address, handle.data<void>());
    return std::tuple(code, address);
  });
  def("tide_ipc_open", [](const Array &handle) {
    uint64_t address = 0;
    const int code = tide_ipc_open(handle.data<const void>(), &address);
    return std::tuple(code, address);
  });
  def("tide_ipc_close", &tide_ipc_close);
  def("tide_ipc_free", &tide_ipc_free);

  def("tide_multicast_supported", [](int device) {
    int supported = 0;
    const int code = tide_multicast_supported(device, &supported);
    return std::tuple(code, supported);
  });
  def("tide_multicast_bytes", [](int lanes, uint64_t bytes) {
    uint64_t rounded = 0;
    const int code = tide_multicast_bytes(lanes, bytes, &rounded);
    return std::tuple(code, rounded);
  });
  def("tide_multicast_create", [](int lanes, uint64_t bytes) {
    uint64_t object = 0;
    int fd = -1;
    const int code = tide_multicast_create(lanes, bytes, &object, &fd);
    return std::tuple(code, object, fd);
  });
  def("tide_multicast_import", [](int fd) {
    uint64_t object = 0;
    const int code = tide_multicast_import(fd, &object);
    return std::tuple(code, object);
  });
  def("tide_multicast_add", &tide_multicast_add);
  def("tide_multicast_bind", &tide_multicast_bind);
  def("tide_multicast_map", [](uint64_t object, int device, int lanes, uint64_t bytes) {
    uint64_t address = 0;
    const int code = tide_multicast_map(object, device, lanes, bytes, &address);
    return std::tuple(code, address);
  });
  def("tide_multicast_unmap", &tide_multicast_unmap);
  def("tide_multicast_free", &tide_multicast_free);
  def("tide_multicast_probe", &tide_multicast_probe);

  def("tide_engine_create", [](uint64_t seed) {
    void *engine = nullptr;
    const int code = tide_engine_create(seed, &engine);
    return std::tuple(code, engine);
  });
  def("tide_engine_free", &tide_engine_free);
  def("tide_report", [](void *engine) {
    const volatile uint32_t *at = tide_report(engine);
    return std::tuple<uint32_t, uint32_t, uint32_t, uint32_t>(at[0], at[1], at[2], at[3]);
  });
  def("tide_stream_create", [] {
    uint64_t stream = 0;
    const int code = tide_stream_create(&stream);
    return std::tuple(code, stream);
  });
  def("tide_stream_free", &tide_stream_free);
  def("tide_stream_busy", &tide_stream_busy);
  def("tide_event_reserve", &tide_event_reserve);
  def("tide_event_wait", &tide_event_wait);
  def("tide_event_busy", &tide_event_busy);
  def("tide_table", [](void *engine, const Array &rows) {
    uint64_t address = 0;
    const int code = tide_table(engine, rows.data<const void>(), rows.bytes(), &address);
    return std::tuple(code, address);
  });
  def("tide_rail", [](void *engine, const Array &functions) { return tide_rail(engine, functions.data<const uint64_t>(), functions.count()); });
  def("tide_rail_channel", &tide_rail_channel);
  def("tide_peek", [](void *engine, uint64_t address, const Room &out) {
    return tide_peek(engine, address, out.bytes(), out.data<void>());
  });
  def("tide_costs", [](void *engine, bool on, const Room &out) { return tide_costs(engine, on, out.data<uint64_t>()); });
  def("tide_launch", [](void *engine, const Array &ops, const Array &streams, const Array &bases, const Array &values, float scale, uint32_t tag,
                        const Array &tags) {
    return tide_launch(engine, ops.data<const tide::Op>(), ops.count(), streams.data<const uint64_t>(), bases.data<const uint64_t>(), bases.count(),
                       values.data<const uint32_t>(), scale, tag, tags.data<const uint64_t>(), tags.count());
  });
}
