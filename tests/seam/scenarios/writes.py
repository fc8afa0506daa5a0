"""Who writes to parameters: optimizers, averages, loads and checkpoints."""

from __future__ import annotations

from functools import partial

import torch

from tests.seam import steps
from tests.seam.models import FP32, Net, sharded
from tests.seam.scenarios.registry import under

add = under("Writes to parameters")


def fp32(place: object) -> Net:
    return sharded(policy=FP32)


def unresharded(place: object) -> Net:
    return sharded(policy=FP32, reshard_after_forward=False)


ROW = "AdamW: foreach, fused, a loop"
for kind, chosen in {"foreach": {"foreach": True}, "fused": {"fused": True}, "loop": {"foreach": False}}.items():
    add(ROW, f"adamw {kind}", fp32, optimizer=partial(steps.adamw, **chosen))
ROW = "Optimizers in backward (`register_post_accumulate_grad_hook`)"
add(ROW, "optimizer in backward", step=steps.in_backward, optimizer=steps.no_optimizer)
add(ROW, "optimizer in backward fp32", fp32, step=steps.in_backward, optimizer=steps.no_optimizer)
add("`clip_grad_norm_`", "clip", step=steps.clip, optimizer=steps.adamw)
ROW = "Averages (EMA) beside the parameters, swapped in to evaluate"
add(ROW, "ema", step=steps.ema)
add(ROW, "ema bf16 parameters", lambda place: sharded(Net().to(torch.bfloat16), FP32), step=steps.ema)
add(ROW, "ema fp32, no reshard", unresharded, step=steps.ema)
ROW = "Writes through `.data`, also right after an evaluation"
add(ROW, "data", step=steps.write_data)
add(ROW, "data fp32", fp32, step=steps.write_data)
add(ROW, "write after evaluation", unresharded, step=steps.write_after_evaluation)
ROW = "`load_state_dict`, also with `assign=True`"
add(ROW, "load", step=steps.load)
add(ROW, "load fp32", fp32, step=steps.load)
add(ROW, "load assign", step=steps.load_assign, optimizer=steps.adamw)
add(ROW, "load assign fp32", fp32, step=steps.load_assign, optimizer=steps.adamw)
ROW = "Distributed checkpoints (DCP) saved and loaded"
add(ROW, "checkpoint", step=steps.save_and_load, optimizer=steps.adamw)
add(ROW, "checkpoint fp32", fp32, step=steps.save_and_load, optimizer=steps.adamw)
ROW = "`report.detach()`, and `attach` again"
add(ROW, "detach", step=steps.detach_halfway, copies=None, optimizer=steps.adamw)
add(ROW, "attach again", step=steps.attach_again, copies=None)
