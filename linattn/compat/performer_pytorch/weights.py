"""Weights of performer-pytorch 1.1.4."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from linattn.attention import FlooredFavorAttention
from linattn.attention.base import InnerAttention
from linattn.attention.local import LocalAttention
from linattn.attention.rotary import RotaryAttention
from linattn.compat.options import Rule, effective
from linattn.compat.performer_pytorch import (
    Attention,
    CrossAttention,
    FastAttention,
    Performer,
    PerformerEncDec,
    PerformerLM,
    SelfAttention,
)
from linattn.compat.performer_pytorch.options import POSITION_RULES, RULES
from linattn.compat.performer_pytorch.performer_enc_dec import FIXED
from linattn.compat.weights import layers
from linattn.compat.weights.conversion import (
    SAME,
    Conversion,
    Move,
    channels,
    halves,
    heads,
    pairs_as_halves,
    rotated_by,
)
from linattn.feature_maps import RandomProjection
from linattn.nn import MultiheadAttention

Attend = Attention | SelfAttention | CrossAttention

# every weight a second time, and matrices that no head uses
LEFT_OUT = (*layers.TABLES, r".*\bproj_updater\.instance\..*", r".*\bfast_attention\.projection_matrix")
LM_RULES = (*RULES, *POSITION_RULES)
# the seed of our drawings, and whether they have ended, which theirs does not save
NEW = (r".*\bproj_updater\.(seed|fixed)",)


def _of_encoder_and_decoder(config: Mapping[str, Any]) -> dict[str, Any]:
    both = {"no_projection": config.get("no_projection", False)}
    # what is decided for them there, and the readme's name that is not its argument
    without = {"tie_token_embed", "dec_causal", "dec_cross_attend"}
    arguments = {name: value for name, value in config.items() if name[:4] not in ("enc_", "dec_")}
    for prefix in ("enc_", "dec_"):
        given = both | {name[4:]: value for name, value in FIXED.items() if name.startswith(prefix)}
        own = {name[4:]: value for name, value in config.items() if name.startswith(prefix) and name not in without}
        own = effective(PerformerLM, LM_RULES, own | given)
        arguments |= {prefix + name: value for name, value in own.items() if name not in given}
    return {name: value for name, value in arguments.items() if name not in without}


def _encoder_and_decoder(model: PerformerEncDec, aligned: bool) -> Iterator[Move]:
    for name in ("enc.", "dec.net."):
        part = model.get_submodule(name.rstrip("."))
        assert isinstance(part, PerformerLM)
        for move in _language_model(part, aligned):
            yield move._replace(ours=name + move.ours, theirs=None if move.theirs is None else name + move.theirs)


def _language_model(model: PerformerLM, aligned: bool) -> Iterator[Move]:
    yield from layers.language_model(model, "to_out")
    for move in _performer(model.performer, aligned):
        yield move._replace(ours=f"performer.{move.ours}", theirs=f"performer.{move.theirs}")


def _performer(model: Performer, aligned: bool) -> Iterator[Move]:
    calls = "proj_updater.calls_since_last_redraw"
    yield Move(calls, calls, SAME)
    for name, their_name, branch in layers.branches(model.net):
        mine, its = f"net.{name}", f"net.{their_name}"
        yield from layers.around(mine, its, branch)
        if isinstance(branch.module, MultiheadAttention):
            yield from _attention(f"{mine}.module", f"{layers.inside(its, branch)}.", branch.module, aligned)
        else:
            yield from layers.feed_forward(f"{mine}.module", layers.inside(its, branch, wrappers=1), branch.module)


def _layer(model: Attend, aligned: bool) -> Iterator[Move]:
    yield from _attention("attention", "", model.attention, aligned)


def _fast_attention(model: FastAttention, aligned: bool) -> Iterator[Move]:
    yield from _features("", "projection_matrix", model, rotary=False)


def _attention(ours: str, theirs: str, module: MultiheadAttention, aligned: bool) -> Iterator[Move]:
    """Move the weights of an attention. `theirs` ends with a dot, unless it is empty: a layer alone has no name."""
    parts, d = layers.parts(module), module.head_dim
    q = heads([(count, _queries(part, aligned)) for count, part in parts], d)
    k = heads([(count, _keys(part)) for count, part in parts], d)
    for move in layers.attention(ours, "", module, q=q, k=k):
        yield move._replace(theirs=theirs + str(move.theirs).removeprefix("."))
    matrix = f"{theirs}fast_attention.projection_matrix"
    rotary = any(_is_fast_with_rotary(part) for _, part in parts)
    yield from _features(f"{ours}.inner.", matrix, module.inner, rotary=rotary)


def _features(ours: str, theirs: str, module: nn.Module, *, rotary: bool) -> Iterator[Move]:
    for name, part in module.named_modules():
        if isinstance(part, RandomProjection):
            change = channels(halves(part.rows.shape[1])) if rotary else SAME
            yield Move(f"{ours}{name}.rows", theirs, change)


def _keys(part: InnerAttention) -> Callable[[Tensor], Tensor]:
    return pairs_as_halves if _is_fast_with_rotary(part) else SAME.apply


def _queries(part: InnerAttention, aligned: bool) -> Callable[[Tensor], Tensor]:
    """Return what happens to queries. Since local-attention 1.7.2 those of heads that look both ways have the angles of
    a window later; weights that learned so are rotated here."""
    inner = part.inner if isinstance(part, RotaryAttention) else part
    if isinstance(inner, LocalAttention) and not inner.causal and not aligned:
        return partial(rotated_by, places=inner.window.size)
    return _keys(part)


def _is_fast_with_rotary(part: InnerAttention) -> bool:
    return isinstance(part, RotaryAttention) and isinstance(part.inner, FastAttention)


def _differences(model: nn.Module) -> Iterator[str]:
    if any(isinstance(part, FlooredFavorAttention) and part.causal for part in model.modules()):
        yield (
            "performer-pytorch's causal FAVOR+ takes the largest of all keys, later ones too, so its earlier outputs "
            "change with later tokens; here each output is that of its prefix alone"
        )


def _conversion(
    kind: type[nn.Module], moves: Callable[..., Any], *roots: str, rules: tuple[Rule, ...] = RULES
) -> Conversion:
    return Conversion(lambda config: kind(**effective(kind, rules, config)), moves, roots, LEFT_OUT, NEW, _differences)


def _layer_conversion(kind: type[Attend]) -> Conversion:
    conversion = _conversion(kind, _layer, "to_q.")
    # a layer alone does not count its calls there
    return conversion._replace(new=(r"proj_updater\..*",))


CONVERSIONS: dict[type[nn.Module], Conversion] = {
    PerformerLM: _conversion(PerformerLM, _language_model, "token_emb.", rules=LM_RULES),
    Performer: _conversion(Performer, _performer, "net.layers.", "net.blocks."),
    PerformerEncDec: _conversion(PerformerEncDec, _encoder_and_decoder, "enc.")._replace(
        build=lambda config: PerformerEncDec(**_of_encoder_and_decoder(config)),
        left_out=(r"enc\.to_out\..*", r"(enc|dec\.net)\.(layer_)?pos_emb\.emb", *LEFT_OUT),
    ),
    FastAttention: _conversion(FastAttention, _fast_attention, "projection_matrix")._replace(
        left_out=("projection_matrix",)
    ),
    **{kind: _layer_conversion(kind) for kind in (Attention, SelfAttention, CrossAttention)},
}
