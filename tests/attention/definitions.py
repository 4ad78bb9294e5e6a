"""Each inner attention from its formula, with the whole matrix of weights: slow, and obvious. What is not listed here
has no definition, and its tests fail."""

from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from linattn.attention import (
    DeltaAttention,
    GeneralizedDeltaAttention,
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
from linattn.ops.tokens.rotary import rotate
from tests.attention.cases import GatesFromKeys


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
def _(inner: GatesFromKeys, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return gated(inner.inner, q, k, v, inner.gates(k))


def gated(inner: InnerAttention, q: Tensor, k: Tensor, v: Tensor, gates: Any) -> Tensor:
    """Token by token: the state fades, is corrected or added to, and read."""
    if gates is None:
        return definition(inner, q, k, v)
    if isinstance(inner, SplitHeads):
        heads, group = inner.heads, q.shape[1] // k.shape[1]
        keys = [count // group for count in heads]
        pieces = zip(inner.parts, q.split(heads, 1), k.split(keys, 1), v.split(keys, 1), gates, strict=True)
        return torch.cat([gated(*piece) for piece in pieces], 1)
    if isinstance(inner, GeneralizedDeltaAttention):
        return generalized(inner, q, k, v, gates)
    corrects = isinstance(inner, DeltaAttention)
    if corrects:
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        q = q * q.shape[-1] ** -0.5
    else:
        assert isinstance(inner, LinearAttention) and inner.normalize is None
        q, k = inner.feature_map.query(q).value(), inner.feature_map.key(k).value()
    S, ys, group = q.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]), [], q.shape[1] // k.shape[1]
    for i in range(k.shape[-2]):
        if gates.log_decay is not None:
            decay = gates.log_decay[:, :, i].exp()
            S = S * (decay if decay.ndim == 3 else decay.unsqueeze(-1)).unsqueeze(-1)
        key, value = k[:, :, i].unsqueeze(-1), v[:, :, i].unsqueeze(-2)
        error = value - key.mT @ S if corrects else value
        strength = 1 if gates.beta is None else gates.beta[:, :, i, None, None]
        S = S + strength * key * error
        ys.append(q[:, :, i].unsqueeze(-2) @ S.repeat_interleave(group, 1))
    return torch.cat(ys, -2) if ys else torch.zeros(*q.shape[:-1], v.shape[-1], dtype=v.dtype)


def generalized(inner: GeneralizedDeltaAttention, q: Tensor, k: Tensor, v: Tensor, gates: Any) -> Tensor:
    """The state is multiplied by the paper's matrix, diag(α) − (a ∘ r) rᵀ, and added to."""
    removal = k * inner.removal_weight[:, None]
    removal = removal / removal.norm(dim=-1, keepdim=True)
    written = torch.lerp(k, k * gates.beta, inner.write_weight[:, None].expand_as(k))
    S, ys, group = q.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]), [], q.shape[1] // k.shape[1]
    for i in range(k.shape[-2]):
        r, rate, alpha = removal[:, :, i], gates.beta[:, :, i], gates.log_decay[:, :, i].exp()
        transition = torch.diag_embed(alpha) - (rate * r).unsqueeze(-1) * r.unsqueeze(-2)
        S = transition @ S + written[:, :, i].unsqueeze(-1) * v[:, :, i].unsqueeze(-2)
        ys.append(q[:, :, i].unsqueeze(-2) @ S.repeat_interleave(group, 1) * q.shape[-1] ** -0.5)
    return torch.cat(ys, -2) if ys else torch.zeros(*q.shape[:-1], v.shape[-1], dtype=v.dtype)


@definition.register
def _(inner: SplitHeads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ys, group = [], q.shape[1] // k.shape[1]
    first = 0
    for count, part in zip(inner.heads, inner.parts, strict=True):
        keys = slice(first // group, (first + count) // group)
        ys.append(definition(part, q[:, first : first + count], k[:, keys], v[:, keys]))
        first += count
    return torch.cat(ys, 1)
