"""Weights of linformer 0.2.3."""

from collections.abc import Iterator

from torch import nn

from linattn.compat.linformer import Linformer, LinformerLM, LinformerSelfAttention
from linattn.compat.weights import layers
from linattn.compat.weights.conversion import SAME, Conversion, Move, parameters
from linattn.nn import MultiheadAttention


def _language_model(model: LinformerLM, _: bool) -> Iterator[Move]:
    whole = model.model
    yield from parameters("model.embedding", "token_emb", whole.embedding)
    yield Move("model.positions.weight", "pos_emb.weight", SAME)
    yield from _stack("model.stack", "linformer.net", whole.stack)
    assert whole.head is not None
    yield from parameters("model.head", "to_logits", whole.head)


def _linformer(model: Linformer, _: bool) -> Iterator[Move]:
    yield from _stack("net", "net", model.net)


def _layer(model: LinformerSelfAttention, _: bool) -> Iterator[Move]:
    for move in layers.linformer("attention", "", model.attention):
        yield move._replace(theirs=str(move.theirs).removeprefix("."))


def _stack(ours: str, theirs: str, stack: nn.Module) -> Iterator[Move]:
    for name, their_name, branch in layers.branches(stack):
        mine, its = f"{ours}.{name}", f"{theirs}.{their_name}"
        yield from layers.around(mine, its, branch)
        inside = layers.inside(its, branch)
        if isinstance(branch.module, MultiheadAttention):
            yield from layers.linformer(f"{mine}.module", inside, branch.module)
        else:
            yield from layers.feed_forward(f"{mine}.module", inside, branch.module)


CONVERSIONS: dict[type[nn.Module], Conversion] = {
    LinformerLM: Conversion(lambda config: LinformerLM(**config), _language_model, roots=("token_emb.",)),
    Linformer: Conversion(lambda config: Linformer(**config), _linformer, roots=("net.layers.", "net.blocks.")),
    LinformerSelfAttention: Conversion(lambda config: LinformerSelfAttention(**config), _layer, roots=("to_q.",)),
}
