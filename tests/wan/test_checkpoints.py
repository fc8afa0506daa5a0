"""Checkpoints: names and strictness, files of either layout, and what diffusers itself writes and reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.test_train import train
from tests.wan.test_model import ready, small
from tests.wan.test_train import write_flat_videos
from torchtitan_tide import cpu

cpu.prepare()

from torchtitan_tide.models.wan import checkpoints  # noqa: E402
from torchtitan_tide.models.wan.args import flavors  # noqa: E402
from torchtitan_tide.models.wan.checkpoints import WanStateDictAdapter, convert, main, named, split  # noqa: E402


@pytest.fixture
def safetensors() -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed (extra: wan)")


@pytest.mark.parametrize("layout", ["original", "diffusers"])
def test_the_adapter_goes_both_ways_and_is_strict(layout: str) -> None:
    args = replace(small(), checkpoint_layout=layout)
    state = ready(args).state_dict()
    adapter = WanStateDictAdapter(args, None)
    theirs = adapter.to_hf(state)
    assert ("proj_out.weight" in theirs) == (layout == "diffusers")
    back = adapter.from_hf(theirs)
    assert back.keys() == state.keys() and all(back[name] is state[name] for name in state)
    gone = next(iter(theirs))
    with pytest.raises(ValueError, match="1 tensors are missing, the first is patch_embedding"):
        adapter.from_hf({name: value for name, value in theirs.items() if name != gone})
    with pytest.raises(ValueError, match="img_emb.weight: no tensor of a Wan transformer"):
        adapter.from_hf({**theirs, "img_emb.weight": torch.zeros(1)})
    extra = named("blocks.2.norm3.bias", layout)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 tensors are none of this model's, the first is blocks.2.norm3.bias"):
        adapter.from_hf({**theirs, extra: torch.zeros(1)})
    with pytest.raises(ValueError, match="are missing"):
        adapter.to_hf({})


def test_a14b_is_saved_in_several_files() -> None:
    mapping = WanStateDictAdapter(flavors()["t2v_a14b"], None).fqn_to_index_mapping
    assert mapping is not None and len(mapping) == 40 * 27 + 15
    assert sorted(set(mapping.values())) == list(range(1, max(mapping.values()) + 1)) and max(mapping.values()) >= 12
    assert WanStateDictAdapter(small(), None).fqn_to_index_mapping is None


def test_split_keeps_order_and_limit() -> None:
    assert split({"a": 3, "b": 3, "c": 9, "d": 1, "e": 2}, 6) == [["a", "b"], ["c"], ["d", "e"]]


@pytest.mark.parametrize("layout", ["original", "diffusers"])
def test_conversion_and_loading(safetensors: None, tmp_path: Path, layout: str) -> None:
    from safetensors.torch import save_file

    args = replace(small(), checkpoint_layout=layout)
    state = {name: value.bfloat16() for name, value in ready(args).state_dict().items()}
    (tmp_path / "first").mkdir()
    save_file(state, tmp_path / "first" / "x.safetensors")
    assert convert(tmp_path / "first", tmp_path / "second", layout, 50_000) == 69  # type: ignore[arg-type]
    index = json.loads((tmp_path / "second" / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(2 * value.numel() for value in state.values())
    assert len(set(index["weight_map"].values())) > 3
    adapter = WanStateDictAdapter(args, None)
    target = adapter.to_hf({name: torch.zeros(value.shape) for name, value in state.items()})
    dcp.load(target, storage_reader=adapter.get_hf_storage_reader(str(tmp_path / "second")), no_dist=True)
    assert all(value.equal(state[name].float()) for name, value in adapter.from_hf(target).items())

    other = WanStateDictAdapter(
        replace(args, checkpoint_layout="original" if layout == "diffusers" else "diffusers"), None
    )
    with pytest.raises(ValueError, match=f'wan.checkpoint_layout = "{layout}"'):
        other.get_hf_storage_reader(str(tmp_path / "second")).read_metadata()
    deeper = WanStateDictAdapter(small(n_layers=3), None)
    with pytest.raises(ValueError, match="27 tensors are missing"):
        deeper.get_hf_storage_reader(str(tmp_path / "second")).read_metadata()


def test_what_the_converter_refuses(safetensors: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import save_file

    state = ready(small()).state_dict()
    target = tmp_path / "target"

    def refused(name: str, tensors: dict[str, torch.Tensor] | None, index: dict | None = None) -> str:
        folder = tmp_path / name
        folder.mkdir()
        if tensors:
            save_file(tensors, folder / "model.safetensors")
        if index:
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        assert main([str(folder), str(target), "--layout", "diffusers"]) == 2
        assert not target.exists()
        return capsys.readouterr().err

    assert "holds no .safetensors" in refused("empty", None)
    assert "27 tensors" not in refused("foreign", {"something": torch.zeros(1)})
    assert "1 tensors are missing, the first is head.modulation" in refused(
        "part", {name: value for name, value in state.items() if name != "head.modulation"}
    )
    wrong = {**state, "blocks.1.ffn.0.bias": torch.zeros(3)}
    assert "blocks.1.ffn.0.bias is (3,), expected (128,)" in refused("shape", wrong)
    listed = dict.fromkeys(state, "model.safetensors")
    assert "does not agree with the files about 1 tensors" in refused(
        "index", state, {**listed, "more": "b.safetensors"}
    )


@pytest.mark.slow
def test_diffusers_writes_and_reads_the_same(safetensors: None, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed (extra: wan)")
    from safetensors.torch import load_file

    theirs = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=32, text_dim=32, freq_dim=64, ffn_dim=128, num_layers=2
    )
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    assert (tmp_path / "theirs" / "diffusion_pytorch_model.safetensors.index.json").exists()
    args = small()
    adapter = WanStateDictAdapter(args, str(tmp_path / "theirs"))
    target = adapter.to_hf({name: torch.zeros(shape) for name, shape in checkpoints.shapes(args).items()})
    dcp.load(target, storage_reader=adapter.get_hf_storage_reader(str(tmp_path / "theirs")), no_dist=True)
    assert all(value.equal(theirs.state_dict()[name]) for name, value in target.items())

    convert(tmp_path / "theirs", tmp_path / "original", "original")
    convert(tmp_path / "original", tmp_path / "again", "diffusers", 100_000)
    # Not `from_pretrained`, which takes another package, accelerate.
    again = diffusers.WanTransformer3DModel.from_config(theirs.config)
    again.load_state_dict(
        {name: value for path in (tmp_path / "again").glob("*.safetensors") for name, value in load_file(path).items()}
    )
    assert all(value.equal(theirs.state_dict()[name]) for name, value in again.state_dict().items())


@pytest.mark.slow
def test_trained_weights_are_saved_and_loaded_in_safetensors(safetensors: None, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data = [*write_flat_videos(tmp_path / "data"), "--training.local_batch_size=8", "--checkpoint.enable"]
    saved = ["--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only", "--job.dump_folder=first"]
    first = train("wan_debug", tmp_path, *data, *saved, "--training.steps=8")
    loaded = ["--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path=first/checkpoint/step-8"]
    second = train("wan_debug", tmp_path, *data, *loaded, "--job.dump_folder=second", "--training.steps=1")
    # The samples and the noise are those of the first step, the weights those of the last.
    assert float(second[0]) < float(first[0]) - 0.3
