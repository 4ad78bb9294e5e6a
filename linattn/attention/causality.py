"""The causal form of an attention over all keys, for modules whose calls say whether they are causal."""

from copy import copy
from functools import singledispatch

from linattn.attention.base import InnerAttention
from linattn.attention.floored_favor import FlooredFavorAttention
from linattn.attention.linear import LinearAttention
from linattn.attention.local import LocalAttention
from linattn.attention.rotary import RotaryAttention
from linattn.attention.rotary_linear import RotaryLinearAttention
from linattn.attention.softmax import SoftmaxAttention
from linattn.attention.split_heads import SplitHeads


@singledispatch
def causal_form(inner: InnerAttention) -> InnerAttention | None:
    """Return the same attention over j ≤ i, sharing its weights; None where there is none, as for Linformer.

    The result is a view of the module: register, move and save only the original. A new kind of attention
    adds its form with `causal_form.register`."""
    return inner if inner.causal else None


@causal_form.register(FlooredFavorAttention)
@causal_form.register(LinearAttention)
@causal_form.register(RotaryLinearAttention)
@causal_form.register(SoftmaxAttention)
def _(inner: FlooredFavorAttention | LinearAttention | RotaryLinearAttention | SoftmaxAttention) -> InnerAttention:
    form = copy(inner)
    form.causal = True
    return form


@causal_form.register
def _(inner: LocalAttention) -> InnerAttention:
    form = copy(inner)
    form.window, form.causal = inner.window._replace(causal=True), True
    return form


@causal_form.register
def _(inner: RotaryAttention) -> InnerAttention | None:
    form = causal_form(inner.inner)
    return None if form is None else RotaryAttention(form, base=inner.base)


@causal_form.register
def _(inner: SplitHeads) -> InnerAttention | None:
    forms = [causal_form(part) for part in inner.parts]
    known = [(count, form) for count, form in zip(inner.heads, forms, strict=True) if form is not None]
    return SplitHeads(*known) if len(known) == len(forms) else None
