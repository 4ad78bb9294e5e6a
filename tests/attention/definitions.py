"""Each inner attention from its formula, with the whole matrix of weights: slow, and obvious. What is not listed here
has no definition, and its tests fail."""

from functools import singledispatch

import torch
from torch import Tensor

from linattn.attention import (
    InnerAttention,
    LearnedProjection,
    LinearAttention,
    LinformerAttention,
    LocalAttention,
    MeanPooling,
    RotaryLinearAttention,
    SequenceProjection,
    SoftmaxAttention,
    SplitHeads,
    StridedConvolution,
)
from linattn.ops.rotary import rotate


def define(inner: InnerAttention, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Outputs; where a mask is given, each row is the sequence without its masked tokens, and those have zeros."""
    if key_mask is None:
        return definition(inner, q, k, v)
    y = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=v.dtype)
    for row, kept in enumerate(key_mask[:, 0]):
        one = slice(row, row + 1)
        y[one, :, kept] = definition(inner, *(x[one, :, kept] for x in (q, k, v)))
    return y


@singledispatch
def definition(inner: InnerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise NotImplementedError(f"{type(inner).__name__} has no definition to be tested against")


def softmax(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ v


@definition.register
def _(inner: SoftmaxAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    return softmax(q, k, v, visible.tril() if inner.causal else visible)


@definition.register
def _(inner: LocalAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(q.shape[-2])
    unit, apart = (inner.window.size, 1) if inner.window.bucketed else (1, inner.window.size - 1)
    visible = (i // unit - j // unit).abs() <= apart
    return softmax(q, k, v, visible & (j <= i) if inner.causal else visible)


def project(projection: SequenceProjection, x: Tensor) -> Tensor:
    """The matrix of the projection, written out, times x."""
    m, size = x.shape[-2], -(-projection.max_length // projection.projected_length)
    if isinstance(projection, LearnedProjection):
        weight = projection.weight.expand(x.shape[1], -1, -1)[..., :m]
        return torch.einsum("hrm,bhmd->bhrd", weight, x)
    windows = [x[..., start : start + size, :] for start in range(0, m, size)]
    if isinstance(projection, MeanPooling):
        rows = [window.mean(-2) for window in windows]
    else:
        assert isinstance(projection, StridedConvolution)
        rows = [(window * projection.weight[: window.shape[-2]]).sum(-2) for window in windows]
    return torch.stack(rows, -2) if rows else x


@definition.register
def _(inner: LinformerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = project(inner.key_projection, k), project(inner.value_projection, v)
    return softmax(q, k, v, torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool))


@definition.register
def _(inner: LinearAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hk, n, m = k.shape[1], q.shape[-2], k.shape[-2]
    phi_q, phi_k = inner.feature_map.query(q).value(), inner.feature_map.key(k).value().unsqueeze(2)
    phi_q = phi_q.unflatten(1, (hk, -1))
    weight = torch.ones(n, m, dtype=q.dtype)
    if inner.causal:
        weight = weight.tril()
    if inner.decay is not None:
        steps = torch.arange(n)[:, None] - torch.arange(m)
        weight = weight * (inner.decay().view(hk, 1, 1, 1) * steps).exp()
    if inner.normalize == "keys":
        phi_q = phi_q / (weight @ phi_k)
    similarity = (phi_q @ phi_k.mT) * weight
    y = similarity @ v.unsqueeze(2)
    if inner.normalize == "output":
        total = similarity.sum(-1, keepdim=True)
        y = torch.where(total == 0, 0, y / torch.where(total == 0, 1, total))
    return y.flatten(1, 2)


@definition.register
def _(inner: RotaryLinearAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group, weight = q.shape[1] // k.shape[1], torch.ones(q.shape[-2], k.shape[-2], dtype=q.dtype)
    if inner.causal:
        weight = weight.tril()
    q, k = inner.feature_map.query(q).value(), inner.feature_map.key(k).value().repeat_interleave(group, 1)
    places = torch.arange(q.shape[-2])
    turned = rotate(q, places, base=inner.base) @ rotate(k, places, base=inner.base).mT
    total = (weight * (q @ k.mT)).sum(-1, keepdim=True)
    return (weight * turned) @ v.repeat_interleave(group, 1) / total


@definition.register
def _(inner: SplitHeads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ys, group = [], q.shape[1] // k.shape[1]
    first = 0
    for count, part in zip(inner.heads, inner.parts, strict=True):
        keys = slice(first // group, (first + count) // group)
        ys.append(definition(part, q[:, first : first + count], k[:, keys], v[:, keys]))
        first += count
    return torch.cat(ys, 1)
