"""`tide doctor` alone or under torchrun: there the machines' answers are gathered, and rank 0 prints one table.

    torchrun --nnodes 8 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m tide_comm.doctor

Of each machine the rank with LOCAL_RANK 0 reads; the others only take part in the gathering, over gloo.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from tide_comm.doctor.examine import Examination, examine
from tide_comm.doctor.show import differences, machine_lines, together_lines

JOIN_LIMIT = timedelta(seconds=120)
"""For the slowest machine to start, and to have read itself."""


def under_torchrun(environment: Mapping[str, str]) -> bool:
    return all(name in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def gather_examinations(mine: Examination | None) -> list[Examination]:
    """Collective, over gloo: the machines' answers by rank, on every rank. Raises `RuntimeError` if not all ranks come in time."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=JOIN_LIMIT)
    try:
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, mine)
    finally:
        dist.destroy_process_group()
    return [theirs for theirs in everybody if theirs is not None]


def together_data(examinations: Sequence[Examination]) -> dict[str, Any]:
    different = [{"check": d.name, "odd": d.odd, "others": d.common} for d in differences(examinations)]
    return {
        "machines": [e.as_data() for e in examinations],
        "differences": different,
        "exit_code": max(e.exit_code for e in examinations),
    }


def run(as_json: bool = False, environment: Mapping[str, str] | None = None) -> int:
    """Prints; the exit code is 0 where TIDE's engine for the hardware that is there works, on all machines; 1 where not."""
    environment = os.environ if environment is None else environment
    if not under_torchrun(environment):
        mine = examine()
        print(json.dumps(mine.as_data(), indent=1) if as_json else "\n".join(machine_lines(mine)))
        return mine.exit_code
    reads = environment.get("LOCAL_RANK", "0") == "0"
    own = examine() if reads else None
    try:
        everybody = gather_examinations(own)
    except (RuntimeError, ValueError) as error:
        if own is not None:
            print(f"{own.host}: the other machines could not be asked: {str(error).splitlines()[0]}")
            print("\n".join(machine_lines(own)), flush=True)
        return 1
    if environment["RANK"] == "0":
        if as_json:
            print(json.dumps(together_data(everybody), indent=1), flush=True)
        else:
            print(
                "\n".join(machine_lines(everybody[0]) if len(everybody) == 1 else together_lines(everybody)), flush=True
            )
    return max(e.exit_code for e in everybody)
