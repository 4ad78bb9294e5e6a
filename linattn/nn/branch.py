"""A branch: what one layer adds to the residual stream, whatever kind of layer it is."""

from typing import Any, NamedTuple, cast, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from linattn.checks import check_instances, check_types, given
from linattn.nn.attention import MultiheadAttention
from linattn.nn.token_shift import TokenShift
from linattn.ops.nested import check_part, checked_kind
from linattn.types import Context, ContextMask, TokenMask, Tokens


class Call(NamedTuple):
    """The arguments of a branch, beside x. One that is None is not passed on."""

    key_mask: TokenMask = None
    context: Context = None
    context_mask: ContextMask = None

    def __call__(self, branch: Any, x: Tokens) -> Any:
        return branch(x, **given(**self._asdict()))

    def checked(self, attends: bool, reason: str) -> "Call":
        """Return the call. Raise ValueError for a context_mask without a context, or for a context if no layer
        `attends` to one; the message then gives the `reason`."""
        if self.context is not None and not attends:
            raise ValueError(f"a context was given, but nothing attends to it: {reason}")
        if self.context is None and self.context_mask is not None:
            raise ValueError("context_mask is of a context, but none was given")
        return self


class BranchState(NamedTuple):
    """`shift` holds the last w inputs of the token shift (None without one), `module` the module's own state or, in
    cross attention, the context's summary."""

    shift: Float[Tensor, "b w d"] | None
    module: Any


@final
class Branch(nn.Module):
    """y = g · module(shift(norm(x))), where each part but the module is optional.

    The `module` is self attention or anything with its `forward(x, *, key_mask)` and `extend`, cross attention (a
    `MultiheadAttention` with a `context_dim`), or a function of each token alone, such as a feed-forward. The `norm` is
    such a function too; `shift` is a `TokenShift`. With `rezero`, g is a learned number that starts near zero.
    Bachlechner et al., https://arxiv.org/abs/2003.04887"""

    @check_types
    def __init__(
        self, module: nn.Module, *, norm: nn.Module | None = None, shift: TokenShift | None = None, rezero: bool = False
    ):
        super().__init__()
        check_instances(nn.Module, module=module, **given(norm=norm))
        check_instances(TokenShift, **given(shift=shift))
        self.module, self.norm, self.shift = module, norm, shift
        self.g = nn.Parameter(torch.empty(())) if rezero else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.g is not None:
            # not quite zero, as in the paper, so that the module learns from the first step
            nn.init.constant_(self.g, 1e-3)

    @property
    def is_cross_attention(self) -> bool:
        return isinstance(self.module, MultiheadAttention) and self.module.is_cross_attention

    @property
    def has_past(self) -> bool:
        """True if the module mixes tokens, and continues from its state by `extend`."""
        # an nn.Sequential has an `extend` that adds parts to it
        return hasattr(self.module, "extend") and not isinstance(self.module, nn.Sequential)

    def forward(
        self, x: Tokens, *, key_mask: TokenMask = None, context: Context = None, context_mask: ContextMask = None
    ) -> Tokens:
        x = x if self.norm is None else self.norm(x)
        x = x if self.shift is None else self.shift(x, key_mask=key_mask)
        if self.is_cross_attention:
            y = self.module(x, context, key_mask=context_mask)
        elif self.has_past:
            y = self.module(x, key_mask=key_mask)
        else:
            y = self.module(x)
        return y if self.g is None else self.g * y

    def extend(
        self,
        x: Tokens,
        state: BranchState | None = None,
        *,
        key_mask: TokenMask = None,
        context: Context = None,
        context_mask: ContextMask = None,
    ) -> tuple[Tokens, BranchState]:
        """Process the next tokens. The context is summed up by the first call; later calls need none."""
        if state is not None and (checked_kind(state, BranchState).shift is None) != (self.shift is None):
            check_part("shift", state.shift, None if self.shift is None else x.dtype)
        last_inputs, past = None, None if state is None else state.module
        x = x if self.norm is None else self.norm(x)
        if self.shift is not None:
            x, last_inputs = self.shift.extend(x, state and state.shift, key_mask=key_mask)
        module = cast(Any, self.module)
        if self.is_cross_attention:
            if past is None:
                if context is None:
                    raise ValueError("cross attention needs its context, but none was given")
                past = module.summarize(context, key_mask=context_mask)
            y = module.read(x, past)
        elif self.has_past:
            y, past = module.extend(x, past, key_mask=key_mask)
        else:
            y = module(x)
        return y if self.g is None else self.g * y, BranchState(last_inputs, past)
