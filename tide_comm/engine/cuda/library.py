"""The compiled part, by ctypes: raw pointers and stream handles, no libtorch. Importing this needs neither a GPU nor the library."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from tide_comm.errors import TideError

LIBRARY_ENV = "TIDE_CUDA_LIBRARY"
"""Path of the library, if it does not lie beside this file."""

_P, _I, _U64, _U32, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_float
_OUT64 = ctypes.POINTER(_U64)
_SIGNATURES = {
    "tide_arena_bytes": (_I, _U64, _OUT64),
    "tide_arena_create": (_I, _U64, _OUT64, _OUT64, ctypes.POINTER(_I)),
    "tide_arena_import": (_I, _I, _U64, _OUT64, _OUT64),
    "tide_arena_free": (_U64, _U64, _U64),
    "tide_ipc_create": (_U64, _OUT64, _P),
    "tide_ipc_open": (_P, _OUT64),
    "tide_ipc_close": (_U64,),
    "tide_ipc_free": (_U64,),
    "tide_multicast_supported": (_I, ctypes.POINTER(_I)),
    "tide_multicast_probe": (_I,),
    "tide_engine_create": (_U64, ctypes.POINTER(_P)),
    "tide_engine_free": (_P,),
    "tide_stream_create": (_OUT64,),
    "tide_stream_free": (_U64,),
    "tide_stream_busy": (_U64,),
    "tide_event_reserve": (_P, _I),
    "tide_event_wait": (_P, _I, _U64),
    "tide_event_busy": (_P, _I),
    "tide_table": (_P, _P, _U64, _OUT64),
    "tide_peek": (_P, _U64, _U64, _P),
    "tide_costs": (_P, _I, _P),
    "tide_launch": (_P, _P, _I, _P, _P, _I, _P, _F, _U32, _P, _I),
}


def path() -> Path:
    """Where the library is, or would be."""
    return Path(os.environ.get(LIBRARY_ENV) or Path(__file__).with_name("libtide_cuda.so"))


@cache
def load() -> ctypes.CDLL:
    """The library with its functions declared. Raises `TideError` if it is not there or does not load."""
    try:
        library = ctypes.CDLL(str(path()))
    except OSError as error:
        raise TideError(f"TIDE's CUDA library does not load ({error}): build it with scripts/build_cuda.sh") from None
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, _I
    library.tide_error.restype = ctypes.c_char_p
    library.tide_report.argtypes, library.tide_report.restype = (_P,), ctypes.POINTER(_U32)
    return library


def check(code: int, what: str) -> None:
    """Raises `TideError` unless `code` is 0."""
    if code:
        raise TideError(f"{what}: {load().tide_error().decode()}")
