"""Weights of performer-pytorch 1.1.4."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from linattn.attention import InnerAttention, LocalAttention, RotaryAttention
from linattn.compat.layers import inner_parts
from linattn.compat.options import effective
from linattn.compat.performer_pytorch.attention import (
    Attention,
    AttentionBase,
    CrossAttention,
    FastAttention,
    SelfAttention,
)
from linattn.compat.performer_pytorch.floored_favor import FlooredFavorAttention
from linattn.compat.performer_pytorch.options import PerformerOptions
from linattn.compat.performer_pytorch.performer import Performer, PerformerLM
from linattn.compat.performer_pytorch.performer_enc_dec import FIXED, PerformerEncDec
from linattn.compat.weights import conversion, layers
from linattn.compat.weights.conversion import Conversion, Move, Moves, within
from linattn.feature_maps import RandomProjection
from linattn.nn import MultiheadAttention

# every weight a second time, and matrices that no head uses
LEFT_OUT = (*layers.TABLES, r".*\bproj_updater\.instance\..*", r".*\bfast_attention\.projection_matrix")
# the seed of our drawings, and whether they have ended, which theirs does not save
NEW = (r".*\bproj_updater\.(seed|fixed)",)


def _effective_in_parts(_: type, config: Mapping[str, Any]) -> dict[str, Any]:
    both = {"no_projection": config.get("no_projection", False)}
    # what is decided for them there, and the readme's name that is not its argument
    without = {"tie_token_embed", "dec_causal", "dec_cross_attend"}
    arguments = {name: value for name, value in config.items() if name[:4] not in ("enc_", "dec_")}
    for prefix in ("enc_", "dec_"):
        given = both | {name[4:]: value for name, value in FIXED.items() if name.startswith(prefix)}
        own = {name[4:]: value for name, value in config.items() if name.startswith(prefix) and name not in without}
        own = effective(PerformerOptions, PerformerLM, own | given)
        arguments |= {prefix + name: value for name, value in own.items() if name not in given}
    return {name: value for name, value in arguments.items() if name not in without}


def _encoder_and_decoder(model: PerformerEncDec, aligned: bool) -> Moves:
    for name, part in {"enc": model.enc, "dec.net": model.dec.net}.items():
        yield from within(name, name, _language_model(part, aligned))


def _language_model(model: PerformerLM, aligned: bool) -> Moves:
    yield from layers.language_model(model, "to_out")
    yield from within("performer", "performer", _performer(model.performer, aligned))


def _performer(model: Performer, aligned: bool) -> Moves:
    yield Move("proj_updater.calls_since_last_redraw", "proj_updater.calls_since_last_redraw")
    stack = layers.stack(model.net, partial(_attention, aligned=aligned), layers.feed_forward)
    yield from within("net", "net", stack)


def _layer(model: AttentionBase, aligned: bool) -> Moves:
    yield from within("attention", "", _attention(model.attention, aligned))


def _attention(module: MultiheadAttention, aligned: bool) -> Moves:
    parts, d, rotary = inner_parts(module), module.head_dim, module.rotary is not None
    q = conversion.heads([(count, _rows(part, rotary=rotary, delayed=not aligned)) for count, part in parts], d)
    k = conversion.heads([(count, _rows(part, rotary=rotary)) for count, part in parts], d)
    yield from layers.attention(module, q=q, k=k)
    yield from within("inner", "", _features("fast_attention.projection_matrix", module.inner, rotary=rotary))


def _rows(part: InnerAttention, *, rotary: bool, delayed: bool = False) -> Callable[[Tensor], Tensor]:
    """Return a function that converts the rows of a query or key projection for the heads of `part`.

    If fast heads are `rotary`, the original has their channels in another order than ours. Since local-attention 1.7.2,
    the original rotates queries of local heads that see both sides by one window too many. Rows that were trained so
    are `delayed`: this rotation is then part of the conversion."""
    inner = part.inner if isinstance(part, RotaryAttention) else part
    if isinstance(inner, LocalAttention):
        delay = partial(conversion.rotated_by, position=inner.window.size)
        return delay if delayed and not inner.causal else conversion.SAME.apply
    return conversion.pairs_as_halves if rotary else conversion.SAME.apply


def _features(theirs: str, module: nn.Module, *, rotary: bool = False) -> Moves:
    for name, part in module.named_modules():
        if isinstance(part, RandomProjection):
            yield Move(f"{name}.rows", theirs, conversion.CHANNELS_AS_HALVES if rotary else conversion.SAME)


def _differences(model: nn.Module) -> Iterator[str]:
    if any(isinstance(part, FlooredFavorAttention) and part.causal for part in model.modules()):
        yield (
            "performer-pytorch's causal FAVOR+ takes the largest of all keys, later ones too, so its earlier outputs "
            "change with later tokens; here each output is that of its prefix alone"
        )


_conversion = partial(
    Conversion, arguments=partial(effective, PerformerOptions), left_out=LEFT_OUT, new=NEW, differences=_differences
)
# a layer alone does not count its calls there
_layer_conversion = _conversion(_layer, roots=("to_q.",), new=(r"proj_updater\..*",))
CONVERSIONS: dict[type[nn.Module], Conversion] = {
    PerformerLM: _conversion(_language_model, roots=("token_emb.",)),
    Performer: _conversion(_performer, roots=("net.layers.", "net.blocks.")),
    PerformerEncDec: _conversion(
        _encoder_and_decoder,
        roots=("enc.",),
        arguments=_effective_in_parts,
        left_out=(r"enc\.to_out\..*", r"(enc|dec\.net)\.(layer_)?pos_emb\.emb", *LEFT_OUT),
    ),
    FastAttention: _conversion(
        lambda model, _: _features("projection_matrix", model),
        roots=("projection_matrix",),
        left_out=("projection_matrix",),
    ),
    **dict.fromkeys((Attention, SelfAttention, CrossAttention), _layer_conversion),
}
