"""What torchrun starts for one measured training: `-m torchtitan_tide.measure.entry steps|losses RECORD ... -- CONFIG.toml [overrides]`.

steps RECORD WARMUP STEPS     times and memory of STEPS steps after WARMUP, one profiled step
losses RECORD STEPS NUDGE     every step's loss; NUDGE: 0, or the number of a disturbance of the initial weights
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtitan_tide.measure.recorders import LossRecorder, StepRecorder

MODULE = "torchtitan_tide.measure.entry"


def recorder_of(words: Sequence[str]) -> StepRecorder | LossRecorder:
    """The recorder that the words before `--` ask for. Raises `ValueError`."""
    from torchtitan_tide.measure.recorders import LossRecorder, StepRecorder

    if len(words) == 4 and words[0] in ("steps", "losses"):
        make = StepRecorder if words[0] == "steps" else LossRecorder
        return make(Path(words[1]), int(words[2]), int(words[3]))
    raise ValueError(f"{' '.join(words)}: expected what this module's docstring says")


def main() -> int:
    """Exit code of the training (`torchtitan_tide.train.main`)."""
    split = sys.argv.index("--")
    words, (config, *overrides) = sys.argv[1:split], sys.argv[split + 1 :]
    from torchtitan_tide import train  # prepares the CPU before TorchTitan is imported

    recorder = recorder_of(words)
    return train.main([f"--job.config_file={config}", *overrides, *recorder.overrides()], recorder)


if __name__ == "__main__":
    sys.exit(main())
