"""Weights of fast-transformers' encoder and decoder, batch or recurrent: both have the same names."""

from functools import partial

from torch import nn

from linattn.compat.fast_transformers.models import TransformerDecoder, TransformerEncoder, TransformerOptions
from linattn.compat.options import effective
from linattn.compat.weights.conversion import TRANSPOSED, Conversion, Move, Moves, renamed, within
from linattn.feature_maps import RandomProjection
from linattn.nn import Branch, MultiheadAttention

ATTENTION = {
    "q_proj": "query_projection",
    "k_proj": "key_projection",
    "v_proj": "value_projection",
    "o_proj": "out_projection",
}
FEED_FORWARD = {"up_proj": "linear1", "down_proj": "linear2"}


def _moves(model: TransformerEncoder | TransformerDecoder, _: bool) -> Moves:
    """Yield a `Move` for each weight. The original's layers have one or two attentions, then a feed-forward."""
    attentions = ("attention",) if isinstance(model, TransformerEncoder) else ("self_attention", "cross_attention")
    for index, branch in enumerate(model.layers.branches):
        layer, place = divmod(index, len(attentions) + 1)
        yield from renamed(model, {f"layers.norms.{index}": f"layers.{layer}.norm{place + 1}"})
        assert isinstance(branch, Branch)
        name = f".{attentions[place]}" if place < len(attentions) else ""
        yield from within(f"layers.branches.{index}.module", f"layers.{layer}{name}", _part(branch.module))
    yield from renamed(model, {"norm": "norm"})


def _part(module: nn.Module) -> Moves:
    yield from renamed(module, ATTENTION if isinstance(module, MultiheadAttention) else FEED_FORWARD)
    for name, part in module.named_modules():
        if isinstance(part, RandomProjection):
            yield Move(f"{name}.rows", "inner_attention.feature_map.omega", TRANSPOSED)


_conversion = Conversion(_moves, roots=("layers.",), arguments=partial(effective, TransformerOptions))
CONVERSIONS: dict[type[nn.Module], Conversion] = dict.fromkeys((TransformerEncoder, TransformerDecoder), _conversion)
