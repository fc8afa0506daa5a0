"""Sources of samples, how ranks share them, and that a resumed dataset goes on as if never stopped."""

from __future__ import annotations

import itertools
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from torchtitan_tide import cpu

cpu.prepare()

from torchtitan_tide.models.wan import photographs  # noqa: E402
from torchtitan_tide.models.wan.args import WanModelArgs  # noqa: E402
from torchtitan_tide.models.wan.data import WanDataset, collate, open_source  # noqa: E402
from torchtitan_tide.models.wan.parquet import write_parquet  # noqa: E402
from torchtitan_tide.models.wan.samples import VAE_MEAN, VAE_STD, Sample, condition_of, normalise  # noqa: E402
from torchtitan_tide.models.wan.webdataset import write_webdataset  # noqa: E402

ARGS = WanModelArgs(dim=64, n_heads=2, text_dim=8, text_len=4)
I2V = WanModelArgs(dim=64, n_heads=2, text_dim=8, text_len=4, condition_channels=20)
FORMATS = {"wan_parquet": (write_parquet, ".parquet"), "wan_webdataset": (write_webdataset, ".tar")}


def sample(number: int, first_frame: bool = False, dtype: torch.dtype = torch.float32) -> Sample:
    latents = torch.full((16, 2, 4, 6), float(number)).to(dtype)
    return Sample(latents, torch.full((3, 8), 0.5).to(dtype), latents / 2 if first_frame else None)


def fill(folder: Path, name: str, shards: list[int], first_frame: bool = False, stated: str = "normalised") -> str:
    write, suffix = FORMATS[name]
    number = itertools.count()
    for shard, count in enumerate(shards):
        rows = [(f"s{n}", "a caption", sample(n, first_frame)) for n in itertools.islice(number, count)]
        write(folder / f"part-{shard:03}{suffix}", rows, stated)
    return str(folder)


def numbers(dataset: WanDataset, count: int) -> list[int]:
    return [int(latents.flatten()[0]) for _, latents in itertools.islice(dataset, count)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shards, ranks", [([5, 20, 7, 3], 2), ([20, 9], 3), ([12], 4)])
def test_ranks_share_all_samples_and_resume_anywhere(tmp_path: Path, name: str, shards: list[int], ranks: int) -> None:
    source = open_source(name, fill(tmp_path, name, shards), ARGS, "normalised")
    seen: list[int] = []
    for rank in range(ranks):
        epoch = WanDataset(source, ARGS, rank, ranks)
        whole = numbers(epoch, 40)
        if len(shards) >= ranks:
            count = sum(shards[rank::ranks])
        else:
            count = len({*whole})
        seen += whole[:count]
        if 2 * count <= len(whole):
            assert sorted(whole[count : 2 * count]) == sorted(whole[:count])
        for stop in (1, 8, 9, count, count + 2):
            first = WanDataset(source, ARGS, rank, ranks)
            assert numbers(first, stop) == whole[:stop]
            second = WanDataset(source, ARGS, rank, ranks)
            second.load_state_dict(first.state_dict())
            assert numbers(second, 40 - stop) == whole[stop:]
    assert sorted(seen) == list(range(sum(shards)))


@pytest.mark.parametrize("name", FORMATS)
def test_fields_and_their_shapes(tmp_path: Path, name: str) -> None:
    source = open_source(name, fill(tmp_path, name, [3], first_frame=True), I2V, "normalised")
    inputs, latents = next(iter(WanDataset(source, I2V, 0, 1)))
    assert latents.shape == (16, 2, 4, 6) and inputs["condition"].shape == (20, 2, 4, 6)
    assert inputs["text"].shape == (4, 8)
    assert inputs["text"][:, 0].tolist() == [0.5, 0.5, 0.5, 0.0]
    batch, labels = collate([(inputs, latents)] * 2)
    assert batch["text"].shape == (2, 4, 8) and labels.shape == (2, 16, 2, 4, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_survive(tmp_path: Path, dtype: torch.dtype) -> None:
    for name, (write, suffix) in FORMATS.items():
        write(tmp_path / f"a{suffix}", [("a", "", sample(3, dtype=dtype))], "normalised")
        found = next(open_source(name, str(tmp_path), ARGS, "normalised").read(0, 0))()
        assert found.latents.float().equal(sample(3, dtype=dtype).latents.float())
        assert found.latents.dtype == (dtype if name == "wan_parquet" or dtype != torch.bfloat16 else torch.float32)


def test_raw_latents_are_normalised(tmp_path: Path) -> None:
    folder = fill(tmp_path, "wan_parquet", [2], stated="raw")
    with pytest.raises(ValueError, match='holds raw latents, wan.latents is "normalised"'):
        open_source("wan_parquet", folder, ARGS, "normalised")
    _, latents = next(iter(WanDataset(open_source("wan_parquet", folder, ARGS, "raw"), ARGS, 0, 1, "raw")))
    assert latents[2, 0, 0, 0].item() == pytest.approx((0 - VAE_MEAN[2]) / VAE_STD[2])
    assert normalise(torch.ones(16, 1, 1, 1))[15].item() == pytest.approx((1 + 0.2921) / 1.9160)


def test_the_condition_of_image_to_video() -> None:
    condition = condition_of(torch.full((16, 3, 2, 2), 5.0))
    assert condition[:4, 0].unique().tolist() == [1] and condition[:4, 1:].unique().tolist() == [0]
    assert condition[4:].unique().tolist() == [5]


class Missing:
    """Files that are not what their names say."""

    @staticmethod
    def nothing(folder: Path) -> None:
        pass

    @staticmethod
    def no_parquet(folder: Path) -> None:
        (folder / "a.parquet").write_text("no parquet")

    @staticmethod
    def no_tar(folder: Path) -> None:
        (folder / "a.tar").write_text("no tar at all")

    @staticmethod
    def empty_sample(folder: Path) -> None:
        with tarfile.open(folder / "a.tar", "w") as tar:
            tar.addfile(tarfile.TarInfo("x.txt"))


@pytest.mark.parametrize(
    "name, make, args, message",
    [
        ("wan_parquet", Missing.nothing, ARGS, "holds no .parquet file"),
        ("wan_parquet", Missing.no_parquet, ARGS, "no parquet file"),
        ("wan_webdataset", Missing.no_tar, ARGS, "no tar file without compression"),
        ("wan_webdataset", Missing.empty_sample, ARGS, "no .vae_latent.npy, only txt"),
        (
            "wan_parquet",
            lambda folder: fill(folder, "wan_parquet", [1]),
            I2V,
            "lacks the columns first_frame_latent_bytes",
        ),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, name: str, make: Callable[[Path], object], args: WanModelArgs, message: str
) -> None:
    make(tmp_path)
    with pytest.raises(ValueError, match=message):
        open_source(name, str(tmp_path), args, "normalised")


def test_too_few_samples_and_other_shards(tmp_path: Path) -> None:
    source = open_source("wan_parquet", fill(tmp_path, "wan_parquet", [2]), ARGS, "normalised")
    with pytest.raises(ValueError, match="too few samples for 4 ranks"):
        next(iter(WanDataset(source, ARGS, 3, 4)))
    state = {**WanDataset(source, ARGS, 0, 1).state_dict(), "shards": 9}
    with pytest.raises(ValueError, match="had 9 shards, there are 1"):
        WanDataset(source, ARGS, 0, 1).load_state_dict(state)


def test_other_sizes_are_refused(tmp_path: Path) -> None:
    source = open_source("wan_parquet", fill(tmp_path, "wan_parquet", [1]), ARGS, "normalised")
    with pytest.raises(ValueError, match="takes .up to 4, 16."):
        next(iter(WanDataset(source, WanModelArgs(dim=64, n_heads=2, text_dim=16, text_len=4), 0, 1)))
    one, other = (
        ({"text": torch.zeros(1)}, torch.zeros(16, 1, 2, 2)),
        ({"text": torch.zeros(1)}, torch.zeros(16, 2, 2, 2)),
    )
    with pytest.raises(ValueError, match="takes one size"):
        collate([one, other])


@pytest.fixture
def photos() -> Iterator[None]:
    if photographs.folder() is None:
        pytest.skip("scikit-learn, which brings the photographs, is not installed (extra: photos)")
    yield


def test_photographs_are_real_repeatable_and_held_out(photos: None) -> None:
    picture = photographs.coefficients("china")
    assert picture.shape == (16, 53, 80)
    torch.testing.assert_close(picture.std(dim=(1, 2)), torch.ones(16))
    # Neighbouring patches of a photograph are alike; noise's are not.
    brightness = picture[0]
    assert (brightness[:, 1:] * brightness[:, :-1]).mean() > 0.7
    made = [open_source(f"wan_photographs{split}", None, ARGS, "normalised") for split in ("", "_validation")]
    train, validation = ([call() for call in itertools.islice(source.read(3, 5), 8)] for source in made)
    assert all(s.latents.shape == (16, 3, 8, 12) and s.text.shape == (3, 8) for s in train + validation)
    assert all(s.latents.square().mean().item() == pytest.approx(1, abs=1e-4) for s in train)
    again = next(made[0].read(3, 5))()
    assert again.latents.equal(train[0].latents) and again.text.equal(train[0].text)
    assert not any(a.latents.equal(b.latents) for a in train for b in validation)


def test_noise_is_a_video_of_the_paper() -> None:
    args = WanModelArgs(dim=64, n_heads=2, text_dim=8, text_len=4, condition_channels=20)
    for rank in range(2):
        first, again = (
            next(iter(WanDataset(open_source("wan_noise", None, args, "normalised"), args, rank, 2))) for _ in range(2)
        )
        assert first[1].shape == (16, 20, 60, 104) and first[0]["text"].shape == (4, 8)
        assert first[0]["condition"].shape == (20, 20, 60, 104) and first[1].equal(again[1])
        assert abs(float(first[1].std()) - 1) < 0.01
