"""The gates of an inner attention, made from a layer's input: decays, step sizes and write strengths.

The initial decays are in the range of Mamba-2's: a step between 0.001 and 0.1 times a rate between 1 and 16, so that
heads forget within one to a thousand tokens (Dao and Gu, https://arxiv.org/abs/2405.21060). They are not drawn but
spread evenly over the heads, the slowest of the range first: a few random heads may all forget at once, and a model
whose only head forgets early learns recall late."""

import math
from collections.abc import Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from linattn.attention.gates import AnyNeeds, GateNeeds, Gates, SplitNeeds
from linattn.checks import check_types
from linattn.initialization import assign, places
from linattn.ops.numerics import accumulator
from linattn.types import Tokens

PerHead = Float[Tensor, "b hk n"]
PerChannel = Float[Tensor, "b hk n c"]


@check_types
def token_gates(
    needs: AnyNeeds, dim: int, *, num_key_heads: int, key_dim: int, beta_limit: float = 1.0, writes: int = 1
) -> nn.Module | None:
    """Make the module from `dim` input channels to the gates that an inner attention `needs`, None if it needs none.

    There are `num_key_heads` key heads of `key_dim` channels. A strength is at most `beta_limit`: 1, or 2 for a delta
    rule that can also change signs. With several `writes` per token there is a strength for each."""
    if needs is None:
        return None
    options = {"key_dim": key_dim, "beta_limit": beta_limit, "writes": writes}
    if isinstance(needs, SplitNeeds):
        total = sum(needs.heads)
        shares = [heads * num_key_heads // total for heads in needs.heads]
        parts = [
            token_gates(part, dim, num_key_heads=share, **options)
            for share, part in zip(shares, needs.parts, strict=True)
        ]
        return PartGates(parts)
    return TokenGates(needs, dim, num_key_heads=num_key_heads, **options)


@final
class TokenGates(nn.Module):
    """Makes the `Gates` that `needs` lists: log decays, per head (`HeadDecay`) or per channel (`ChannelDecay` with a
    strength, `BoundedDecay` with a rate, else `SigmoidDecay`), and β, a `WriteStrength` of up to `beta_limit`, a
    `ChannelRate` or the step Δ of the decay."""

    def __init__(self, needs: GateNeeds, dim: int, *, num_key_heads: int, key_dim: int, beta_limit: float, writes: int):
        super().__init__()
        self.needs = needs
        self.decay = self.strength = None
        if needs.decay == "head":
            self.decay = HeadDecay(dim, num_key_heads)
        elif needs.decay == "channel":
            kind = {None: SigmoidDecay, "strength": ChannelDecay, "rate": BoundedDecay}[needs.write]
            self.decay = kind(dim, num_key_heads, key_dim)
        if needs.write == "strength":
            self.strength = WriteStrength(dim, num_key_heads, limit=beta_limit, writes=writes)
        if needs.write == "rate":
            self.strength = ChannelRate(dim, num_key_heads, key_dim)

    def forward(self, x: Tokens) -> Gates:
        if self.needs.write == "step":
            assert isinstance(self.decay, HeadDecay)
            step = self.decay.step(x)
            return Gates(self.decay.fading(step), step)
        return Gates(None if self.decay is None else self.decay(x), None if self.strength is None else self.strength(x))


@final
class PartGates(nn.Module):
    """Makes the gates of a `SplitHeads`: a tuple with those of each part, None for a part that needs none."""

    def __init__(self, parts: Sequence[nn.Module | None]):
        super().__init__()
        self.parts = nn.ModuleDict({str(i): part for i, part in enumerate(parts) if part is not None})
        self.places = tuple(None if part is None else str(i) for i, part in enumerate(parts))

    def forward(self, x: Tokens) -> tuple[Any, ...]:
        return tuple(None if place is None else self.parts[place](x) for place in self.places)


@final
class HeadDecay(nn.Module):
    """log α = −exp(A_log) · Δ with the step Δ = softplus(W x + dt_bias), per head and token, as in Mamba-2 and gated
    DeltaNet, https://arxiv.org/abs/2412.06464"""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.proj = nn.Linear(dim, num_heads, bias=False)
        self.A_log, self.dt_bias = nn.Parameter(torch.empty(num_heads)), nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _reset_rate(self.A_log)
        _reset_step(self.dt_bias, len(self.A_log))

    def forward(self, x: Tokens) -> PerHead:
        return self.fading(self.step(x))

    def step(self, x: Tokens) -> PerHead:
        return _softplus(self.proj(x), self.dt_bias).transpose(1, 2)

    def fading(self, step: PerHead) -> PerHead:
        return -_wide(self.A_log).exp().unsqueeze(-1) * step


class PerChannelGate(nn.Module):
    """Two projections, with `inner_dim` numbers in between, to a number per channel of a key."""

    def __init__(self, dim: int, num_heads: int, key_dim: int, *, inner_dim: int, bias: bool = False):
        super().__init__()
        self.key_dim = key_dim
        self.in_proj = nn.Linear(dim, inner_dim, bias=False)
        self.out_proj = nn.Linear(inner_dim, num_heads * key_dim, bias=bias)

    def split(self, x: Float[Tensor, "b n hc"]) -> PerChannel:
        return x.unflatten(-1, (-1, self.key_dim)).transpose(1, 2)


@final
class ChannelDecay(PerChannelGate):
    """log α = −exp(A_log) · softplus(W₂ W₁ x + dt_bias) per channel of a key and token, with A_log per head and
    `key_dim` numbers in between, as in Kimi Delta Attention. Kimi Team, https://arxiv.org/abs/2510.26692"""

    def __init__(self, dim: int, num_heads: int, key_dim: int):
        super().__init__(dim, num_heads, key_dim, inner_dim=key_dim)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads * key_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _reset_rate(self.A_log)
        _reset_step(self.dt_bias, self.key_dim)

    def forward(self, x: Tokens) -> PerChannel:
        step = _softplus(self.out_proj(self.in_proj(x)), self.dt_bias)
        return -_wide(self.A_log).exp()[:, None, None] * self.split(step)


@final
class SigmoidDecay(PerChannelGate):
    """α = σ(W₂ W₁ x + b)^(1/16) per channel of a key and token, with 16 numbers in between, as in gated linear
    attention. Yang et al., https://arxiv.org/abs/2312.06635, section 4.4"""

    def __init__(self, dim: int, num_heads: int, key_dim: int):
        super().__init__(dim, num_heads, key_dim, inner_dim=16, bias=True)

    def forward(self, x: Tokens) -> PerChannel:
        return self.split(F.logsigmoid(_wide(self.out_proj(self.in_proj(x)))) / 16)


@final
class BoundedDecay(PerChannelGate):
    """log α = −e^(−1/2) σ(W₂ tanh(W₁ x) + b) per channel of a key and token, with `key_dim` numbers in between: α is
    0.545 at least, as in RWKV-7. Decays begin as those of `ChannelDecay`, but at 0.607 at least, where each can still
    be learned. Peng et al., https://arxiv.org/abs/2503.14456"""

    def __init__(self, dim: int, num_heads: int, key_dim: int):
        super().__init__(dim, num_heads, key_dim, inner_dim=key_dim)
        self.bias = nn.Parameter(torch.empty(num_heads * key_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        rates = _rates(self.bias, len(self.bias) // self.key_dim, self.key_dim)
        log_decays = (rates * _steps(self.bias, self.key_dim)).clamp(max=0.5)
        assign(self.bias, (log_decays * math.exp(0.5)).logit())

    def forward(self, x: Tokens) -> PerChannel:
        step = _wide(self.out_proj(self.in_proj(x).tanh())) + _wide(self.bias)
        return -math.exp(-0.5) * self.split(step.sigmoid())


@final
class ChannelRate(PerChannelGate):
    """a = σ(W₂ W₁ x + b) per channel of a key and token, with `key_dim` numbers in between: the in-context learning
    rate of RWKV-7. Peng et al., https://arxiv.org/abs/2503.14456"""

    def __init__(self, dim: int, num_heads: int, key_dim: int):
        super().__init__(dim, num_heads, key_dim, inner_dim=key_dim, bias=True)

    def forward(self, x: Tokens) -> PerChannel:
        return self.split(self.out_proj(self.in_proj(x)).sigmoid())


@final
class WriteStrength(nn.Module):
    """β = `limit` · σ(W x) per head and write of a token, with a limit of 1 or 2: above 1 a write changes the sign of
    what the state predicts for its key, so a layer can track states. Grazzi et al., https://arxiv.org/abs/2411.12537"""

    def __init__(self, dim: int, num_heads: int, *, limit: float = 1.0, writes: int = 1):
        super().__init__()
        if not 0 < limit <= 2:
            raise ValueError(f"beta_limit must be above 0 and at most 2, but is {limit}")
        self.limit, self.writes = limit, writes
        self.proj = nn.Linear(dim, num_heads * writes, bias=False)

    def forward(self, x: Tokens) -> Float[Tensor, "b hk m"]:
        beta = self.limit * self.proj(x).sigmoid()
        return beta.unflatten(-1, (-1, self.writes)).transpose(1, 2).flatten(2)


def _reset_rate(A_log: Tensor) -> None:
    assign(A_log, _rates(A_log, len(A_log)).log())


def _reset_step(bias: Tensor, count: int) -> None:
    """Set softplus(bias) to steps from 0.001 to 0.1, their logarithms evenly spaced in each run of `count` numbers."""
    step = _steps(bias, count)
    assign(bias, step + torch.log(-torch.expm1(-step)))


def _rates(x: Tensor, heads: int, channels: int = 1) -> Tensor:
    """Return evenly spaced rates between 1 and 16 for so many heads, ascending, each for all of its channels."""
    return 1 + 15 * _places(x, heads, each=channels)


def _steps(x: Tensor, count: int) -> Tensor:
    return torch.exp(math.log(0.001) + math.log(100) * _places(x, count))


def _places(x: Tensor, count: int, each: int = 1) -> Tensor:
    """Return (⌊i / `each`⌋ mod `count`) / (`count` − 1) for each index i of x; zeros if `count` is 1."""
    return (places(x) / each).floor() % count / max(1, count - 1)


def _softplus(x: Tensor, bias: Tensor) -> Tensor:
    # rounded to half precision, a decay of nearly 1 would be 1
    x = _wide(x) + _wide(bias)
    # not F.softplus, for whose gradient torch's compiler expects other strides than there are
    return torch.logaddexp(x, x.new_zeros(()))


def _wide(x: Tensor) -> Tensor:
    return x.to(accumulator(x.dtype))
