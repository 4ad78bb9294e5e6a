"""Images of any shape, against the original where it runs, and against the formula where it does not."""

import itertools
import math

import pytest
import torch
from linear_attention_transformer.images import ImageLinearAttention as Original
from torch.testing import assert_close

from linattn import ChannelLinearAttention, ImageLinearAttention, PositionLinearAttention

SMALL = {"key_dim": 5, "value_dim": 5, "heads": 2}


def image(h=6, w=11, chan=3, b=2):
    return torch.randn(b, chan, h, w, dtype=torch.float64)


def define(attention, x, context=None):
    """The formula, pixel by pixel."""
    q, k, v = (c(x) for c in (attention.to_q, attention.to_k, attention.to_v))
    size = q.shape[-2:]
    q, k, v = (t.flatten(2).unflatten(1, (attention.heads, -1)) for t in (q, k, v))
    if context is not None:
        more = (c(context).flatten(2).unflatten(1, (attention.heads, -1)) for c in (attention.to_k, attention.to_v))
        k, v = (torch.cat([own, other], -1) for own, other in zip((k, v), more, strict=True))
    scale = attention.key_dim**0.25
    q = (q / scale).softmax(2) if attention.inner.feature_map.norm_queries else q / scale
    y = torch.einsum("bhdn,bhdm,bhem->bhen", q, (k / scale).softmax(3), v)
    return attention.to_out(y.flatten(1, 2).unflatten(2, size))


@pytest.mark.parametrize("norm_queries", [True, False])
@pytest.mark.parametrize("options", [{}, {"kernel_size": 3, "padding": 1}, {"chan_out": 4}, {"heads": 1}], ids=str)
def test_the_originals_weights_give_the_originals_numbers(norm_queries, options):
    """Without a context: its keys are not scaled there, as those of the image are."""
    options = SMALL | options | {"norm_queries": norm_queries}
    theirs, mine = Original(3, **options).double(), ImageLinearAttention(3, **options).double()
    mine.load_state_dict(theirs.state_dict())
    x = image()
    assert_close(mine(x), theirs(x))


CONVOLUTIONS = [
    {},
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "padding": 1, "stride": 2},
    {"kernel_size": 3},
    {"kernel_size": (3, 1), "padding": (1, 0), "stride": (1, 2)},
    {"key_dim": 7, "value_dim": 4},
]


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("context", [False, True])
def test_it_is_the_formula(options, context):
    attention, x = ImageLinearAttention(3, 4, **(SMALL | options)).double(), image()
    more = image(5, 8) if context else None
    y = attention(x, more)
    assert_close(y, define(attention, x, more))
    assert y.shape[:2] == (2, 4)
    # turning the image turns the result
    if "kernel_size" not in options:
        assert_close(attention(x.mT, more), y.mT)


def test_the_size_is_the_convolutions():
    attention = ImageLinearAttention(3, kernel_size=3, padding=1, stride=2, **SMALL)
    assert attention(torch.randn(1, 3, 9, 16)).shape == (1, 3, 5, 8)
    assert ImageLinearAttention(3, kernel_size=3, **SMALL)(torch.randn(1, 3, 9, 16)).shape == (1, 3, 5, 12)


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("context", [False, True])
def test_padding_and_neighbours_change_nothing(options, context):
    """Images of different sizes in one batch, each in a corner, rubbish beside it."""
    attention = ImageLinearAttention(3, 4, **(SMALL | options)).double()
    sizes, more_sizes = [(8, 12), (5, 12), (7, 6)], [(9, 7), (4, 5), (9, 3)]
    batch, mask = crops(8, 12, sizes)
    more, more_mask = crops(9, 7, more_sizes) if context else (None, None)
    y = attention(batch, more, mask=mask, context_mask=more_mask)
    for row, (h, w) in enumerate(sizes):
        one = slice(row, row + 1)
        around = None
        if more is not None:
            around = more[one, :, : more_sizes[row][0], : more_sizes[row][1]]
        alone = attention(batch[one, :, :h, :w], around)
        assert_close(y[one, :, : alone.shape[2], : alone.shape[3]], alone)


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_a_small_image_may_be_anywhere_that_the_stride_reaches(options):
    attention = ImageLinearAttention(3, 4, **(SMALL | options)).double()
    small = image(6, 9)
    rows, columns = (2 * stride for stride in attention.to_q.stride)
    batch, mask = 1e6 * image(15, 20), torch.zeros(2, 15, 20, dtype=torch.bool)
    batch[..., rows : rows + 6, columns : columns + 9], mask[:, rows : rows + 6, columns : columns + 9] = small, True
    alone = attention(small)
    assert_close(attention(batch, mask=mask)[..., 2 : alone.shape[2] + 2, 2 : alone.shape[3] + 2], alone)


def crops(height, width, sizes):
    x = 1e6 * torch.randn(len(sizes), 3, height, width, dtype=torch.float64)
    mask = torch.zeros(len(sizes), height, width, dtype=torch.bool)
    for row, (h, w) in enumerate(sizes):
        x[row, :, :h, :w], mask[row, :h, :w] = torch.randn(3, h, w), True
    return x, mask


def test_a_context_of_pixels_and_its_mask():
    attention = ImageLinearAttention(3, **SMALL).double()
    x, pixels = image(), torch.randn(2, 3, 9, dtype=torch.float64)
    assert_close(attention(x, pixels), attention(x, pixels.unsqueeze(2)))
    mask = torch.arange(9).expand(2, -1) < 4
    assert_close(attention(x, pixels, context_mask=mask), attention(x, pixels[..., :4]))
    # of one mask for all images, of the image or of its context
    assert_close(attention(x, pixels, context_mask=mask[:1]), attention(x, pixels, context_mask=mask))
    own = torch.rand(1, 6, 11) < 0.7
    assert_close(attention(x, pixels, mask=own), attention(x, pixels, mask=own.expand(2, -1, -1)))
    # of the image, all pixels are masked, of the context, some
    nothing = torch.zeros(2, 6, 11, dtype=torch.bool)
    assert torch.isfinite(attention(x, pixels, mask=nothing, context_mask=mask)).all()
    assert_close(attention(x, mask=nothing), attention.to_out.bias.view(1, -1, 1, 1).expand(2, 3, 6, 11))


def test_pixels_may_be_permuted_and_batches_do_not_mix():
    attention, x = ImageLinearAttention(3, **SMALL).double(), image()
    order = torch.randperm(66)
    y = attention(x).flatten(2)
    assert_close(attention(x.flatten(2)[..., order].view_as(x)).flatten(2), y[..., order])
    assert_close(attention(x[1:]).flatten(2), y[1:])
    assert torch.autograd.gradcheck(attention, image(2, 3, b=1).requires_grad_(), fast_mode=True)


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("context", [False, True])
def test_an_empty_batch_has_an_empty_result(options, context):
    attention = ImageLinearAttention(3, 4, **(SMALL | options)).double()
    x, more, mask = image(b=2), image(5, 8) if context else None, torch.ones(2, 6, 11, dtype=torch.bool)
    y = attention(x[:0], None if more is None else more[:0], mask=mask[:0])
    assert y.shape == (0, *attention(x, more, mask=mask).shape[1:])


def test_large_keys_stay_finite():
    attention = ImageLinearAttention(3, **SMALL)
    for scale in (1, 1e2, 1e4):
        assert torch.isfinite(attention(scale * torch.randn(1, 3, 5, 7))).all()


@pytest.mark.usefixtures("unchecked")
def test_errors():
    attention = ImageLinearAttention(3, kernel_size=1, padding=1, **SMALL)
    with pytest.raises(ValueError, match="below half the kernel"):
        attention(torch.randn(1, 3, 5, 7), mask=torch.ones(1, 5, 7, dtype=torch.bool))
    with pytest.raises(TypeError, match="dim_key"):
        ImageLinearAttention(3, dim_key=4)
    assert math.isclose(attention.key_dim, 5)
    for name, size in itertools.product(("kernel_size", "stride", "padding"), ((1,), (1, 1, 1))):
        with pytest.raises(ValueError, match=f"{name} must be a whole number or a tuple of 2, .* but is"):
            ImageLinearAttention(3, **SMALL, **{name: size})
    x = image().float()
    with pytest.raises(ValueError, match="context_mask is of a context, but none was given"):
        attention(x, context_mask=torch.ones(2, 6, 11, dtype=torch.bool))
    for context in (x, x.flatten(2)):
        with pytest.raises(ValueError, match="x and the context must have one batch size, but they have 2 and 1"):
            attention(x, context[:1])
        with pytest.raises(ValueError, match=r"context must be torch\.float32, as the weights, but is torch\.float64"):
            attention(x, context.double())
    modules = (attention, PositionLinearAttention(3), ChannelLinearAttention())
    for module, wrong in itertools.product(modules, (image()[0], image(chan=4))):
        if not isinstance(module, ChannelLinearAttention) or wrong.ndim == 3:
            with pytest.raises(ValueError, match=r"x must be \(b, .*, h, w\), but is \((3|2, 4), 6, 11\)"):
                module(wrong.float())
    for module, mask in itertools.product(modules, (torch.ones(2, 6, 11), torch.ones(2, 11, 6).bool())):
        with pytest.raises(ValueError, match=r"a mask must be boolean \(2, 6, 11\), .* but is torch"):
            module(image().float(), mask=mask)


@pytest.mark.usefixtures("unchecked")
def test_an_image_smaller_than_the_kernel_is_refused():
    x = image().float()
    attention = ImageLinearAttention(3, kernel_size=3, **SMALL)
    cases = [
        (x[..., :2, :], None, r"x must be at least as large as the kernel, \(3, 3\), but is \(2, 11\)"),
        (x, x.flatten(2), r"context must be at least as large as the kernel, \(3, 3\), but is \(1, 66\)"),
        # the last convolution has the same kernel
        (x[..., :4], None, r"attended x must be .* \(3, 3\), but is \(4, 2\)"),
    ]
    for pixels, context, message in cases:
        with pytest.raises(ValueError, match=message):
            attention(pixels, context)
    for module in (ImageLinearAttention(3, **SMALL), PositionLinearAttention(3)):
        with pytest.raises(ValueError, match=r"x must be at least .* but is \(6, 0\)"):
            module(x[..., :0])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("context", "mask", "message"),
    [
        (torch.ones(2, 4, 9), None, r"context must be \(b, 3, h, w\) or \(b, 3, m\), but is \(2, 4, 9\)"),
        (torch.ones(3, 9), None, r"context must be .* but is \(3, 9\)"),
        (torch.ones(2, 3, 9), torch.ones(9, dtype=torch.bool), r"must be boolean \(2, 9\), .* but is .* \(9,\)"),
        (torch.ones(2, 3, 9), [[True] * 9] * 2, "context_mask must be a tensor, but is a list"),
    ],
    ids=["channels", "no batch", "mask without batch", "list"],
)
def test_errors_of_a_context_show_its_own_shape(context, mask, message):
    with pytest.raises(ValueError, match=message):
        ImageLinearAttention(3, **SMALL)(image().float(), context, context_mask=mask)
