"""Images of different sizes in one batch: padding and neighbours change nothing, whatever the attention."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from examples.detr import measure
from examples.detr.attentions import ATTENTIONS
from examples.detr.backbone import Backbone, positions
from examples.detr.images import collate
from examples.detr.model import Detector
from linattn import replace_attention

SIZES = [(40, 61), (33, 64), (64, 17), (9, 9)]
every_attention = pytest.mark.parametrize("name", ATTENTIONS)


def detector(name):
    return Detector(lambda keys: ATTENTIONS[name](32, 4, keys), longest=64, num_queries=7).double()


def images():
    return [torch.randn(3, *size, dtype=torch.float64) for size in SIZES]


@every_attention
@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
def test_padding_and_neighbours_change_nothing(name, train):
    model, some = detector(name).train(train), images()
    batch, mask = collate(some)
    # what lies beside the images does not matter either
    batch = torch.where(mask.unsqueeze(1), batch, 1e3 * torch.randn_like(batch))
    with torch.set_grad_enabled(train):
        together = model(batch, mask)
        for row, image in enumerate(some):
            alone = model(*collate([image]))
            assert_close([x[row : row + 1] for x in together], list(alone), rtol=1e-9, atol=1e-11)


@every_attention
def test_gradients_are_of_the_images_alone(name):
    model, some = detector(name), [image.requires_grad_() for image in images()]
    classes, _ = model(*collate(some))
    gradients = torch.autograd.grad(classes[1].sum(), some, allow_unused=True)
    assert gradients[1].abs().sum() > 0
    assert all(not gradients[row].any() for row in (0, 2, 3))


def test_a_detector_of_torchs_attention_takes_ours_by_one_function():
    softmax, some = detector("softmax"), images()
    model = copy.deepcopy(softmax)
    old = replace_attention(model, "efficient", return_weights=False)
    assert len(old) == 6 and all(type(attention) is nn.MultiheadAttention for attention in old.values())
    classes, boxes = model(*collate(some))
    assert classes.shape == (4, 7, 11) and boxes.shape == (4, 7, 4)
    replace_attention(model, "softmax")
    assert_close(model(*collate(some)), softmax(*collate(some)), rtol=0, atol=1e-12)


def test_features_and_positions_of_an_image_alone():
    backbone, some = Backbone(3, 16).double(), images()
    features, mask = backbone(*collate(some))
    place = positions(mask, 16).unflatten(1, mask.shape[1:])
    for row, image in enumerate(some):
        alone, alone_mask = backbone(*collate([image]))
        assert alone_mask.all()
        h, w = alone.shape[2:]
        assert (h, w) == tuple(-(-size // 8) for size in image.shape[1:])
        assert_close(features[row, :, :h, :w], alone[0])
        assert_close(place[row, :h, :w], positions(alone_mask, 16)[0].unflatten(0, (h, w)))
        assert mask[row].sum() == h * w


def test_measuring(capsys, monkeypatch):
    monkeypatch.setattr(measure, "apart", measure.step)
    measure.main(["--side", "16", "32", "--attention", "softmax", "elu"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| attention | 4 tokens | 16 tokens |"
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| softmax", "| elu"]
