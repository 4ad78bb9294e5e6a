"""Moves for the layers that linear-attention-transformer, performer-pytorch and linformer have in common.

The names in the moves of a module are relative to this module."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from linattn.attention import LinformerAttention
from linattn.compat.weights.conversion import NUMBER, SAME, TRANSPOSED, Change, Move, Moves, axis, half, renamed, within
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
    """Yield the moves of all parts but the stack; `head` is their name of the output layer. Sinusoidal positions have
    no weights."""
    yield from renamed(model, {"embedding": "token_emb", "norm": "norm", "head": head})
    if isinstance(model.positions, LearnedPositions):
        yield Move("positions.weight", "pos_emb.emb.weight")
    if isinstance(model.positions, AxialPositions):
        axes = len(model.positions.shape)
        yield from (Move(f"positions.weights.{i}", f"pos_emb.weights.{i}", axis(i, axes)) for i in range(axes))


def stack(
    module: nn.Module,
    attention: Callable[[MultiheadAttention], Iterable[Move]],
    feed_forward: Callable[[nn.Module, Any], Iterable[Move]],
    *,
    wrappers: int = 1,
) -> Moves:
    """Yield the `Move`s that make the weights of the branches of our stack `module` from those of the original package.
    `attention` and `feed_forward` yield those of one module; `feed_forward` also gets the attention before it. In the
    original, a feed-forward is inside of `wrappers` wrappers."""
    reversible = isinstance(module, ReversibleSequence)
    pattern, places = ("blocks.{}.{}.net", "fg") if reversible else ("layers.{}.{}", "01")
    assert isinstance(module.branches, nn.ModuleList)
    before = None
    for index, branch in enumerate(module.branches):
        assert isinstance(branch, Branch)
        ours, theirs = f"branches.{index}", pattern.format(index // 2, places[index % 2])
        yield from within(ours, theirs, _branch(branch))
        part, name = branch.module, "module"
        if isinstance(part, Chunked):
            part, name = part.module, "module.module"
        if isinstance(part, MultiheadAttention):
            before, inside, steps = part, attention(part), 0
        else:
            inside, steps = feed_forward(part, before), wrappers
        # their module has a wrapper for each step before it
        yield from within(f"{ours}.{name}", theirs + ".fn" * (1 + (branch.shift is not None) + steps), inside)


def _branch(branch: Branch) -> Moves:
    if branch.g is not None:
        yield Move("g", "g")
    if isinstance(branch.norm, ScaleNorm):
        yield Move("norm.g", "g", NUMBER)
    else:
        yield from renamed(branch, {"norm": "norm"})


def feed_forward(module: nn.Module, before: MultiheadAttention | None = None) -> Moves:
    if isinstance(module, GatedFeedForward):
        names = {"gate_proj": "w1", "up_proj": "w1", "down_proj": "w2"}
        return renamed(module, names, gate_proj=half(0), up_proj=half(1))
    return renamed(module, {"up_proj": "w1", "down_proj": "w2"})


def attention(module: MultiheadAttention, *, q: Change = SAME, k: Change = SAME, columns: Change = SAME) -> Moves:
    """Yield the moves of the projections. `q` and `k` are the changes of the query and key projections, `columns` is
    the change of the output projection's weight; its bias stays the same."""
    # the same object where keys are values
    values = "to_k" if module.v_proj is module.k_proj else "to_v"
    yield from renamed(module, {"q_proj": "to_q", "k_proj": "to_k", "v_proj": values}, q_proj=q, k_proj=k)
    for name, _ in module.o_proj.named_parameters():
        yield Move(f"o_proj.{name}", f"to_out.{name}", columns if name == "weight" else SAME)


def linformer(module: MultiheadAttention) -> Moves:
    """Yield the moves of an attention with a Linformer inside, its projections of the sequence included."""
    assert isinstance(module.inner, LinformerAttention)
    yield from attention(module)
    shared = module.inner.value_projection is module.inner.key_projection
    yield Move("inner.key_projection.weight", "proj_k", TRANSPOSED)
    yield Move("inner.value_projection.weight", "proj_k" if shared else "proj_v", TRANSPOSED)
