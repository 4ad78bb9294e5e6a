"""The names of layers in linear-attention-transformer, performer-pytorch and linformer, which are of one family.

Moves have names within the module that they are for."""

from collections.abc import Callable, Iterable
from typing import cast

from torch import nn

from linattn.attention import AxialAttention, InnerAttention, LinformerAttention, SplitHeads
from linattn.compat.weights.changes import NUMBER, SAME, TRANSPOSED, Change, axis, half
from linattn.compat.weights.conversion import Move, Moves, parameters, within
from linattn.models.token_model import TokenModel
from linattn.nn import (
    AxialPositions,
    Branch,
    Chunked,
    GatedFeedForward,
    LearnedPositions,
    MultiheadAttention,
    ReversibleSequence,
    ScaleNorm,
)

# tables that are computed here: of sinusoids, and of rotary angles in all heads and in local heads
TABLES = (r"(layer_)?pos_emb\.emb", r".*\blocal_attn\.rel_pos\.inv_freq")


def language_model(model: TokenModel, head: str) -> Moves:
    """Move all that stands around the stack; `head` is their name of the output layer."""
    yield from parameters("embedding", "token_emb", model.embedding)
    yield from within("positions", "pos_emb", _positions(model.positions))
    yield from parameters("norm", "norm", model.norm)
    yield from parameters("head", head, model.head)


def stack(
    module: nn.Module,
    attention: Callable[[MultiheadAttention], Iterable[Move]],
    feed_forward: Callable[[nn.Module, MultiheadAttention], Iterable[Move]],
    *,
    wrappers: int = 1,
) -> Moves:
    """Move the branches of a stack, each an attention or a feed-forward.

    A feed-forward is given with the attention before it; so many `wrappers` are around it there."""
    reversible = isinstance(module, ReversibleSequence)
    pattern, places = ("blocks.{}.{}.net", "fg") if reversible else ("layers.{}.{}", "01")
    assert isinstance(module.branches, nn.ModuleList)
    before = None
    for index, branch in enumerate(module.branches):
        assert isinstance(branch, Branch)
        if isinstance(branch.module, MultiheadAttention):
            before = branch.module
            inside, depth = attention(before), int(isinstance(before.inner, AxialAttention))
        else:
            assert before is not None
            inside, depth = feed_forward(branch.module, before), wrappers
        theirs = pattern.format(index // 2, places[index % 2])
        yield from within(f"branches.{index}", theirs, _branch(branch, inside, depth))


def _branch(branch: Branch, inside: Iterable[Move], wrappers: int) -> Moves:
    """Move a branch. Their module has a wrapper for each step before it."""
    if branch.g is not None:
        yield Move("g", "g")
    if isinstance(branch.norm, ScaleNorm):
        yield Move("norm.g", "g", NUMBER)
    else:
        yield from parameters("norm", "norm", branch.norm)
    yield from within("module", ".".join(["fn"] * (1 + (branch.shift is not None) + wrappers)), inside)


def feed_forward(module: nn.Module, before: MultiheadAttention | None = None) -> Moves:
    if isinstance(module, Chunked):
        yield from within("module", "", feed_forward(module.module))
        return
    gated = isinstance(module, GatedFeedForward)
    first = {"gate_proj": half(0), "up_proj": half(1)} if gated else {"up_proj": SAME}
    for name, change in first.items():
        yield from parameters(name, "w1", module.get_submodule(name), change)
    yield from parameters("down_proj", "w2", module.get_submodule("down_proj"))


def attention(module: MultiheadAttention, *, q: Change = SAME, k: Change = SAME, columns: Change = SAME) -> Moves:
    """Move the projections; `columns` concerns the output's weight, not its bias."""
    yield from parameters("q_proj", "to_q", module.q_proj, q)
    yield from parameters("k_proj", "to_k", module.k_proj, k)
    # the same object where keys are values
    yield from parameters("v_proj", "to_k" if module.v_proj is module.k_proj else "to_v", module.v_proj)
    for name, _ in module.o_proj.named_parameters():
        yield Move(f"o_proj.{name}", f"to_out.{name}", columns if name == "weight" else SAME)


def linformer(module: MultiheadAttention) -> Moves:
    """Move attention and the projections of the sequence."""
    assert isinstance(module.inner, LinformerAttention)
    yield from attention(module)
    shared = module.inner.value_projection is module.inner.key_projection
    yield Move("inner.key_projection.weight", "proj_k", TRANSPOSED)
    yield Move("inner.value_projection.weight", "proj_k" if shared else "proj_v", TRANSPOSED)


def parts(module: MultiheadAttention) -> list[tuple[int, InnerAttention]]:
    """Return the inner attentions, each with its number of heads."""
    inner = module.inner.inner if isinstance(module.inner, AxialAttention) else module.inner
    if isinstance(inner, SplitHeads):
        return list(zip(inner.heads, cast(Iterable[InnerAttention], inner.parts), strict=True))
    return [(module.q_proj.out_features // module.head_dim, inner)]


def _positions(module: nn.Module | None) -> Moves:
    """Move the positions. Sinusoids have no weights."""
    if isinstance(module, LearnedPositions):
        yield Move("weight", "emb.weight")
    if isinstance(module, AxialPositions):
        for index in range(len(module.shape)):
            yield Move(f"weights.{index}", f"weights.{index}", axis(index, len(module.shape)))
