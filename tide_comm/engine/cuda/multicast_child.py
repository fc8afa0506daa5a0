"""Started by multicast.py as a script, MODULE DEVICE (MODULE: the file of `_cuda`): makes a multicast object and frees it.

Exit status 0: it worked; else the last line says why.
Imports nothing of TIDE, so that it starts fast. The C function looks at the environment before it touches the driver.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location


def main() -> int:
    spec = spec_from_file_location("_cuda", sys.argv[1])
    assert spec is not None and spec.loader is not None
    library = module_from_spec(spec)
    spec.loader.exec_module(library)
    code: int = library.tide_multicast_probe(int(sys.argv[2]))
    print(library.tide_error() if code else "multicast works", flush=True)
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main())
