"""Weights of fast-transformers' encoder and decoder, batch or recurrent: both have the same names."""

from collections.abc import Iterator

from torch import nn

from linattn.compat.fast_transformers.models import RULES, TransformerDecoder, TransformerEncoder
from linattn.compat.options import effective
from linattn.compat.weights.conversion import TRANSPOSED, Conversion, Move, parameters
from linattn.feature_maps import RandomProjection
from linattn.nn import Branch

# ours in `module`, theirs in a layer
ATTENTION = {
    "q_proj": "query_projection",
    "k_proj": "key_projection",
    "v_proj": "value_projection",
    "o_proj": "out_projection",
}
FEED_FORWARD = {"up_proj": "linear1", "down_proj": "linear2"}


def _moves(model: TransformerEncoder | TransformerDecoder, attentions: tuple[str, ...]) -> Iterator[Move]:
    """Move all weights. A layer has an attention for each name, then a feed-forward."""
    size = len(attentions) + 1
    stack = model.layers
    for index, (branch, norm) in enumerate(zip(stack.branches, stack.norms, strict=True)):
        layer, place = divmod(index, size)
        ours, theirs = f"layers.branches.{index}.module", f"layers.{layer}"
        yield from parameters(f"layers.norms.{index}", f"{theirs}.norm{place + 1}", norm)
        assert isinstance(branch, Branch)
        if place < len(attentions):
            theirs = f"{theirs}.{attentions[place]}"
            yield from _omega(ours, theirs, branch.module)
        names = ATTENTION if place < len(attentions) else FEED_FORWARD
        for name, their_name in names.items():
            yield from parameters(f"{ours}.{name}", f"{theirs}.{their_name}", branch.module.get_submodule(name))
    if model.norm is not None:
        yield from parameters("norm", "norm", model.norm)


def _omega(ours: str, theirs: str, module: nn.Module) -> Iterator[Move]:
    for name, part in module.named_modules():
        if isinstance(part, RandomProjection):
            yield Move(f"{ours}.{name}.rows", f"{theirs}.inner_attention.feature_map.omega", TRANSPOSED)


CONVERSIONS: dict[type[nn.Module], Conversion] = {
    TransformerEncoder: Conversion(
        lambda config: TransformerEncoder(**effective(TransformerEncoder, RULES, config)),
        lambda model, _: _moves(model, ("attention",)),
        roots=("layers.",),
    ),
    TransformerDecoder: Conversion(
        lambda config: TransformerDecoder(**effective(TransformerDecoder, RULES, config)),
        lambda model, _: _moves(model, ("self_attention", "cross_attention")),
        roots=("layers.",),
    ),
}
