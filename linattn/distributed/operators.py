"""The operators with one part of each sequence per rank of a group: summary, exchange, operator."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from linattn.attention.checks import check_keys
from linattn.attention.delta import DeltaAttentionState
from linattn.checks import check_tensors, given
from linattn.distributed.parts import Group, process_group
from linattn.distributed.scan import gathered
from linattn.distributed.segments import delta_segment, linear_segment
from linattn.distributed.transport import Line
from linattn.ops import delta, linear
from linattn.ops.features import Features, FeatureState, value_dtype
from linattn.ops.nested import checked_kind
from linattn.ops.state import LinearState

_TENSORS = ("log_decay", "key_mask", "removal_key")
"""The options that are tensors."""
_LAYOUTS = {
    "beta": "(b, h, n)",
    "log_decay": "(b, h, n) or (b, h, n, d)",
    **dict.fromkeys(("S", "state"), "(b, h, d, dv)"),
}
"""The dimensions of tensors that are not (b, h, n, d)."""


def sharded_linear_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n dv"],
    /,
    state: LinearState | None = None,
    *,
    group: Group,
    log_decay: Float[Tensor, "..."] | None = None,
    key_mask: Bool[Tensor, "#b #h n"] | None = None,
    normalize: str | None = "output",
    feature_map: str = "identity",
) -> tuple[Float[Tensor, "b h n dv"], LinearState]:
    """Run `causal_linear_attention` over the tokens of all ranks of the `group`. Each rank passes its part of the
    tokens, in the order of the ranks, as `q`, `k` and `v`.

    `state` is the state before the tokens of the first rank, the same on all ranks; the returned state is the one after
    this rank's tokens. If one rank differentiates its outputs, all must. `log_decay` is (b, h, n) or (b, h, n, d);
    otherwise `log_decay`, `key_mask`, `normalize`, `feature_map` and errors are as in `causal_linear_attention`."""
    line = Line(process_group(group))
    options: Any = {"log_decay": log_decay, "key_mask": key_mask, "normalize": normalize, "feature_map": feature_map}
    S = None if state is None else checked_kind(state, LinearState).S
    _check(line, linear.causal_call, {"q": q, "k": k, "v": v}, options, state, given(S=S))
    tokens = 0 if line.is_last else k.shape[-2]
    decays = None if log_decay is None else log_decay[:, :, :tokens].unsqueeze(2)
    mask = None if key_mask is None else key_mask[..., :tokens].unsqueeze(2)
    x = k[:, :, :tokens].unsqueeze(2)
    # exponentials as large as the operator has them, without a scale
    keys = Features(x.to(value_dtype(x.dtype)).exp(), None) if feature_map == "exp" else Features(x, None, feature_map)
    own = linear_segment(keys, v[:, :, :tokens].unsqueeze(2), decays, mask)
    past = None if state is None else FeatureState(LinearState(state.S.unsqueeze(2), state.z.unsqueeze(2)), None)
    q, past = gathered(line, own, q, past)
    before = None if past is None else LinearState(past.sums.S.squeeze(2), past.sums.z.squeeze(2))
    return linear.causal_linear_attention(q, k, v, before, **options)


def sharded_delta_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n dv"],
    beta: Float[Tensor, "b h n"],
    /,
    state: Float[Tensor, "b h d dv"] | None = None,
    *,
    group: Group,
    log_decay: Float[Tensor, "..."] | None = None,
    key_mask: Bool[Tensor, "#b #h n"] | None = None,
    removal_key: Float[Tensor, "b h n d"] | None = None,
    scale: float = 1.0,
) -> tuple[Float[Tensor, "b h n dv"], Float[Tensor, "b h d dv"]]:
    """Run `causal_delta_attention` over the tokens of all ranks of the `group`. Each rank passes its part of the
    tokens, in the order of the ranks, as `q`, `k`, `v`, `beta` and `removal_key`.

    `state`, `log_decay` and the results are as in `sharded_linear_attention`; `key_mask`, `removal_key`, `scale` and
    errors are as in `causal_delta_attention`."""
    line = Line(process_group(group))
    options: Any = {"log_decay": log_decay, "key_mask": key_mask, "removal_key": removal_key, "scale": scale}
    _check(line, delta.delta_call, {"q": q, "k": k, "v": v, "beta": beta}, options, state, given(state=state))
    tokens = 0 if line.is_last else k.shape[-2]
    keys, values, strengths = (x[:, :, :tokens].unsqueeze(2) for x in (k, v, beta))
    decays = None if log_decay is None else log_decay[:, :, :tokens].unsqueeze(2)
    mask = None if key_mask is None else key_mask[..., :tokens].unsqueeze(2)
    removal = None if removal_key is None else removal_key[:, :, :tokens].unsqueeze(2)
    own = delta_segment(keys, values, strengths, decays, mask, removal)
    q, past = gathered(line, own, q, None if state is None else DeltaAttentionState(state.unsqueeze(2)))
    before = None if past is None else past.S.squeeze(2)
    return delta.causal_delta_attention(q, k, v, beta, before, **options)


def _check(
    line: Line,
    check: Callable[..., object],
    inputs: dict[str, Tensor],
    options: dict[str, Any],
    state: Any,
    sums: dict[str, Tensor],
) -> None:
    """Raise ValueError, on every rank, if on one of them the inputs, the options or the `state`, which consists of
    `sums`, do not fit, as `check` of the operator says, or if ranks pass different shapes, dtypes or options. Only the
    number of tokens may differ."""
    mine = problem = ""
    try:
        _check_layouts(inputs, sums | given(**{name: options.get(name) for name in _TENSORS}))
        with torch.no_grad():
            check(*inputs.values(), state, **options)
        tokens = {name: x for name, x in inputs.items() if x.ndim == 4}
        sizes = [f"{name} {(*x.shape[:-2], 'n', *x.shape[-1:])} of {x.dtype}" for name, x in tokens.items()]
        names = [name if name in _TENSORS else f"{name} {x}" for name, x in options.items() if x is not None]
        mine = ", ".join([*sizes, *names, *given(state=state)])
    except ValueError as error:
        problem = str(error)
    line.agree(mine, problem)


def _check_layouts(inputs: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    """Raise ValueError for tensors without the dimensions that are cut, or whose heads are not those of the keys."""
    check_tensors(**inputs, **others)
    for name, x in (inputs | others).items():
        layout = _LAYOUTS.get(name, "(b, h, n, d)")
        if name != "key_mask" and x.ndim not in [part.count(",") + 1 for part in layout.split(" or ")]:
            raise ValueError(f"{name} must be {layout}, but is {tuple(x.shape)}")
    k = inputs["k"]
    check_keys(k, inputs["v"], others.get("key_mask"))
    decays = others.get("log_decay", k)
    if any(size not in (1, own) for size, own in zip(decays.shape, k.shape[:2], strict=False)):
        came = f"log_decay is {tuple(decays.shape)} and k is {tuple(k.shape)}"
        raise ValueError(f"log_decay must have the batch and the heads of the keys, or 1 of them, but {came}")
