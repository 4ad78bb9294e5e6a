"""Multi-head attention: projections around any inner attention."""

from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from linattn.attention.base import InnerAttention
from linattn.attention.gates import AnyGates, begin_sequences, needs_strength
from linattn.attention.named import resolved_attention
from linattn.attention.rotary import count_positions
from linattn.feature_maps.base import unit
from linattn.names import unknown_name
from linattn.nn.checks import check_mask, check_sizes, check_tokens, given
from linattn.nn.convolution import ProjectionConvolutions, ShortConvolution
from linattn.nn.gates import token_gates
from linattn.nn.norms import HeadNorm
from linattn.nn.starts import UNKNOWN, ages, first_present
from linattn.ops.state import check_part, checked_kind, for_batch
from linattn.ops.tokens.rotary import turn, turns
from linattn.types import Context, ContextMask, TokenMask, Tokens

CONVOLUTIONS_ON = ("inputs", "projections")
GATE_FUNCTIONS = {"silu": F.silu, "sigmoid": torch.sigmoid}
ConvolutionState = Float[Tensor, "b w d"] | tuple[Tensor, ...] | None


class AttentionState(NamedTuple):
    """The state after some tokens: `inner` is the inner attention's own, `convolution` holds the last inputs of the
    short convolution, or of those of q, k and v, `position` the number of present tokens per row, for rotary positions;
    each is None if there is none."""

    inner: Any
    convolution: ConvolutionState
    position: Int[Tensor, " b"] | None


@final
class MultiheadAttention(nn.Module):
    """y = W_o concat_h(inner(W_q x, W_k c, W_v c)), with c = x (self attention) or the context (cross attention).

    x and y have `dim` channels, a context has `context_dim`: given this, the attention is cross attention, which takes
    neither a causal `inner` nor `rotary` nor `convolution`. `inner` is an inner attention or, for attention to all
    keys, a name of `ATTENTIONS`; `named_attention(name, …, causal=True)` makes a causal one.

    There are `num_heads` heads of q, and `num_key_heads` (as many, or a divisor) of k and v, each shared by consecutive
    heads of q. `head_dim` (`dim` / `num_heads`) and `key_dim` (`head_dim`) are the channels per head of v and of q and
    k; Based, for instance, keeps `key_dim` small for maps with many features.

    Options of recent models: `rotary` is the base of rotary positions, applied to q and k before the inner attention;
    `convolution` is the width of a causal convolution on the "inputs" of q, k and v or, with a SiLU, on their
    "projections", as `convolution_on` says; `unit_keys` divides q and k of each head by their lengths, as the delta
    rule always does; `head_norm` puts an RMSNorm on each head's output, which un-normalised attention needs, and `gate`
    multiplies the output by silu(W_g x) (both as in RetNet, https://arxiv.org/abs/2307.08621), or by another
    `gate_function` of it, "sigmoid" as in Kimi Linear. Mamba-2 has two more: `value_skip` adds D v to the output of
    each head, and `gated_norm` is an RMSNorm of all heads together, after the gate. Gates that `inner` needs are made
    from x (`linattn.nn.gates`); `beta_limit` is the largest write strength of a delta rule, 1 or 2.

    `bias` gives all projections one, but `out_bias` decides for W_o if it is given. `dropout` is the probability of
    dropping outputs of W_o in training, `hidden_dropout` that of its inputs."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        inner: InnerAttention | str,
        *,
        num_key_heads: int | None = None,
        head_dim: int | None = None,
        key_dim: int | None = None,
        context_dim: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        rotary: float | None = None,
        convolution: int = 0,
        convolution_on: str = "inputs",
        beta_limit: float = 1.0,
        unit_keys: bool = False,
        value_skip: bool = False,
        head_norm: bool = False,
        gate: bool = False,
        gate_function: str = "silu",
        gated_norm: bool = False,
        dropout: float = 0.0,
        hidden_dropout: float = 0.0,
    ):
        super().__init__()
        check_sizes(dim=dim, num_heads=num_heads)
        check_sizes(**given(num_key_heads=num_key_heads, head_dim=head_dim, key_dim=key_dim))
        check_sizes(convolution=convolution, least=0)
        key_heads = num_heads if num_key_heads is None else num_key_heads
        self.head_dim = _head_dim(dim, num_heads, key_heads, head_dim)
        self.key_dim = self.head_dim if key_dim is None else key_dim
        self.rotary, self.dim, self.unit_keys = rotary, dim, unit_keys
        width = num_heads * self.head_dim
        self.source_dim = source = dim if context_dim is None else context_dim
        self.inner = resolved_attention(inner, num_heads=num_heads, head_dim=self.key_dim, num_key_heads=num_key_heads)
        self.q_proj = nn.Linear(dim, num_heads * self.key_dim, bias=bias)
        self.k_proj = nn.Linear(source, key_heads * self.key_dim, bias=bias)
        self.v_proj = nn.Linear(source, key_heads * self.head_dim, bias=bias)
        self.g_proj = nn.Linear(dim, width, bias=bias) if gate else None
        self.o_proj = nn.Linear(width, dim, bias=bias if out_bias is None else out_bias)
        self.convolution_on = convolution_on
        self.convolution = self._make_convolution(convolution)
        if beta_limit != 1 and not needs_strength(self.inner.needs):
            raise ValueError(f"beta_limit is of attentions with the delta rule, but is {beta_limit} for another one")
        self.gates = token_gates(
            self.inner.needs, dim, num_key_heads=key_heads, key_dim=self.key_dim, beta_limit=beta_limit
        )
        self.value_skip = nn.Parameter(torch.empty(num_heads)) if value_skip else None
        self.head_norm = HeadNorm(self.head_dim) if head_norm else None
        if gate_function not in GATE_FUNCTIONS:
            raise unknown_name("gate_function", gate_function, GATE_FUNCTIONS)
        if gate_function != "silu" and not gate:
            raise ValueError(f"gate_function is {gate_function!r}, but gate is false: there is none")
        self.gate_function = gate_function
        self.gated_norm = HeadNorm(width) if gated_norm else None
        self.dropout, self.hidden_dropout = nn.Dropout(dropout), nn.Dropout(hidden_dropout)
        self.is_cross_attention = context_dim is not None
        if self.is_cross_attention:
            self._check_cross_attention()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.value_skip is not None:
            nn.init.ones_(self.value_skip)

    def forward(
        self, x: Tokens, context: Context = None, *, key_mask: ContextMask = None, starts: TokenMask = None
    ) -> Tokens:
        """Attend to x, or to the context if there is one; `key_mask` is True for its present tokens.

        With gates that let every head fade, a row may hold several sequences: `starts` is True for tokens that begin
        one, which sees nothing before: neither by attention nor by convolution, and positions begin again."""
        if context is None:
            q, k, v, _, _ = self._project(x, None, key_mask, starts)
        else:
            if starts is not None:
                raise ValueError("starts are of self attention: cross attention takes none")
            self._check_cross_attention()
            check_tokens(x, self.dim)
            check_tokens(context, self.source_dim, key_mask, name="context")
            q, (k, v) = _split(self.q_proj(x), self.key_dim), self._keys(context)
        y = self.inner(q, k, v, key_mask=_over_heads(key_mask), gates=self._gates(x, key_mask, starts))
        return self._merge(x, y, v)

    def summarize(self, context: Float[Tensor, "b m c"], *, key_mask: ContextMask = None) -> Any:
        """Return what `read` needs of the context; for linear attention, the sums over its tokens."""
        self._check_cross_attention()
        check_tokens(context, self.source_dim, key_mask, name="context")
        return self.inner.summarize(*self._keys(context), key_mask=_over_heads(key_mask))

    def read(self, x: Tokens, summary: Any) -> Tokens:
        """Return the output of `forward` for any number of queries, given the summary of the context."""
        self._check_cross_attention()
        check_tokens(x, self.dim)
        return self._merge(x, self.inner.read(_split(self.q_proj(x), self.key_dim), summary))

    def extend(
        self, x: Tokens, state: AttentionState | None = None, *, key_mask: TokenMask = None, starts: TokenMask = None
    ) -> tuple[Tokens, AttentionState]:
        """Process the next tokens, any number of them, after those summed up in `state` (None: the sequence begins).

        `starts` is as in `forward`; a sequence that begins with missing tokens needs a present one in the same call."""
        if state is not None:
            state = for_batch(checked_kind(state, AttentionState), x.shape[0])
            check_part("position", state.position, None if self.rotary is None else torch.int64)
            if self.convolution is None or state.convolution is None:
                check_part("convolution", state.convolution, None if self.convolution is None else x.dtype)
        q, k, v, convolution, position = self._project(x, state, key_mask, starts)
        inner, gates = None if state is None else state.inner, self._gates(x, key_mask, starts)
        y, inner = self.inner.extend(q, k, v, inner, key_mask=_over_heads(key_mask), gates=gates)
        return self._merge(x, y, v), AttentionState(inner, convolution, position)

    def _project(
        self, x: Tensor, state: AttentionState | None, key_mask: Tensor | None, starts: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, ConvolutionState, Tensor | None]:
        if self.is_cross_attention:
            raise ValueError("cross attention needs its context, but none was given")
        check_tokens(x, self.dim, key_mask)
        check_mask(x, starts, starts=True)
        mixed, convolution, position = x, None, None
        past: Any = None if state is None else state.convolution
        # an adapter may stand in the convolution's place, so its class says nothing
        if self.convolution is not None and self.convolution_on == "inputs":
            mixed, convolution = self.convolution.extend(x, past, key_mask=key_mask, starts=starts)
        q, k, v = self.q_proj(mixed), self.k_proj(mixed), self.v_proj(mixed)
        if self.convolution is not None and self.convolution_on == "projections":
            (q, k, v), convolution = self.convolution.extend((q, k, v), past, key_mask=key_mask, starts=starts)
        q, k, v = _split(q, self.key_dim), _split(k, self.key_dim), _split(v, self.head_dim)
        if self.unit_keys:
            q, k = unit(q), unit(k)
        if self.rotary is not None:
            positions, position = count_positions(x, state and state.position, key_mask)
            if starts is not None:
                age, after = ages(starts, key_mask)
                positions = torch.where(age < UNKNOWN, age, positions)
                position = torch.where(after < UNKNOWN, after, position)
            angles = turns(positions.unsqueeze(1), self.key_dim, x.dtype, base=self.rotary)
            q, k = turn(q, *angles), turn(k, *angles)
        return q, k, v, convolution, position

    def _gates(self, x: Tensor, key_mask: Tensor | None, starts: Tensor | None) -> AnyGates:
        gates = None if self.gates is None else self.gates(x)
        return gates if starts is None else begin_sequences(self.inner.needs, gates, first_present(starts, key_mask))

    def _keys(self, context: Tensor) -> tuple[Tensor, Tensor]:
        return _split(self.k_proj(context), self.key_dim), _split(self.v_proj(context), self.head_dim)

    def _make_convolution(self, width: int) -> Any:
        if self.convolution_on not in CONVOLUTIONS_ON:
            raise unknown_name("convolution_on", self.convolution_on, CONVOLUTIONS_ON)
        if width == 0:
            if self.convolution_on != "inputs":
                raise ValueError(f"convolution_on is {self.convolution_on!r}, but convolution is 0: there is none")
            return None
        if self.convolution_on == "inputs":
            return ShortConvolution(self.dim, width)
        return ProjectionConvolutions([x.out_features for x in (self.q_proj, self.k_proj, self.v_proj)], width)

    def _merge(self, x: Tensor, y: Tensor, v: Tensor | None = None) -> Tensor:
        if self.value_skip is not None and v is not None:
            y = y + (self.value_skip.view(v.shape[1], -1, 1, 1) * v.unsqueeze(2)).flatten(1, 2)
        if self.head_norm is not None:
            y = self.head_norm(y)
        y = y.transpose(1, 2).flatten(2)
        if self.g_proj is not None:
            y = GATE_FUNCTIONS[self.gate_function](self.g_proj(x)) * y
        if self.gated_norm is not None:
            y = self.gated_norm(y)
        return self.dropout(self.o_proj(self.hidden_dropout(y)))

    def _check_cross_attention(self) -> None:
        if self.inner.causal:
            raise ValueError("cross attention has no order of queries and keys: the inner attention must not be causal")
        if self.convolution is not None or self.rotary is not None or self.unit_keys or self.value_skip is not None:
            raise ValueError(
                "convolution, rotary, unit_keys and value_skip belong to self attention: cross attention takes none"
            )


def _head_dim(dim: int, num_heads: int, num_key_heads: int, head_dim: int | None) -> int:
    if num_heads % num_key_heads:
        raise ValueError(f"num_key_heads must divide num_heads, but they are {num_key_heads} and {num_heads}")
    if head_dim is not None:
        return head_dim
    if dim % num_heads:
        raise ValueError(f"num_heads must divide dim, or head_dim be given, but they are {num_heads} and {dim}")
    return dim // num_heads


def _split(x: Tensor, channels: int) -> Tensor:
    """Split heads; the shape gives their number, so that a tensor-parallel rank may hold only some of them."""
    return x.unflatten(-1, (-1, channels)).transpose(1, 2)


def _over_heads(key_mask: Tensor | None) -> Tensor | None:
    return None if key_mask is None else key_mask.unsqueeze(1)
