"""`python -m tide_comm.doctor [--json]`: what `tide doctor` does, also for torchrun's `-m`."""

import sys

from tide_comm.doctor.together import run


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--json"]):
        print(f"error: takes --json or nothing; got {' '.join(arguments)}", file=sys.stderr)
        return 2
    return run("--json" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
