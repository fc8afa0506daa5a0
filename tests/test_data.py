"""The manual's documents, its tokenizer, text folders, and TorchTitan's dataset on top of them."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_tide import cpu, data, manual, tokenizer

cpu.prepare()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def text_dataset(name: str, path: str | None, rank: int = 0, ranks: int = 2, seq_len: int = 32) -> Any:
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

    data.register()
    made = HuggingFaceTokenizer(str(tokenizer.ensure_manual_tokenizer()))
    return HuggingFaceTextDataset(name, path, made, seq_len, rank, ranks, infinite=True)


def take(dataset: Any, n: int) -> list[list[int]]:
    found = []
    for sample, _ in dataset:
        found.append(sample["input"].tolist())
        if len(found) == n:
            break
    return found


def test_documents_are_the_same_in_every_process() -> None:
    code = "from torchtitan_tide import manual; import hashlib;"
    code += "print(hashlib.sha256(repr(manual.documents('train')).encode()).hexdigest())"
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[1])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] != ""


def test_splits_are_large_and_apart() -> None:
    train, validation = manual.documents("train"), manual.documents("validation")
    train_chars, validation_chars = sum(map(len, train)), sum(map(len, validation))
    assert len(train) >= 128, "every rank of a cluster needs documents"
    assert train_chars > 300_000
    assert 0.04 < validation_chars / (train_chars + validation_chars) < 0.25
    assert not set(train) & set(validation)


def test_cut_loses_nothing() -> None:
    text = "".join(f"line {i}\n" + "\n" * (i % 7 == 0) for i in range(1000))
    pieces = manual.cut(text, 500)
    assert "".join(pieces) == text
    assert all(len(piece) >= 500 for piece in pieces[:-1])


def test_tokenizer_is_trained_once_and_reads_back(cache: Path) -> None:
    from tokenizers import Tokenizer

    folder = tokenizer.ensure_manual_tokenizer()
    assert folder.parent == cache / "torchtitan_tide"
    made = (folder / "tokenizer.json").stat().st_mtime_ns
    assert tokenizer.ensure_manual_tokenizer() == folder
    assert (folder / "tokenizer.json").stat().st_mtime_ns == made
    loaded = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert loaded.get_vocab_size() == tokenizer.VOCAB_SIZE
    text = "def f(x): return x ** 2  # naïve ✓"
    assert loaded.decode(loaded.encode(text).ids) == text
    assert json.loads((folder / "tokenizer_config.json").read_text())["bos_token"] == tokenizer.BOS


def test_tokenizer_made_by_many_at_once(cache: Path) -> None:
    with multiprocessing.get_context("forkserver").Pool(3) as pool:
        folders = pool.map(_make_tokenizer, [str(cache)] * 3)
    assert len(set(folders)) == 1
    assert [p.name for p in (cache / "torchtitan_tide").iterdir()] == [Path(folders[0]).name], "no scratch folder left"


def _make_tokenizer(cache: str) -> str:
    import os

    os.environ["XDG_CACHE_HOME"] = cache
    return str(tokenizer.ensure_manual_tokenizer())


def test_waiting_for_a_tokenizer_ends(cache: Path) -> None:
    with pytest.raises(TimeoutError, match="local rank 0"):
        tokenizer.wait_for_manual_tokenizer(timeout_s=0.2)


def test_ranks_read_different_documents(cache: Path) -> None:
    first, second = (take(text_dataset("python_manual", None, rank), 20) for rank in (0, 1))
    assert first != second
    assert take(text_dataset("python_manual", None, 0), 20) == first


def test_reading_goes_on_where_a_checkpoint_left_it(cache: Path) -> None:
    dataset = text_dataset("python_manual", None)
    iterator = iter(dataset)
    for _ in range(7):
        next(iterator)
    state = json.loads(json.dumps(dataset.state_dict()))
    expected = [next(iterator)[0]["input"].tolist() for _ in range(5)]
    resumed = text_dataset("python_manual", None)
    resumed.load_state_dict(state)
    assert take(resumed, 5) == expected


def test_text_folder_reads_all_kinds(tmp_path: Path, cache: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("one\ntwo\n")
    (folder / "deep" / "b.md").write_text("# three\n")
    (folder / "c.jsonl").write_text('{"text": "four", "id": 1}\n{"text": "five", "id": 2}\n')
    pq.write_table(pa.table({"text": ["six", "seven"], "n": [1, 2]}), folder / "d.parquet")
    (folder / "ignored.bin").write_bytes(b"\0")
    found = [sample["text"].strip() for sample in data.load_text_folder(str(folder))]
    assert sorted(found) == sorted(["one\ntwo", "# three", "four", "five", "six", "seven"])
    assert len(take(text_dataset("text_folder", str(folder), ranks=2, seq_len=4), 12)) == 12


def test_text_folder_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        data.load_text_folder(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"holds no \.txt"):
        data.load_text_folder(str(tmp_path))
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(ValueError, match='needs the field "text"'):
        data.load_text_folder(str(tmp_path))


def test_one_text_file_serves_many_ranks(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "book.txt").write_text("".join(f"paragraph {i} of the book\n\n" for i in range(4000)))
    shares = [take(text_dataset("text_folder", str(folder), rank, ranks=4, seq_len=64), 5) for rank in range(4)]
    assert all(shares[0] != other for other in shares[1:])


def test_a_rank_without_a_document_is_an_error(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.txt").write_text("short")

    def loader(rank: int) -> SimpleNamespace:
        return SimpleNamespace(dataset=text_dataset("text_folder", str(tmp_path), rank, ranks=2))

    data.check_share(loader(0), 2)
    with pytest.raises(ValueError, match="fewer documents than the 2"):
        data.check_share(loader(1), 2)


def test_torchtitans_own_datasets_stay() -> None:
    from torchtitan.hf_datasets.text_datasets import DATASETS

    data.register()
    data.register()
    assert {"c4", "c4_test", "c4_validation", "python_manual", "text_folder"} <= set(DATASETS)
