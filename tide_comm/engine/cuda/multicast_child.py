"""Started by multicast.py as a script, LIBRARY DEVICE: makes a multicast object and frees it.

Exit status 0: it worked; else the last line says why.
Imports nothing of TIDE, so that it starts fast. The C function looks at the environment before it touches the driver.
"""

import ctypes
import sys


def main() -> int:
    library = ctypes.CDLL(sys.argv[1])
    library.tide_error.restype = ctypes.c_char_p
    code: int = library.tide_multicast_probe(int(sys.argv[2]))
    print(library.tide_error().decode() if code else "multicast works", flush=True)
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main())
