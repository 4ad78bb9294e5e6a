"""Every attention by name, for configurations, command lines and first experiments. `ATTENTIONS` is the table."""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from linattn.attention.base import InnerAttention, checked_inner
from linattn.attention.decay import Decay
from linattn.attention.delta import DeltaAttention
from linattn.attention.gates import GateNeeds
from linattn.attention.generalized_delta import GeneralizedDeltaAttention
from linattn.attention.linear import LinearAttention
from linattn.attention.linformer import (
    LearnedProjection,
    LinformerAttention,
    MeanPooling,
    SequenceProjection,
    StridedConvolution,
)
from linattn.attention.local import LocalAttention
from linattn.attention.rotary_linear import RotaryLinearAttention
from linattn.attention.softmax import SoftmaxAttention
from linattn.attention.split_heads import SplitHeads
from linattn.checks import check_sizes, check_types
from linattn.feature_maps import FEATURE_MAPS, ElementwiseFeatureMap, ScaledFeatureMap
from linattn.names import did_you_mean, synonyms

# where the Linformer paper's curves flatten (figure 3); the projection is never longer than what it projects
PROJECTED_LENGTH = 128


class Heads(NamedTuple):
    """The sizes and options from which a function in `ATTENTIONS` builds the attention of these heads."""

    num_heads: int
    num_key_heads: int
    head_dim: int
    causal: bool
    window: int
    max_length: int | None


Builder = Callable[[Heads], InnerAttention]
_identity = partial(ElementwiseFeatureMap, "identity")


def _linear(name: str) -> Builder:
    make = FEATURE_MAPS[name]
    return lambda x: LinearAttention(make(x.head_dim, x.num_heads, x.num_key_heads), causal=x.causal)


def _linformer(projection: Callable[[int, int, int], SequenceProjection]) -> Builder:
    def build(x: Heads) -> InnerAttention:
        if x.causal:
            raise ValueError("Linformer mixes the whole sequence into every key, so it cannot be causal")
        if x.max_length is None:
            raise ValueError("Linformer is made for sequences up to a length: give max_length to named_attention")
        return LinformerAttention(projection(x.max_length, min(PROJECTED_LENGTH, x.max_length), x.head_dim))

    return build


ATTENTIONS: dict[str, Builder] = {
    **{name: _linear(name) for name in FEATURE_MAPS},
    "linear_unnormalized": lambda x: LinearAttention(_identity(), causal=x.causal, normalize=None),
    # a state that fades or is overwritten: there is no form without an order of tokens
    "retention": lambda x: LinearAttention(ScaledFeatureMap(), causal=True, decay=Decay(x.num_key_heads)),
    "gla": lambda x: LinearAttention(ScaledFeatureMap(), causal=True, needs=GateNeeds(decay="channel")),
    "ssd": lambda x: LinearAttention(_identity(), causal=True, normalize=None, needs=GateNeeds("head", "step")),
    "delta": lambda x: DeltaAttention(),
    "gated_delta": lambda x: DeltaAttention(decay="head"),
    "kda": lambda x: DeltaAttention(decay="channel"),
    "rwkv7": lambda x: GeneralizedDeltaAttention(x.num_key_heads, x.head_dim),
    "roformer": lambda x: RotaryLinearAttention(ElementwiseFeatureMap("elu_plus_one"), causal=x.causal),
    "softmax": lambda x: SoftmaxAttention(causal=x.causal),
    "local": lambda x: LocalAttention(x.window, causal=x.causal),
    "local_bucketed": lambda x: LocalAttention(x.window, causal=x.causal, bucketed=True),
    "linformer": _linformer(lambda m, r, d: LearnedProjection(m, r)),
    "linformer_mean": _linformer(lambda m, r, d: MeanPooling(m, r)),
    "linformer_conv": _linformer(StridedConvolution),
}


# names that papers and other packages use, by ours
SYNONYMS = synonyms(
    favor="performer favor+",
    elu="linear linear_transformer linear_attention elu_plus_one",
    efficient="shen efficient_attention",
    taylor2="based",
    retention="lightning retnet",
    gla="gated_linear_attention",
    ssd="mamba2 mamba_2",
    delta="deltanet delta_net",
    gated_delta="gated_deltanet gated_delta_net",
    kda="kimi_delta_attention kimi_linear",
    rwkv7="rwkv rwkv_7 goose generalized_delta",
    local="sliding_window swa window",
    local_bucketed="bucketed",
    softmax="full sdpa vanilla",
)


@check_types
def named_attention(
    spec: str,
    *,
    num_heads: int,
    head_dim: int,
    num_key_heads: int | None = None,
    causal: bool = False,
    window: int = 128,
    max_length: int | None = None,
) -> InnerAttention:
    """Make an attention for `num_heads` heads of `head_dim` channels. `spec` is a name in `ATTENTIONS`, or a mixture
    with the number of heads of each part, "local:4+elu:4"; "local+elu" splits the heads equally.

    `num_key_heads` divides `num_heads` (None: as many). If `causal`, a query sees the keys up to its own. Only local
    heads use `window`, their reach in tokens, and only Linformer uses, and needs, `max_length`, the most keys it takes.

    Raises ValueError for what does not fit, such as a causal Linformer or a retention that is not causal."""
    num_key_heads = num_heads if num_key_heads is None else num_key_heads
    check_sizes(num_heads=num_heads, num_key_heads=num_key_heads, head_dim=head_dim)
    parts = []
    for name, count in _shares(spec, num_heads):
        if count * num_key_heads % num_heads:
            raise ValueError(f"{count} of {num_heads} heads do not divide {num_key_heads} key heads evenly: {spec!r}")
        heads = Heads(count, count * num_key_heads // num_heads, head_dim, causal, window, max_length)
        part = ATTENTIONS[name](heads)
        if part.causal != causal:
            raise ValueError(f"{name} is causal only, but causal is False: give causal=True to named_attention")
        parts.append((count, part))
    return parts[0][1] if len(parts) == 1 else SplitHeads(*parts)


def untrained_attention(spec: str, **sizes: Any) -> InnerAttention:
    """Return `named_attention(spec, **sizes)`, with random features from a fixed seed, sampled on the CPU, so that they
    are the same on every device. No random state changes."""
    # a vmap around the caller would sample for each of its rows, or refuse to
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch._C._DisableFuncTorch():
        # torch.manual_seed would seed the other devices too
        torch.default_generator.manual_seed(0)
        return named_attention(spec, **sizes)


# a dict, not functools.cache, which torch.compile does not see
_SHARED: dict[tuple[Any, ...], InnerAttention] = {}


def shared_attention(
    spec: str, *, causal: bool, device: torch.device, dtype: torch.dtype, **sizes: int
) -> InnerAttention:
    """Return the `untrained_attention` on this device and in this dtype, the same one in each call. Compiled code
    makes it while it is compiled, as a graph cannot draw from a fixed seed."""
    # sizes that compiled code takes for variables are constants here
    key = (spec, causal, device, dtype, tuple(sizes), *map(operator.index, sizes.values()))
    _share(*key)
    return _SHARED[key]


def _share(
    spec: str, causal: bool, device: torch.device, dtype: torch.dtype, names: tuple[str, ...], *sizes: int
) -> None:
    key = (spec, causal, device, dtype, names, *sizes)
    if key not in _SHARED:
        # outside of inference mode, whose tensors cannot be used in training, and of those in which none has numbers
        with _disable_current_modes(), torch.inference_mode(False):
            made = untrained_attention(spec, causal=causal, **dict(zip(names, sizes, strict=True)))
            _SHARED[key] = made.to(device=device, dtype=dtype)


# as torch.compiler.assume_constant_result does, which imports the compiler
vars(_share)["_dynamo_marked_constant"] = True


def names_in(spec: str) -> list[str]:
    """Return the names in a mixture, without numbers of heads. Raises ValueError if one is unknown."""
    if not isinstance(spec, str):
        raise ValueError(f"an attention is given by its name, but this is {spec!r}")
    names = [part.strip().partition(":")[0] for part in spec.split("+")]
    for name in names:
        if name not in ATTENTIONS:
            hint = did_you_mean(name or spec, ATTENTIONS, SYNONYMS)
            place = "" if name == spec else f" in {spec!r}"
            raise ValueError(f"{name!r}{place} is no attention{hint}: there are {', '.join(sorted(ATTENTIONS))}")
    return names


def resolved_attention(
    inner: InnerAttention | str, *, num_heads: int, head_dim: int, num_key_heads: int | None = None
) -> InnerAttention:
    """Return `inner` or, if it is a name, the `named_attention` of these sizes, in which a query sees all keys."""
    if isinstance(inner, str):
        return named_attention(inner, num_heads=num_heads, head_dim=head_dim, num_key_heads=num_key_heads)
    return checked_inner(inner)


def _shares(spec: str, num_heads: int) -> list[tuple[str, int]]:
    """Split a mixture into names and their numbers of heads."""
    names = names_in(spec)
    counts = [count for part in spec.split("+") if (count := part.strip().partition(":")[2])]
    if not counts:
        if num_heads % len(names):
            raise ValueError(f"{num_heads} heads do not split equally over {spec!r}: give numbers, as in local:1+elu:3")
        return [(name, num_heads // len(names)) for name in names]
    if len(counts) < len(names) or not all(count.isdecimal() and int(count) for count in counts):
        raise ValueError(f"number all parts of a mixture, from 1 head on, or none, but it is {spec!r}")
    if sum(map(int, counts)) != num_heads:
        raise ValueError(f"{spec!r} has {sum(map(int, counts))} heads, but num_heads is {num_heads}")
    return list(zip(names, map(int, counts), strict=True))
