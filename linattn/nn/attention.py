"""Multi-head attention: projections around any inner attention."""

import math
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from linattn.attention.base import InnerAttention
from linattn.attention.gates import AnyGates, begin_sequences, needs_strength
from linattn.attention.named import resolved_attention
from linattn.attention.rotary import count_positions
from linattn.checks import check_sizes, check_types, given
from linattn.feature_maps.base import unit
from linattn.names import unknown_name
from linattn.nn.checks import check_mask, check_tokens, checked_head_dim
from linattn.nn.convolution import ProjectionConvolutions, ShortConvolution
from linattn.nn.gates import token_gates
from linattn.nn.norms import HEAD_NORM_EPS, HeadNorm
from linattn.nn.starts import UNKNOWN, ages, first_present
from linattn.nn.writes import at_last, fade_at_first, for_each, read_at_last
from linattn.ops.nested import check_part, checked_kind, for_batch
from linattn.ops.tokens.rotary import rotate_by, rotations
from linattn.types import Context, ContextMask, TokenMask, Tokens

CONVOLUTIONS_ON = ("inputs", "projections")
GATE_FUNCTIONS = {"silu": F.silu, "sigmoid": torch.sigmoid}
ConvolutionState = Float[Tensor, "b w d"] | tuple[Tensor, ...] | None


class AttentionState(NamedTuple):
    """The state after some tokens: `inner` is the inner attention's state, `convolution` the last inputs of the short
    convolution, or of each of the convolutions of q, k and v, and `position` the number of present tokens per row, for
    rotary positions. Each is None in a layer without such a part."""

    inner: Any
    convolution: ConvolutionState
    position: Int[Tensor, " b"] | None


@final
class MultiheadAttention(nn.Module):
    """y = W_o concat_h(inner(W_q x, W_k c, W_v c)), with c = x (self attention) or the context (cross attention).

    With a `context_dim` every call is cross attention, which takes neither a causal or local `inner` nor rotary
    positions, convolution, unit_keys and value_skip. The gates that `inner` needs are made from x (`linattn.nn.gates`).

    The configuration of a language model and the help of `linattn train` take the descriptions below from here.

    Sizes:

    - `dim`: channels of x and y
    - `num_heads`: attention heads per layer
    - `inner`: an inner attention, such as a `named_attention`; or a name of `ATTENTIONS`, for attention to all keys
    - `num_key_heads`: fewer heads for keys and values, shared by consecutive query heads (default: as many)
    - `head_dim`: width of a head (default: dim / num_heads)
    - `key_dim`: width of a head's queries and keys, small for maps such as "taylor2" (default: that of its values)
    - `context_dim`: channels of the context of cross attention (default: self attention)

    Positions:

    - `rotary`: base of the rotary positions in queries and keys, or none

    Convolution:

    - `convolution`: width of the short causal convolution before the attention (0: none)
    - `convolution_on`: the convolution is on the inputs of q, k and v, or on their projections with a SiLU
    - `induction`: begin as an induction head: a token's key is the query of the token before, so q finds what followed

    Gates:

    - `writes`: keys and values that each token writes, for delta, gated_delta and kda, as in DeltaProduct
    - `beta_limit`: largest write strength of delta, gated_delta and kda, at most 2; above 1 a layer can track states
    - `value_skip`: add D v to each head's output, with a learned D, as in Mamba-2
    - `gate`: multiply the attention's output by silu(W x), as in RetNet
    - `gate_function`: function of W x in the gate; sigmoid in Kimi Linear

    Norms:

    - `unit_keys`: divide q and k of each head by their lengths, as the delta rule always does
    - `head_norm`: RMSNorm of each head's output, which un-normalised attention needs, as in RetNet
    - `gated_norm`: RMSNorm of all heads' output together, after the gate, as in Mamba-2
    - `head_norm_eps`: epsilon of `head_norm` and `gated_norm`, added to the mean square

    Biases and dropout:

    - `bias`: add a bias in every projection
    - `out_bias`: add a bias in the last projection, W_o (default: as `bias` says)
    - `dropout`: share of the outputs that is dropped in training
    - `hidden_dropout`: share of the inputs of W_o that is dropped in training"""

    @check_types
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
        rotary: float | None = None,
        convolution: int = 0,
        convolution_on: str = "inputs",
        induction: bool = False,
        writes: int = 1,
        beta_limit: float = 1.0,
        value_skip: bool = False,
        gate: bool = False,
        gate_function: str = "silu",
        unit_keys: bool = False,
        head_norm: bool = False,
        gated_norm: bool = False,
        head_norm_eps: float = HEAD_NORM_EPS,
        bias: bool = False,
        out_bias: bool | None = None,
        dropout: float = 0.0,
        hidden_dropout: float = 0.0,
    ):
        super().__init__()
        check_sizes(dim=dim, num_heads=num_heads, writes=writes)
        check_sizes(**given(num_key_heads=num_key_heads, head_dim=head_dim, key_dim=key_dim, context_dim=context_dim))
        check_sizes(convolution=convolution, least=0)
        _check_choices(rotary, convolution, convolution_on, gate, gate_function)
        key_heads = num_heads if num_key_heads is None else num_key_heads
        if induction and not allows_induction(convolution, convolution_on, num_heads, key_heads, writes):
            raise ValueError(
                "induction needs a convolution on projections over two tokens at least, as many key heads as query "
                f"heads and one write per token, but there are a convolution of {convolution} on {convolution_on}, "
                f"{key_heads} key heads for {num_heads} query heads, and {writes} writes"
            )
        self.head_dim = checked_head_dim(dim, num_heads, key_heads, head_dim)
        self.key_dim = self.head_dim if key_dim is None else key_dim
        self.rotary, self.dim, self.unit_keys, self.writes = rotary, dim, unit_keys, writes
        width = num_heads * self.head_dim
        self.source_dim = source = dim if context_dim is None else context_dim
        self.inner = resolved_attention(inner, num_heads=num_heads, head_dim=self.key_dim, num_key_heads=num_key_heads)
        self.q_proj = nn.Linear(dim, num_heads * self.key_dim, bias=bias)
        self.k_proj = nn.Linear(source, key_heads * writes * self.key_dim, bias=bias)
        self.v_proj = nn.Linear(source, key_heads * writes * self.head_dim, bias=bias)
        self.g_proj = nn.Linear(dim, width, bias=bias) if gate else None
        self.o_proj = nn.Linear(width, dim, bias=bias if out_bias is None else out_bias)
        self.convolution_on, self.gate_function, self.induction = convolution_on, gate_function, induction
        self.convolution = self._make_convolution(convolution)
        if beta_limit != 1 and not needs_strength(self.inner.needs):
            raise ValueError(f"beta_limit is of attentions with the delta rule, but is {beta_limit} for another one")
        if writes != 1 and not needs_strength(self.inner.needs, in_each=True):
            raise ValueError(f"writes is of attentions with the delta rule in every head, but is {writes} for another")
        self.gates = token_gates(
            self.inner.needs, dim, num_key_heads=key_heads, key_dim=self.key_dim, beta_limit=beta_limit, writes=writes
        )
        self.value_skip = nn.Parameter(torch.empty(num_heads)) if value_skip else None
        self.head_norm = HeadNorm(self.head_dim, eps=head_norm_eps) if head_norm else None
        self.gated_norm = HeadNorm(width, eps=head_norm_eps) if gated_norm else None
        if head_norm_eps != HEAD_NORM_EPS and not (head_norm or gated_norm):
            raise ValueError(f"head_norm_eps is of head_norm and gated_norm, but is {head_norm_eps} without either")
        self.dropout, self.hidden_dropout = nn.Dropout(dropout), nn.Dropout(hidden_dropout)
        self.is_cross_attention = context_dim is not None
        if self.is_cross_attention:
            self._check_cross_attention()
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill what is no part's own. With `induction` keys begin as queries, so reset all parts before."""
        if self.value_skip is not None:
            nn.init.ones_(self.value_skip)
        if self.induction:
            self.k_proj.load_state_dict(self.q_proj.state_dict())
            self.convolution.begin_induction()

    def forward(
        self, x: Tokens, context: Context = None, *, key_mask: ContextMask = None, starts: TokenMask = None
    ) -> Tokens:
        """Attend to x, or to the context if there is one; `key_mask` is True for its present tokens.

        If `inner` has a decay gate in every head, a row may hold several sequences: `starts` is True for the first
        token of each. No attention or convolution looks back beyond it, and positions begin again."""
        if context is None:
            q, k, v, _, _ = self._project(x, None, key_mask, starts)
        else:
            if starts is not None:
                raise ValueError("starts are of self attention: cross attention takes none")
            self._check_cross_attention()
            check_tokens(x, self.dim, layer=self.q_proj)
            q, (k, v) = _split(self.q_proj(x), self.key_dim), self._keys(context, key_mask)
        y = self.inner(q, k, v, key_mask=self._over_heads(key_mask), gates=self._gates(x, key_mask, starts))
        return self._merge(x, y, v)

    def summarize(self, context: Float[Tensor, "b m c"], *, key_mask: ContextMask = None) -> Any:
        """Return what `read` needs of the context; for linear attention, the sums over its tokens."""
        self._check_cross_attention()
        return self.inner.summarize(*self._keys(context, key_mask), key_mask=self._over_heads(key_mask))

    def read(self, x: Tokens, summary: Any) -> Tokens:
        """Return the output of `forward` for any number of queries, given the summary of the context."""
        self._check_cross_attention()
        check_tokens(x, self.dim, layer=self.q_proj)
        return self._merge(x, self.inner.read(_split(self.q_proj(x), self.key_dim), summary))

    def extend(
        self, x: Tokens, state: AttentionState | None = None, *, key_mask: TokenMask = None, starts: TokenMask = None
    ) -> tuple[Tokens, AttentionState]:
        """Process the next tokens, any number of them, after those summed up in `state` (None: the sequence begins).

        `starts` is as in `forward`. It may be True at a missing token if its sequence has a present one in the call."""
        q, k, v, convolution, position = self._project(x, state, key_mask, starts)
        inner, gates = None if state is None else state.inner, self._gates(x, key_mask, starts)
        y, inner = self.inner.extend(q, k, v, inner, key_mask=self._over_heads(key_mask), gates=gates)
        return self._merge(x, y, v), AttentionState(inner, convolution, position)

    def _project(
        self, x: Tensor, state: AttentionState | None, key_mask: Tensor | None, starts: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, ConvolutionState, Tensor | None]:
        if self.is_cross_attention:
            raise ValueError("cross attention needs its context, but none was given")
        check_tokens(x, self.dim, key_mask, layer=self.q_proj)
        check_mask(x, starts, starts=True)
        if state is not None:
            state = for_batch(checked_kind(state, AttentionState), x.shape[0])
            check_part("position", state.position, None if self.rotary is None else torch.int64)
            if self.convolution is None or state.convolution is None:
                check_part("convolution", state.convolution, None if self.convolution is None else x.dtype)
        mixed, convolution, position = x, None, None
        past: Any = None if state is None else state.convolution
        # an adapter may stand in the convolution's place, so its class says nothing
        if self.convolution is not None and self.convolution_on == "inputs":
            mixed, convolution = self.convolution.extend(x, past, key_mask=key_mask, starts=starts)
        q, k, v = self.q_proj(mixed), self.k_proj(mixed), self.v_proj(mixed)
        if self.convolution is not None and self.convolution_on == "projections":
            (q, k, v), convolution = self.convolution.extend((q, k, v), past, key_mask=key_mask, starts=starts)
        q, k, v = _split(q, self.key_dim), _split(k, self.key_dim, self.writes), _split(v, self.head_dim, self.writes)
        if self.unit_keys:
            q, k = unit(q), unit(k)
        if self.rotary is not None:
            positions, position = count_positions(x, state and state.position, key_mask)
            if starts is not None:
                age, after = ages(starts, key_mask)
                positions = torch.where(age < UNKNOWN, age, positions)
                position = torch.where(after < UNKNOWN, after, position)
            rotation = rotations(positions.unsqueeze(1), self.key_dim, x.dtype, base=self.rotary)
            q = rotate_by(q, *rotation)
            k = rotate_by(k, *(for_each(part, self.writes, -2) for part in rotation))
        if self.writes != 1:
            q = read_at_last(q, self.writes)
        return q, k, v, convolution, position

    def _gates(self, x: Tensor, key_mask: Tensor | None, starts: Tensor | None) -> AnyGates:
        gates = None if self.gates is None else self.gates(x)
        if starts is not None:
            gates = begin_sequences(self.inner.needs, gates, first_present(starts, key_mask))
            if self.inner.same_tokens:
                raise ValueError(
                    "positions of a RotaryAttention do not begin again in packed sequences: rotate by the option rotary"
                )
        return gates if self.writes == 1 else fade_at_first(gates, self.writes)

    def _keys(self, context: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        check_tokens(context, self.source_dim, key_mask, name="context", layer=self.k_proj)
        return _split(self.k_proj(context), self.key_dim), _split(self.v_proj(context), self.head_dim)

    def _make_convolution(self, width: int) -> Any:
        if width == 0:
            return None
        if self.convolution_on == "inputs":
            return ShortConvolution(self.dim, width)
        return ProjectionConvolutions([x.out_features for x in (self.q_proj, self.k_proj, self.v_proj)], width)

    def _over_heads(self, key_mask: Tensor | None) -> Tensor | None:
        return None if key_mask is None else for_each(key_mask, self.writes, -1).unsqueeze(1)

    def _merge(self, x: Tensor, y: Tensor, v: Tensor | None = None) -> Tensor:
        if self.writes != 1:
            y, v = at_last(y, self.writes), v if v is None else at_last(v, self.writes)
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
        if self.inner.same_tokens:
            raise ValueError(f"{type(self.inner).__name__} is self attention: cross attention has keys of other tokens")
        if self.convolution is not None or self.rotary is not None or self.unit_keys or self.value_skip is not None:
            raise ValueError(
                "convolution, rotary, unit_keys and value_skip belong to self attention: cross attention takes none"
            )


def _check_choices(rotary: float | None, convolution: int, convolution_on: str, gate: bool, gate_function: str) -> None:
    if rotary is not None and not 1 < rotary < math.inf:
        raise ValueError(f"rotary must be None or a base above 1, but is {rotary!r}")
    if convolution_on not in CONVOLUTIONS_ON:
        raise unknown_name("convolution_on", convolution_on, CONVOLUTIONS_ON)
    if convolution_on != "inputs" and not convolution:
        raise ValueError(f"convolution_on is {convolution_on!r}, but convolution is 0: there is none")
    if gate_function not in GATE_FUNCTIONS:
        raise unknown_name("gate_function", gate_function, GATE_FUNCTIONS)
    if gate_function != "silu" and not gate:
        raise ValueError(f"gate_function is {gate_function!r}, but gate is false: there is none")


def allows_induction(
    convolution: int, convolution_on: str, num_heads: int, num_key_heads: int | None, writes: int
) -> bool:
    """Return whether a token's key can be the query of the token before."""
    is_late = convolution_on == "projections" and convolution > 1
    return is_late and num_key_heads in (None, num_heads) and writes == 1


def _split(x: Tensor, channels: int, writes: int = 1) -> Tensor:
    """Split x (b n h·w·c) into heads (b h n·w c) of `channels` and w writes. A tensor-parallel rank has some of h."""
    return x.unflatten(-1, (-1, writes, channels)).transpose(1, 2).flatten(2, 3)
