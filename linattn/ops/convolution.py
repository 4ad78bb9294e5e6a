"""The short causal convolution per channel, y_i = bias + Σ_{j < w} weight_{w−1−j} ⊙ x_{i−j}, as a sum of shifted
products.

On a CPU, blocks of tokens stay in the cache, forward and backward, which takes a sixth of the time of torch's
convolution."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from linattn.ops.fast.blocks import BLOCK, empty_like
from linattn.ops.numerics import accumulator, summed
from linattn.ops.operator import Backend, Operator, Tensors


class ConvolutionCall(NamedTuple):
    """Inputs x (*b n c), weights (*b w c), of which the last multiplies the token itself, a bias (*b c; None: zeros)
    and the w − 1 inputs before x, `past` (*b w−1 c; None: zeros).

    All have the same number of leading dimensions; in weights and bias their sizes may be 1 instead of those of x."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    past: Tensor | None = None


def short_convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None, past: Tensor | None = None) -> Tensor:
    """Convolve x (*b n c), and the inputs `past` (*b w−1 c) before it, with weights (*b w c), and add `bias` (*b c)."""
    call = ConvolutionCall(x, weight, bias, past)
    return CONVOLUTION.choose(call)(call)[0]


def definition(call: ConvolutionCall, save: bool) -> tuple[Tensor]:
    x, weight, bias, past = call
    n, width = x.shape[-2], weight.shape[-2]
    inputs = F.pad(x, (0, 0, width - 1, 0)) if past is None else torch.cat([past, x], -2)
    y = torch.zeros_like(x) if bias is None else bias.unsqueeze(-2).expand_as(x)
    for i, w in enumerate(weight.unsqueeze(-2).unbind(-3)):
        y = y + inputs.narrow(-2, i, n) * w
    return (y,)


def _one_token(call: ConvolutionCall, save: bool) -> tuple[Tensor]:
    x, weight, bias, past = call
    inputs = x if past is None else torch.cat([past, x], -2)
    y = (inputs * weight[..., -inputs.shape[-2] :, :]).sum(-2, keepdim=True)
    return (y if bias is None else y + bias.unsqueeze(-2),)


def _blocks(x: Tensor) -> Iterator[slice]:
    n, numbers = x.shape[-2], max(1, x[..., :1, :].numel())
    # another device has no cache to keep a block in, and would wait for the loop
    length = max(1, BLOCK // numbers if x.device.type == "cpu" else n)
    return (slice(start, min(n, start + length)) for start in range(0, n, length))


def _weights(weight: Tensor) -> list[Tensor]:
    """Return the w weights, each (*b 1 c), in reverse: that of the token itself first, then those of earlier tokens."""
    # products with strided rows take three times as long
    return list(weight.contiguous().split(1, -2)[::-1])


def _unsupported(call: ConvolutionCall) -> str | None:
    if torch.compiler.is_compiling() and call.x.device.type != "cpu":
        return "a compiler for this device fuses the definition into one kernel"
    return None


def _overlaps(past: Tensor | None, n: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield (t, p, o) for t = 1 … w − 1: a slice p of past inputs, and the slice o of the outputs t tokens later."""
    width = 0 if past is None else past.shape[-2]
    for distance in range(1, width + 1):
        count = min(distance, n)
        yield distance, slice(width - distance, width - distance + count), slice(count)


def _empty(call: ConvolutionCall, save: bool) -> tuple[Tensor]:
    return (empty_like(call.x, call.x.shape),)


def _forward(call: ConvolutionCall, save: bool) -> tuple[Tensor]:
    (x, weight, bias, past), (y,) = call, _empty(call, save)
    own, *others = _weights(weight)
    for part in _blocks(x):
        if bias is None:
            torch.mul(x[..., part, :], own, out=y[..., part, :])
        else:
            torch.addcmul(bias.unsqueeze(-2), x[..., part, :], own, out=y[..., part, :])
        for distance, w in enumerate(others[: part.stop - 1], 1):
            first = max(part.start, distance)
            y[..., first : part.stop, :].addcmul_(x[..., first - distance : part.stop - distance, :], w)
    for distance, before, after in _overlaps(past, x.shape[-2]):
        assert past is not None
        y[..., after, :].addcmul_(past[..., before, :], others[distance - 1])
    return (y,)


def _gradient(call: ConvolutionCall, saved: Tensors, grads: Tensors) -> Tensors:
    (x, weight, bias, past), (dy,) = call, grads
    assert dy is not None
    n, dx, exact = x.shape[-2], empty_like(x, x.shape), accumulator(x.dtype)
    dweight = weight.new_zeros(*x.shape[:-2], *weight.shape[-2:], dtype=exact)
    dbias = x.new_zeros(*x.shape[:-2], x.shape[-1], dtype=exact)
    dpast = None if past is None else torch.zeros_like(past)
    (own, *others), dweights = _weights(weight), dweight.split(1, -2)[::-1]
    for part in _blocks(x):
        torch.mul(dy[..., part, :], own, out=dx[..., part, :])
        for distance, w in enumerate(others[: n - 1 - part.start], 1):
            last = min(part.stop, n - distance)
            dx[..., part.start : last, :].addcmul_(dy[..., part.start + distance : last + distance, :], w)
        for distance, dw in enumerate(dweights[: part.stop]):
            first = max(part.start, distance)
            inputs = x[..., first - distance : part.stop - distance, :]
            dw += (dy[..., first : part.stop, :] * inputs).sum(-2, keepdim=True, dtype=exact)
        if bias is not None:
            dbias += dy[..., part, :].sum(-2, dtype=exact)
    for distance, before, after in _overlaps(past, n):
        assert past is not None and dpast is not None
        dpast[..., before, :].addcmul_(dy[..., after, :], others[distance - 1])
        dweights[distance].add_((dy[..., after, :] * past[..., before, :]).sum(-2, keepdim=True))
    return dx, summed(dweight, weight), None if bias is None else summed(dbias, bias), dpast


CONVOLUTION = Operator(
    "convolution",
    ConvolutionCall,
    outputs=1,
    backends=(
        Backend("one_token", None, _one_token, one_token=True),
        Backend("blocks", _unsupported, _forward, _gradient, _empty, loops=True),
        Backend("reference", None, definition),
    ),
)
