"""The names of layers in linear-attention-transformer, performer-pytorch and linformer, which are of one family."""

from collections.abc import Iterator

from torch import nn

from linattn.attention.axial import AxialAttention
from linattn.attention.base import InnerAttention
from linattn.attention.linformer import LinformerAttention
from linattn.attention.split_heads import SplitHeads
from linattn.compat.weights.conversion import NUMBER, SAME, TRANSPOSED, Change, Move, axis, half, parameters
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


def language_model(model: TokenModel, head: str) -> Iterator[Move]:
    """Move all that stands around the stack; `head` is their name of the output layer."""
    yield from parameters("embedding", "token_emb", model.embedding)
    yield from positions("positions", "pos_emb", model.positions)
    yield from parameters("norm", "norm", model.norm)
    if model.head is not None:
        yield from parameters("head", head, model.head)


def branches(stack: nn.Module) -> Iterator[tuple[str, str, Branch]]:
    """Yield each branch with our name and theirs: reversible stacks have other ones than sequential ones."""
    reversible = isinstance(stack, ReversibleSequence)
    pattern, places = ("blocks.{}.{}.net", "fg") if reversible else ("layers.{}.{}", "01")
    assert isinstance(stack.branches, nn.ModuleList)
    for index, branch in enumerate(stack.branches):
        assert isinstance(branch, Branch)
        yield f"branches.{index}", pattern.format(index // 2, places[index % 2]), branch


def around(ours: str, theirs: str, branch: Branch) -> Iterator[Move]:
    """Move the weights of a branch that are not in its module."""
    if branch.g is not None:
        yield Move(f"{ours}.g", f"{theirs}.g", SAME)
    if isinstance(branch.norm, ScaleNorm):
        yield Move(f"{ours}.norm.g", f"{theirs}.g", NUMBER)
    elif branch.norm is not None:
        yield from parameters(f"{ours}.norm", f"{theirs}.norm", branch.norm)


def inside(theirs: str, branch: Branch, wrappers: int = 0) -> str:
    """Return their name of the module, which has a wrapper for each step before it."""
    return theirs + ".fn" * (1 + (branch.shift is not None) + wrappers)


def feed_forward(ours: str, theirs: str, module: nn.Module) -> Iterator[Move]:
    if isinstance(module, Chunked):
        ours, module = f"{ours}.module", module.module
    gated = isinstance(module, GatedFeedForward)
    first = {"gate_proj": half(0), "up_proj": half(1)} if gated else {"up_proj": SAME}
    for name, change in first.items():
        yield from parameters(f"{ours}.{name}", f"{theirs}.w1", module.get_submodule(name), change)
    yield from parameters(f"{ours}.down_proj", f"{theirs}.w2", module.get_submodule("down_proj"))


def attention(
    ours: str, theirs: str, module: MultiheadAttention, *, q: Change = SAME, k: Change = SAME, columns: Change = SAME
) -> Iterator[Move]:
    """Move the projections; `columns` concerns the output's weight, not its bias."""
    yield from parameters(f"{ours}.q_proj", f"{theirs}.to_q", module.q_proj, q)
    yield from parameters(f"{ours}.k_proj", f"{theirs}.to_k", module.k_proj, k)
    # the same object where keys are values
    values = "to_k" if module.v_proj is module.k_proj else "to_v"
    yield from parameters(f"{ours}.v_proj", f"{theirs}.{values}", module.v_proj)
    for name, _ in module.o_proj.named_parameters():
        change = columns if name == "weight" else SAME
        yield Move(f"{ours}.o_proj.{name}", f"{theirs}.to_out.{name}", change)


def linformer(ours: str, theirs: str, module: MultiheadAttention) -> Iterator[Move]:
    """Move attention and the projections of the sequence."""
    assert isinstance(module.inner, LinformerAttention)
    yield from attention(ours, theirs, module)
    yield Move(f"{ours}.inner.key_projection.weight", f"{theirs}.proj_k", TRANSPOSED)
    shared = module.inner.value_projection is module.inner.key_projection
    yield Move(f"{ours}.inner.value_projection.weight", f"{theirs}.{'proj_k' if shared else 'proj_v'}", TRANSPOSED)


def parts(module: MultiheadAttention) -> list[tuple[int, InnerAttention]]:
    """Return the inner attentions, each with its number of heads."""
    inner = module.inner.inner if isinstance(module.inner, AxialAttention) else module.inner
    if isinstance(inner, SplitHeads):
        return list(zip(inner.heads, map(_inner, inner.parts), strict=True))
    return [(module.q_proj.out_features // module.head_dim, inner)]


def positions(ours: str, theirs: str, module: nn.Module | None) -> Iterator[Move]:
    """Move the positions. Sinusoids have no weights."""
    if isinstance(module, LearnedPositions):
        yield Move(f"{ours}.weight", f"{theirs}.emb.weight", SAME)
    if isinstance(module, AxialPositions):
        for index in range(len(module.shape)):
            yield Move(f"{ours}.weights.{index}", f"{theirs}.weights.{index}", axis(index, len(module.shape)))


def is_linformer(module: nn.Module) -> bool:
    return isinstance(module, MultiheadAttention) and isinstance(module.inner, LinformerAttention)


def _inner(part: nn.Module) -> InnerAttention:
    assert isinstance(part, InnerAttention)
    return part
