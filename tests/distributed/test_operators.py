"""The operators over several processes are the operators of one."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from linattn import distributed, ops
from linattn.distributed import sharded_linear_attention
from linattn.ops.elementwise import ELEMENTWISE
from linattn.ops.state import LinearState
from tests.distributed.test_sequence import CUTS, error
from tests.processes import needs_processes, run_in_group

pytestmark = needs_processes
CLOSE, HEADS, N, D = 1e-13, 3, 23, 4


def drawn(*sizes: int) -> Tensor:
    return torch.randn(2, HEADS, *sizes, dtype=torch.float64)


def decays(kind: str | None) -> Tensor | None:
    log_decay = {None: None, "head": -drawn(N).exp(), "channel": -drawn(N, D).exp()}[kind]
    if log_decay is not None:
        # a sequence begins
        log_decay[:, :, 11] = -torch.inf
    return log_decay


def compare(rank: int, size: int, name: str, inputs: dict[str, Tensor], state: Any, **options: Any) -> None:
    """Outputs, last state, and the gradients of all inputs and of the state, of the operator `name`."""
    group, calls = dist.group.WORLD, []
    learned = {key: options.get(key) for key in ("log_decay", "removal_key")} | inputs
    learned = {key: x.detach().requires_grad_() for key, x in learned.items() if x is not None}
    first = None if state is None else tuple(x.detach().requires_grad_() for x in state)
    for part, package in ((None, ops), (rank, distributed)):
        cut = {key: x if part is None else x.split(CUTS[size], 2)[part] for key, x in learned.items()}
        mask = options.get("key_mask")
        mask = mask if part is None or mask is None else mask.split(CUTS[size], 2)[part]
        own = {} if part is None else {"group": group}
        rest = {key: cut.get(key, x) for key, x in options.items() if key != "key_mask"}
        before = None if first is None else first[0] if "beta" in inputs else LinearState(*first)
        arguments = [cut[key] for key in inputs]
        call = getattr(package, name.replace("causal", "causal" if part is None else "sharded"))
        y, end = call(*arguments, before, key_mask=mask, **own, **rest)
        calls.append((y, [end] if isinstance(end, Tensor) else list(end)))
    (whole, last), (y, end) = calls
    assert error(y, whole.split(CUTS[size], 2)[rank]) <= CLOSE, (name, options)
    weight = torch.randn(whole.shape, dtype=whole.dtype, generator=torch.Generator().manual_seed(1))
    leaves = [*learned.values(), *(first or ())]
    expected = torch.autograd.grad((whole * weight).sum(), leaves, allow_unused=True, materialize_grads=True)
    found = torch.autograd.grad(
        (y * weight.split(CUTS[size], 2)[rank]).sum(), leaves, allow_unused=True, materialize_grads=True
    )
    for grad, wanted in zip(found, expected, strict=True):
        dist.all_reduce(grad)
        assert error(grad, wanted) <= CLOSE or wanted.norm() < 1e-9, (name, options)
    if rank == size - 1:
        assert all(error(x, wanted) <= CLOSE for x, wanted in zip(end, last, strict=True)), (name, options)


def every_call(rank: int, size: int) -> None:
    torch.manual_seed(0)
    key_mask = torch.rand(2, HEADS, N) < 0.7
    for kind in (None, "head", "channel"):
        inputs = {"q": drawn(N, D), "k": drawn(N, D) / 2, "v": drawn(N, 5)}
        shared = {"log_decay": decays(kind)}
        for feature_map in ELEMENTWISE:
            for normalize in ("output", None):
                # un-normalised where features of both signs may cancel
                if normalize is None or feature_map in ("elu_plus_one", "exp"):
                    options = {"feature_map": feature_map, "normalize": normalize}
                    compare(rank, size, "causal_linear_attention", inputs, None, **shared, **options)
        state = drawn(D, 5), drawn(D).abs()
        for mask in (None, key_mask):
            options = {"normalize": None, "key_mask": mask}
            compare(rank, size, "causal_linear_attention", inputs, state, **shared, **options)
            delta = inputs | {"beta": drawn(N).sigmoid()}
            for past, removal_key in itertools.product((None, state[:1]), (None, drawn(N, D) / 2)):
                options = {"scale": 0.5, "key_mask": mask, "removal_key": removal_key}
                compare(rank, size, "causal_delta_attention", delta, past, **shared, **options)
    with pytest.raises(ValueError, match=r"q must be \(b, h, n, d\), but is \(5, 4\)"):
        sharded_linear_attention(torch.ones(5, 4), drawn(5, 4), drawn(5, 4), group=dist.group.WORLD)
    x = drawn(5, 4)
    with pytest.raises(ValueError, match=r"log_decay must be \(b, h, n\) or \(b, h, n, d\), but is \(3, 5\)"):
        sharded_linear_attention(x, x, x, group=dist.group.WORLD, log_decay=-torch.ones(3, 5))
    present = torch.ones(2, 5, dtype=torch.bool)
    for mask, why in (
        (present, r"key_mask must be \(2, 3, 5\), as the keys, .* but is \(2, 5\)"),
        (present[:, None, :4], r"key_mask must be \(2, 3, 5\), as the keys, .* but is \(2, 1, 4\)"),
        (present[:, None].long(), "key_mask must be boolean, .* but is torch.int64"),
    ):
        with pytest.raises(ValueError, match=why):
            sharded_linear_attention(x, x, x, group=dist.group.WORLD, key_mask=mask)
        with pytest.raises(ValueError, match=why):
            distributed.sharded_delta_attention(x, x, x, x[..., 0], group=dist.group.WORLD, key_mask=mask)
    group = dist.group.WORLD
    for call, why in (
        (lambda: sharded_linear_attention(x, x, None, group=group), "v must be a tensor, but is None"),
        (lambda: sharded_linear_attention(x, x, x, group=group, log_decay=-1.0), "log_decay must be a tensor"),
        (lambda: sharded_linear_attention(x, x, x, group=group, key_mask=[True]), "key_mask must be a tensor"),
        (lambda: sharded_linear_attention(x, x, x, (x, x), group=group), "state must be a LinearState"),
        (lambda: distributed.sharded_delta_attention(x, x, x, None, group=group), "beta must be a tensor, but is None"),
        (lambda: distributed.sharded_delta_attention(x, x, x, x[..., 0], (x,), group=group), "state must be a tensor"),
    ):
        with pytest.raises(ValueError, match=why):
            call()
    state, beta, features = LinearState(drawn(4, 4), drawn(4)), x[..., 0].sigmoid(), drawn(5, 3)
    linear, delta = sharded_linear_attention, distributed.sharded_delta_attention
    # each is wrong on all ranks, or on one alone: no rank may wait for another, or attend without it
    for call, why in (
        (lambda: linear(features, x, x, group=group), "q and k must have the same number of features"),
        (
            lambda: linear(x, x, x, LinearState(drawn(5, 4), drawn(5)), group=group),
            r"the state must have S \(..., 4, 4",
        ),
        (
            lambda: linear(x, x, x, LinearState(state.S[0], state.z[0]), group=group),
            r"S must be \(b, h, d, dv\), but is",
        ),
        (lambda: linear(x, x, x, LinearState(state.S.float(), state.z.float()), group=group), "must be torch.float64"),
        (lambda: linear(x, x, x, group=group, log_decay=-x.abs().unsqueeze(2)), "log_decay must be"),
        (lambda: linear(x, x[:, :1], x[:, :1], group=group, log_decay=-beta), "the batch and the heads of the keys"),
        (lambda: linear(x, x, x, group=group, log_decay=x.abs() * (-1) ** rank), "log_decay must not be"),
        (lambda: delta(x, x, x, beta[..., :3], group=group), r"beta must be \(..., 5\)"),
        (lambda: delta(x, x, x, beta[0], group=group), r"beta must be \(b, h, n\), but is \(3, 5\)"),
        (lambda: delta(x, x, x, beta, state.S[..., :3], group=group), r"the state must be \(..., 4, 4\)"),
        (lambda: delta(x, x, x, beta, group=group, removal_key=features), "removal_key must be floating-point and"),
        (lambda: delta(x, x, x, beta, group=group, scale=float(rank)), "rank 0 has .*, and rank 1 .*"),
    ):
        with pytest.raises(ValueError, match=why):
            call()
    wider = drawn(5, 6 if rank else 4)
    with pytest.raises(ValueError, match=r"all ranks must do the same, but rank 0 has .*, and rank 1 "):
        sharded_linear_attention(wider, wider, x, group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"all ranks must do the same, but rank 0 has .*, and rank 1 "):
        sharded_linear_attention(x, x, x, group=dist.group.WORLD, key_mask=x[..., 0] > 0 if rank else None)


@pytest.mark.parametrize("size", CUTS)
def test_operators_over_a_group(size: int):
    run_in_group(size, every_call, size)
