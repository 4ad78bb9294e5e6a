"""The scans of transformers' hybrid models by our operators: arguments, results and dtypes are those of its functions.

Each function has the signature of the one that it replaces, whose names the models use, and one more argument, the
number of each token's document, (b, n), where a row holds several."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from linattn.integrations.transformers.hybrids.selective_scan import selective_scan
from linattn.ops import LinearState, causal_delta_attention, causal_linear_attention
from linattn.ops.convolution import short_convolution

Documents = Int[Tensor, "#b n"] | None


def delta_rule(
    query: Float[Tensor, "b n hk d"],
    key: Float[Tensor, "b n hk d"],
    value: Float[Tensor, "b n h dv"],
    g: Float[Tensor, "b n h"] | Float[Tensor, "b n h d"],
    beta: Float[Tensor, "b n h"],
    chunk_size: int = 64,
    initial_state: Float[Tensor, "b h d dv"] | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    documents: Documents = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "b n h dv"], Float[Tensor, "b h d dv"] | None]:
    """The delta rule with a decay `g` per head (gated DeltaNet) or per channel (Kimi Delta Attention), in float32."""
    heads = key.shape[2]
    q, k = (_float32_or_better(x.transpose(1, 2).unsqueeze(2)) for x in (query, key))
    if use_qk_l2norm_in_kernel:
        q, k = _unit(q), _unit(k)
    v, beta, log_decay = (
        _float32_or_better(x.transpose(1, 2).unflatten(1, (heads, -1)))
        for x in (value, beta, _restarting(g, documents))
    )
    S = None if initial_state is None else initial_state.unflatten(1, (heads, -1)).to(v.dtype)
    y, S = causal_delta_attention(q, k, v, beta, S, log_decay=log_decay, scale=q.shape[-1] ** -0.5)
    y = y.flatten(1, 2).transpose(1, 2).to(query.dtype)
    return y, S.flatten(1, 2) if output_final_state else None


def mamba2_scan(
    hidden_states: Float[Tensor, "b n h dv"],
    dt: Float[Tensor, "b n h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b n g d"],
    C: Float[Tensor, "b n g d"],
    chunk_size: int,
    D: Float[Tensor, " h"] | None = None,
    dt_bias: Float[Tensor, " h"] | None = None,
    initial_states: Float[Tensor, "b h dv d"] | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    *,
    documents: Documents = None,
    **kwargs: Any,
) -> Float[Tensor, "b n h dv"] | tuple[Float[Tensor, "b n h dv"], Float[Tensor, "b h dv d"]]:
    """Mamba-2's scan: linear attention with keys B, queries C and the values `hidden_states` · dt, whose state decays
    by exp(A·dt). It computes in float32 or better, and so is the result."""
    groups = B.shape[2]
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = _float32_or_better((F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit))
    x = _float32_or_better(hidden_states)
    q, k = (_float32_or_better(z.transpose(1, 2).unsqueeze(2)) for z in (C, B))
    v, log_decay = (
        z.transpose(1, 2).unflatten(1, (groups, -1))
        for z in (x * dt[..., None], _restarting(A.to(dt.dtype) * dt, documents))
    )
    state = None
    if initial_states is not None:
        S = initial_states.mT.unflatten(1, (groups, -1)).to(v.dtype)
        state = LinearState(S, torch.zeros_like(S[..., 0]))
    y, state = causal_linear_attention(q, k, v, state, log_decay=log_decay, normalize=None)
    y = y.flatten(1, 2).transpose(1, 2)
    y = (y if D is None else y + D[:, None] * x).contiguous()
    return (y, state.S.flatten(1, 2).mT.contiguous()) if return_final_states else y


def mamba_scan(
    hidden_states: Float[Tensor, "b c n"],
    dt: Float[Tensor, "b c n"],
    A: Float[Tensor, "c d"],
    B: Float[Tensor, "b d n"],
    C: Float[Tensor, "b d n"],
    D: Float[Tensor, " c"] | None = None,
    z: Float[Tensor, "b c n"] | None = None,
    delta_bias: Float[Tensor, " c"] | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    *,
    documents: None = None,
    **kwargs: Any,
) -> Float[Tensor, "b c n"] | tuple[Float[Tensor, "b c n"], Float[Tensor, "b c d"]]:
    """Mamba-1's selective scan, in float32, which the results keep. Rows have one document each."""
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[:, None]
    delta = _float32_or_better((F.softplus(dt) if delta_softplus else dt).mT)
    x, k, q = (y.mT.to(delta.dtype) for y in (hidden_states, B, C))
    y, S = selective_scan(delta * x, delta, A.mT.to(delta.dtype).expand(len(x), -1, -1), k, q)
    y = y if D is None else y + D * x
    y = (y if z is None else y * F.silu(z.mT)).mT
    return (y, S.mT) if return_last_state else y


def convolution(
    hidden_states: Float[Tensor, "b c n"],
    weight: Float[Tensor, "c w"],
    bias: Float[Tensor, " c"] | None = None,
    activation: str | None = None,
    *,
    documents: Documents = None,
    **kwargs: Any,
) -> Float[Tensor, "b c n"]:
    """The short causal convolution. Where a row holds several documents, no token sees another's."""
    x, width = hidden_states.to(weight.dtype), weight.shape[1]
    if documents is not None:
        y = _convolution_apart(x, weight, documents)
    elif x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        y = short_convolution(x.mT, weight.mT.unsqueeze(0))
        y = y if bias is None else y + bias
        y = y if activation is None else ACT2FN[activation](y)
        y = y.mT.to(hidden_states.dtype)
        return y if torch.compiler.is_compiling() else y.as_subclass(_Convolved)
    else:
        y = F.conv1d(x, weight.unsqueeze(1), padding=width - 1, groups=len(weight))[..., : x.shape[2]]
    y = y if bias is None else y + bias[:, None]
    return (y if activation is None else ACT2FN[activation](y)).to(hidden_states.dtype)


class _Convolved(Tensor):
    """Transformers cuts a convolution's result (b c n) to its last n tokens, which are all. Torch's gradient of the cut
    would copy everything into zeros, and transpose it; here the cut returns the tensor itself."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.__getitem__ and args[1] == (slice(None), slice(None), slice(-args[0].shape[2], None)):
                return args[0].as_subclass(Tensor)
            return func(*args, **(kwargs or {}))


def _convolution_apart(x: Tensor, weight: Tensor, documents: Tensor) -> Tensor:
    y = x * weight[:, -1:]
    for distance in range(1, min(weight.shape[1], x.shape[2])):
        same = documents[:, distance:] == documents[:, :-distance]
        before = x[..., :-distance] * weight[:, -1 - distance, None] * same.unsqueeze(1)
        y = y + F.pad(before, (distance, 0))
    return y


def lightning_attention(
    self: nn.Module,
    hidden_states: Float[Tensor, "b n c"],
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    cache: Any = None,
    *,
    documents: Documents = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "b n c"], Float[Tensor, "b h d d"]]:
    """MiniMax's attention with a fixed decay per head, whose scan transformers has inside of the layer's forward."""
    layer: Any = self
    x = layer.act_fn(layer.qkv_proj(hidden_states))
    x = x if attention_mask is None else x * attention_mask[:, :, None].to(x.dtype)
    q, k, v = x.unflatten(-1, (layer.num_attention_heads, -1)).transpose(1, 2).chunk(3, dim=-1)
    past = None if cache is None else cache.get_linear_cache(layer.layer_idx)
    state = (
        None
        if past is None
        else LinearState(_float32_or_better(past), _float32_or_better(torch.zeros_like(past[..., 0])))
    )
    log_decay = -_float32_or_better(layer.slope_rate.flatten()).expand(*x.shape[:2], -1)
    log_decay = _restarting(log_decay, documents).transpose(1, 2)
    y, (S, _) = causal_linear_attention(q, k, v, state, log_decay=log_decay, normalize=None)
    S = S.to(v.dtype)
    if cache is not None:
        cache.set_linear_cache(layer.layer_idx, S)
    y = layer.norm(y.transpose(1, 2).flatten(-2)) * F.sigmoid(layer.output_gate(hidden_states))
    return layer.out_proj(y), S


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(torch.linalg.vecdot(x, x).unsqueeze(-1) + 1e-6)


def _float32_or_better(x: Tensor) -> Tensor:
    """Return x in float32, as transformers' functions do, but float64 as it is."""
    return x if x.dtype == torch.float64 else x.float()


def _restarting(log_decay: Tensor, documents: Documents) -> Tensor:
    """Return the decays (b, n, …) with −∞ where a document begins."""
    if documents is None:
        return log_decay
    starts = F.pad(documents.diff(dim=-1) != 0, (1, 0), value=True)
    return log_decay.masked_fill(starts.reshape(*starts.shape, *(1,) * (log_decay.ndim - 2)), -torch.inf)
