"""scripts/prepare_wan_data.py with a small VAE and a small umT5 of random weights, on videos made here."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import pytest
import torch

from torchtitan_tide import cpu

cpu.prepare()

from torchtitan_tide.models.wan.args import WanModelArgs  # noqa: E402
from torchtitan_tide.models.wan.data import WanDataset, open_source  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_wan_data", ROOT / "scripts" / "prepare_wan_data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--frames", "80"], "--frames 80: takes 4 n + 1"),
        (["--height", "488"], "--height 488: takes a multiple of 16"),
        (["--part", "2/2"], "--part 2/2: takes I/N"),
        ([], "holds no video"),
    ],
)
def test_mistakes_are_told_in_a_line(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert script.main([str(tmp_path), str(tmp_path / "out"), "--model", "none", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def make_model(folder: Path) -> None:
    """A repository as diffusers lays it out: 16 channels of latents, 32 of text."""
    import tokenizers
    from diffusers import AutoencoderKLWan
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    torch.manual_seed(0)
    AutoencoderKLWan(base_dim=8, z_dim=16, num_res_blocks=1).save_pretrained(folder / "vae")
    config = UMT5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    UMT5EncoderModel(config).save_pretrained(folder / "text_encoder")
    words = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", "a", "grey", "bar"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    wrapped.save_pretrained(folder / "tokenizer")


def make_video(path: Path, frames: int, caption: str) -> None:
    """A bar that moves a little every frame, 24 frames a second."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=24)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for i in range(frames):
            picture = torch.zeros(64, 96, 3, dtype=torch.uint8)
            picture[:, 4 * i : 4 * i + 16] = 160
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture.numpy(), format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    path.with_suffix(".txt").write_text(caption)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["parquet", "webdataset"])
def test_videos_become_samples(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    for name in ("diffusers", "transformers", "av"):
        pytest.importorskip(name, reason=f"{name} is not installed (extra: wan)")
    torch.set_num_threads(1)
    make_model(tmp_path / "model")
    (tmp_path / "videos").mkdir()
    for name, frames, caption in (("one", 20, "a grey\n bar"), ("two", 20, "a bar"), ("short", 6, "a bar")):
        make_video(tmp_path / "videos" / f"{name}.mp4", frames, caption)
    (tmp_path / "videos" / "broken.mp4").write_text("no video")
    (tmp_path / "videos" / "broken.txt").write_text("a bar")
    sizes = ["--frames", "9", "--height", "32", "--width", "48", "--fps", "12", "--first-frame", "--psnr"]
    places = [str(tmp_path / "videos"), str(tmp_path / "out"), "--model", str(tmp_path / "model"), "--format", form]
    assert script.main([*places, *sizes, "--samples-per-file", "1", "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert "2 samples in 2 files, latents (16, 3, 4, 6)" in told and "2 videos left out" in told
    assert "short.mp4: left out: has 3 frames at 12 a second, 9 are needed" in told
    assert "broken.mp4: left out: cannot be decoded" in told and "one.mp4: text of 4 tokens" in told

    args = WanModelArgs(dim=64, n_heads=2, text_dim=32, text_len=8, condition_channels=20)
    source = open_source(f"wan_{form}", str(tmp_path / "out"), args, "normalised")
    for inputs, latents in itertools.islice(WanDataset(source, args, 0, 1), 2):
        assert latents.shape == (16, 3, 4, 6)
        # The VAE is causal in time: the first latent frame knows only the first frame.
        torch.testing.assert_close(inputs["condition"][4:, 0], latents[:, 0], rtol=1e-3, atol=1e-3)
        assert not inputs["condition"][4:, 1:].allclose(latents[:, 1:], atol=1e-2)
    assert (tmp_path / "out" / "empty_text.npy").exists()
    assert script.main([*places, *sizes]) == 2
    assert "has files of part 0 already" in capsys.readouterr().err
