"""The few NCCL calls that PyTorch does not offer, by ctypes on the libnccl that this process already uses."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

from tide_comm.errors import TideError

OLDEST = 23102
"""2.31.2: the first whose one-sided calls take several signal indices. Before it puts could be lost, and windows that share an allocation
corrupted."""
COLL_SYMMETRIC = 1
"""NCCL_WIN_COLL_SYMMETRIC: what a put's source and destination must lie in."""
WINDOW_ALIGN_BYTES = 4096

_P, _I, _Z = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_OUT = ctypes.POINTER(_P)


class _UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * 128)]


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (ctypes.POINTER(_I),),
    "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
    "ncclCommInitRank": (_OUT, _I, _UniqueId, _I),
    "ncclCommDestroy": (_P,),
    "ncclCommGetAsyncError": (_P, ctypes.POINTER(_I)),
    "ncclMemAlloc": (_OUT, _Z),
    "ncclMemFree": (_P,),
    "ncclCommWindowRegister": (_P, _P, _Z, _OUT, _I),
    "ncclCommWindowDeregister": (_P, _P),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclPutSignal": (_P, _Z, _I, _I, _P, _Z, _I, _I, ctypes.c_uint, _P, _P),
}
LAUNCHED = ("ncclPutSignal", "ncclGroupStart", "ncclGroupEnd", "ncclGetErrorString")
"""What the executor calls (csrc/executor.cu, `tide_rail`), in its order."""
_IN_PROGRESS = 7
"""ncclInProgress: no error."""
HOW_TO_GET = (
    "PyTorch brings an older one; install the newer wheel over it, in every environment of the job: "
    "pip install --no-deps 'nvidia-nccl-cu13==2.31.2' (docs/clusters.md)"
)


def loaded_path() -> str:
    """The libnccl that is mapped into this process (PyTorch's), or the one that the loader would find."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.search(r"(/\S*/libnccl\.so\S*)$", line)
        if found:
            return found[1]
    return "libnccl.so.2"


def version_name(code: int) -> str:
    """23102 -> "2.31.2"."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


class Nccl:
    """All methods raise `TideError`: with NCCL's own words, or where NCCL is missing or older than 2.31.2."""

    def __init__(self, path: str | None = None) -> None:
        path = path or loaded_path()
        try:
            self.library = ctypes.CDLL(path)
        except OSError as error:
            raise TideError(f"NCCL does not load ({error}): is this PyTorch built with CUDA?") from None
        self.library.ncclGetVersion.argtypes = _SIGNATURES["ncclGetVersion"]
        code = _I()
        self._check("ncclGetVersion", ctypes.byref(code))
        self.version = version_name(code.value)
        """Of the library in use; `torch.cuda.nccl.version()` gives the one that PyTorch was built with."""
        if code.value < OLDEST:
            raise TideError(f"NCCL {self.version} ({path}) is too old: rails need {version_name(OLDEST)}. {HOW_TO_GET}")
        for name, arguments in _SIGNATURES.items():
            try:
                getattr(self.library, name).argtypes = arguments
            except AttributeError:
                raise TideError(f"NCCL {self.version} ({path}) has no {name}") from None
        for name in ("ncclGetErrorString", "ncclGetLastError"):
            getattr(self.library, name).restype = ctypes.c_char_p
        self.library.ncclGetLastError.argtypes = (_P,)

    def _check(self, name: str, *arguments: object) -> None:
        code = getattr(self.library, name)(*arguments)
        if code:
            self.library.ncclGetErrorString.restype = self.library.ncclGetLastError.restype = ctypes.c_char_p
            words = self.library.ncclGetErrorString(code).decode()
            last = (self.library.ncclGetLastError(None) or b"").decode()
            raise TideError(f"{name}: {words}" + (f" ({last})" if last else ""))

    def addresses(self) -> list[int]:
        """Addresses of the functions of `LAUNCHED`, for the executor."""
        return [ctypes.cast(getattr(self.library, name), _P).value or 0 for name in LAUNCHED]

    def trouble(self, comm: int) -> str:
        """What has gone wrong on a communicator since it was made, e.g. a line that went down; "" for nothing."""
        code = _I()
        self._check("ncclCommGetAsyncError", comm, ctypes.byref(code))
        if code.value in (0, _IN_PROGRESS):
            return ""
        last = (self.library.ncclGetLastError(None) or b"").decode()
        return self.library.ncclGetErrorString(code.value).decode() + (f" ({last})" if last else "")

    def unique_id(self) -> bytes:
        """128 bytes by which ranks find each other."""
        made = _UniqueId()
        self._check("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def init(self, world: int, unique_id: bytes, rank: int) -> int:
        """A communicator; collective. The current device is the rank's."""
        made = _P()
        self._check("ncclCommInitRank", ctypes.byref(made), world, _UniqueId.from_buffer_copy(unique_id), rank)
        return made.value or 0

    def destroy(self, comm: int) -> None:
        self._check("ncclCommDestroy", comm)

    def allocate(self, nbytes: int) -> int:
        """Device memory that NCCL itself made; returns its address."""
        made = _P()
        self._check("ncclMemAlloc", ctypes.byref(made), nbytes)
        return made.value or 0

    def free(self, address: int) -> None:
        self._check("ncclMemFree", address)

    def register(self, comm: int, address: int, nbytes: int) -> int:
        """A symmetric window over [address, address + nbytes), equally large on all ranks; collective. `address`: a multiple of 4096.

        NCCL reports success with a NULL window where it has no symmetric memory: that is an error here.
        """
        made = _P()
        self._check("ncclCommWindowRegister", comm, address, nbytes, ctypes.byref(made), COLL_SYMMETRIC)
        if not made.value:
            raise TideError(
                "ncclCommWindowRegister: a NULL window, so NCCL has no symmetric memory between these ranks"
            )
        return made.value

    def deregister(self, comm: int, window: int) -> None:
        self._check("ncclCommWindowDeregister", comm, window)
