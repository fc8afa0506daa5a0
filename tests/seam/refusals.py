"""What TIDE, or FSDP2 under it, answers with an error: what a user would call it, and parts of the message.

`test_failures` and `test_copies` assert these parts; docs/semantics.md shows them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """`says`: parts of the message, on every rank that survives. `error`: its class."""

    topic: str
    row: str
    says: tuple[str, ...]
    error: str = "TideError"

    def check(self, message: str) -> None:
        missing = [part for part in self.says if part not in message]
        assert not missing, f"{self.row}: {missing} is not in {message!r}"


ATTACH = "Refused by `attach`"
TRAINING = "Refused while training"
STOCK = "Refused as by stock FSDP2"

REFUSALS = {
    "config": Refusal(
        ATTACH,
        "Ranks with other `[tide]` values, another model, or fewer units",
        ("ranks disagree on the plan", "rank 1", "Build the same model with the same [tide] values on every rank"),
    ),
    "strict": Refusal(ATTACH, "`strict = true` and a group that would stay on stock", ("strict = true", "would stay")),
    "symm_mem": Refusal(ATTACH, '`comm = "symm_mem"` without a GPU', ('comm = "symm_mem" takes NVIDIA GPUs',)),
    "no unit": Refusal(ATTACH, "A model without `fully_shard`", ("no FSDP2 module: call fully_shard",)),
    "version": Refusal(
        ATTACH,
        "A version of PyTorch that was not tested, or whose internals changed",
        ("is not among the tested versions",),
    ),
    "other parameters": Refusal(
        TRAINING,
        "Ranks that use other parameters or units, on one machine or several",
        ("disagree", "parameters", "set_reduce_scatter_unused_params"),
    ),
    "dead": Refusal(TRAINING, "A peer that dies", ("waited for", "last heard")),
    "stalled": Refusal(TRAINING, "A peer that stalls for longer than `timeout_s`", ("timeout_s =",)),
    "dtype": Refusal(
        TRAINING,
        "Parameters of another dtype than at `attach` (`model.bfloat16()`)",
        ("change dtypes before attach, or detach and attach again",),
    ),
    "deepcopy": Refusal(
        STOCK,
        "`copy.deepcopy` of a unit or of a model with units (layers, parameters and state dicts can be copied)",
        ("FSDP does not support deepcopy",),
        "AssertionError",
    ),
    "setters": Refusal(
        STOCK,
        "`set_symm_mem_for_comm`, `set_allocate_memory_from_process_group_for_comm` after `attach`",
        ("when all gather comm is custom",),
        "AssertionError",
    ),
    "use after free": Refusal(
        STOCK, "Use of a parameter after its unit was resharded", ("setStorage",), "RuntimeError"
    ),
}
