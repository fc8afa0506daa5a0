"""The byte-level BPE tokenizer of the Python manual: trained once, cached, the same for every rank.

`model.hf_assets_path = "python_manual"` selects it; any other value is a folder of Hugging Face assets, as in TorchTitan.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

from tide_comm.progress import progress
from torchtitan_tide.manual import documents

logger = logging.getLogger("tide")

PYTHON_MANUAL = "python_manual"
VOCAB_SIZE = 2048
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/torchtitan_tide`, or the same under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "torchtitan_tide"


def manual_tokenizer_path(vocab_size: int = VOCAB_SIZE) -> Path:
    """Where this Python's manual tokenizer belongs: the text differs between Python versions, so its hash is in the name."""
    digest = hashlib.sha256("\0".join(documents("train")).encode()).hexdigest()[:12]
    return cache_root() / f"python_manual-{vocab_size}-{digest}"


def ensure_manual_tokenizer(vocab_size: int = VOCAB_SIZE) -> Path:
    """Train the tokenizer unless it is cached; returns its folder. Safe when several processes do it at once."""
    path = manual_tokenizer_path(vocab_size)
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    logger.info("TIDE: training the Python manual's tokenizer, once: %s", path)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        with progress(logger, f"training a tokenizer of {vocab_size} tokens"):
            _train(scratch, vocab_size)
        try:
            # A reader sees the whole folder or none of it.
            scratch.rename(path)
        except OSError:
            # Another process was first: its folder holds the same tokenizer.
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def wait_for_manual_tokenizer(timeout_s: float = 120.0) -> Path:
    """Folder of the tokenizer that another process is making. Raises `TimeoutError` when it does not appear."""
    path = manual_tokenizer_path()
    deadline = time.monotonic() + timeout_s
    while not path.is_dir():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no tokenizer at {path} after {timeout_s:.0f} s; local rank 0 should have made it")
        time.sleep(0.1)
    return path


def _train(folder: Path, vocab_size: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, which TorchTitan's tokenizer reads, into `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents("train"), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": EOS, "add_bos_token": True, "add_eos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
