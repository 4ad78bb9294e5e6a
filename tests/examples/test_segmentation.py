"""The segmentation tasks are what they say, the networks learn something, and the pictures are drawn."""

import gzip
import json
import struct

import numpy as np
import pytest
import torch

from examples.segmentation import brightest, run
from examples.segmentation.brightest import BrightestDigit, canvases
from examples.segmentation.glyphs import drawn, mnist
from examples.segmentation.model import MIXERS, Segmenter
from examples.segmentation.nuclei import Nuclei, otsu
from examples.segmentation.task import mean_iou
from examples.segmentation.training import train


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_drawn_digits_are_digits():
    glyphs = drawn(100, seeded())
    assert glyphs.shape == (100, 14, 14)
    assert torch.equal(glyphs.amax((1, 2)), torch.ones(100)) and glyphs.min() == 0
    assert not glyphs[:, [0, -1]].any() and len(glyphs.flatten(1).unique(dim=0)) == 100


@pytest.mark.parametrize("name", ["images", "images.gz"])
def test_mnist_files(tmp_path, name):
    pixels = torch.randint(1, 256, (3, 28, 28), dtype=torch.uint8)
    raw = struct.pack(">4i", 2051, 3, 28, 28) + pixels.numpy().tobytes()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    glyphs = mnist(tmp_path / name)
    means = pixels.float().unflatten(1, (14, 2)).unflatten(3, (14, 2)).mean((2, 4))
    torch.testing.assert_close(glyphs, means / means.amax((1, 2), keepdim=True))
    (tmp_path / name).write_bytes(b"\0" * 100)
    with pytest.raises((ValueError, gzip.BadGzipFile)):
        mnist(tmp_path / name)


def test_the_mask_is_of_the_brightest_of_five():
    glyphs = drawn(30, seeded())
    images, masks = canvases(glyphs, 50, seeded(1))
    cells = images[:, 0].unflatten(1, (3, 16)).unflatten(3, (3, 16)).amax((2, 4)).flatten(1)
    marked = masks.unflatten(1, (3, 16)).unflatten(3, (3, 16)).any(4).any(2).flatten(1)
    assert ((cells > 0).sum(1) == 5).all() and (marked.sum(1) == 1).all()
    assert torch.equal(marked.int().argmax(1), cells.argmax(1))
    # from the second brightest it differs by as much on every canvas, but not from a digit on another canvas
    brightness = cells.sort(1, descending=True).values
    torch.testing.assert_close(brightness[:, 1] / brightness[:, 0], torch.full((50,), 0.85))
    assert brightness[:, 0].min() < brightness[:, 1].max()
    inside = images[:, 0][masks] / brightness[:, :1].expand(-1, 48)[masks.any(2)].mean()
    assert inside.min() > 0


def test_test_digits_are_not_those_of_training():
    task = BrightestDigit(drawn(60, seeded()), test_canvases=20)
    assert len(task.glyphs) == 54 and task.test.images.shape == (20, 1, 48, 48)
    first, again = task.draw(seeded(3)), task.draw(seeded(3))
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, task.draw(seeded(4)).images)


def nuclei_file(folder, count=15):
    rng = np.random.default_rng(0)
    masks = np.zeros((count, 24, 32), dtype=bool)
    for mask in masks:
        top, left = rng.integers(0, 14), rng.integers(0, 20)
        mask[top : top + 8, left : left + 9] = True
    images = (200 * masks + rng.integers(0, 50, masks.shape)).astype(np.uint8)
    np.savez(folder / "nuclei.npz", images=images, masks=np.packbits(masks, axis=-1))
    return folder / "nuclei.npz"


def test_nuclei_are_read_and_turned_with_their_masks(tmp_path):
    task = Nuclei(nuclei_file(tmp_path))
    assert task.test.images.shape == (3, 1, 24, 32) and task.train.masks.shape == (12, 24, 32)
    for batch in (task.test, *(task.draw(seeded(seed)) for seed in range(4))):
        assert torch.equal(batch.images[:, 0] > 0.5, batch.masks)
    assert mean_iou(otsu(task.test.images), task.test.masks) == 1
    assert mean_iou(otsu(1 - task.test.images), task.test.masks) == 1


def test_mean_iou():
    masks = torch.zeros(3, 4, 4, dtype=torch.bool)
    masks[0, :2], masks[1, :2] = True, True
    predicted = torch.zeros_like(masks)
    predicted[0, 1:3] = True
    # 4 of 12 pixels, 0 of 8, and nothing where nothing is
    assert mean_iou(predicted, masks) == pytest.approx((1 / 3 + 0 + 1) / 3)


@pytest.mark.parametrize("mixer", MIXERS)
def test_only_attention_sees_the_other_side(mixer):
    torch.manual_seed(0)
    model = Segmenter(mixer)
    for name, weight in model.named_parameters():
        if name.endswith("gamma"):
            torch.nn.init.ones_(weight)
    images = torch.rand(1, 1, 48, 64)
    changed = images.clone()
    changed[..., 40:] += 1
    moved = (model(changed) - model(images)).abs().detach()
    assert moved.shape == (1, 48, 64)
    assert (moved[..., :24].max() > 0) == (mixer != "none")


def test_a_run_says_what_it_did_and_does_it_again():
    task = BrightestDigit(drawn(60, seeded()), test_canvases=30)
    run, again = (train(task, "efficient", steps=3) for _ in range(2))
    assert run["predicted"].shape == (30, 48, 48) and run["steps"] == 3
    assert run["mean IoU"] == round(mean_iou(run["predicted"], task.test.masks), 4)
    assert torch.equal(run["predicted"], again["predicted"])


def test_nuclei_need_a_file(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run.main(["--task", "nuclei", "--out", str(tmp_path / "out")])
    assert "needs a file: --nuclei" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_whole_example(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "DRAWN_DIGITS", 40)
    monkeypatch.setattr(BrightestDigit, "batch_size", 2)
    monkeypatch.setattr(run, "BrightestDigit", lambda glyphs: BrightestDigit(glyphs, test_canvases=6))
    monkeypatch.setattr("examples.segmentation.picture.ROWS", 2)
    out = tmp_path / "out"
    run.main(["--nuclei", str(nuclei_file(tmp_path)), "--steps", "1", "--jobs", "1", "--out", str(out)])
    lines = [json.loads(line) for line in (out / "segmentation.jsonl").read_text().splitlines()]
    assert [line["mixer"] for line in lines if line["task"] == "brightest digit"] == list(MIXERS)
    assert [line["mixer"] for line in lines if line["task"] == "nuclei"] == ["none", "efficient"]
    printed = capsys.readouterr().out
    assert printed.count("| mixer |") == 2 and "| threshold | 1.000 |" in printed
    for name in ("brightest-digit", "nuclei"):
        assert (out / f"segmentation-{name}.svg").read_text().count("<image") >= 8
    assert brightest.CELLS * brightest.CELL == 48
