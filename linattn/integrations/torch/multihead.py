"""torch's `nn.MultiheadAttention` with any inner attention: the same arguments, masks, shapes and weights."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from linattn.attention.base import InnerAttention, checked_ungated
from linattn.attention.linformer import LinformerAttention
from linattn.attention.local import LocalAttention
from linattn.attention.named import resolved_attention
from linattn.attention.softmax import SoftmaxAttention
from linattn.attention.weights import attention_weights
from linattn.checks import check_sizes, check_tensors, check_types, given
from linattn.integrations.torch.layouts import check_lengths, from_batches, padding_of, to_batches
from linattn.integrations.torch.masks import TorchMasks, read_masks, torch_softmax
from linattn.nn.checks import check_input
from linattn.types import Keys, Outputs, Queries, Values


class TorchMultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention(…)` with `inner`, an inner attention or a name of `ATTENTIONS`, in the place of softmax.

    Queries and outputs have `embed_dim` channels, keys `kdim` and values `vdim` (default: as many), in `num_heads`
    heads. `bias` gives all projections one, `add_bias_kv` adds a learned key and value, `add_zero_attn` a key and value
    of zeros. `batch_first` takes (b, n, d) and not (n, b, d). The weights are made on `device` in `dtype` (default:
    torch's).

    A state_dict of `nn.MultiheadAttention` loads strictly; parameters of `inner` then keep their values.

    - An `inner` that was made causal is so in every call. Another one follows the call: `is_causal=True`, with or
      without the mask itself (its last row and the key after each query are checked), or an `attn_mask` that is the
      causal mask. A mask that hides the same keys from all queries is understood too; other masks, and those that add
      to scores, need softmax.
    - `need_weights=True`, torch's default, returns the exact n × m matrix of the method's weights, at quadratic cost
      (for Linformer over its r projected keys, n × r, without dropout). `return_weights=False` never does, for models
      that ignore the weights but do not pass `need_weights=False`.
    - `dropout` is the probability of dropping a weight in torch. Without a matrix none can be dropped alone: in
      training, a dropped key is dropped for all queries of its head.
    - When the module leaves the meta device, by `to_empty` or for a state_dict, `inner` gets initial weights and
      features: a state_dict of `nn.MultiheadAttention` has none for it.
    - A query that sees no key gets zeros (before the output projection), where torch may give NaN."""

    @check_types
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        inner: InnerAttention | str,
        return_weights: bool = True,
    ):
        check_sizes(embed_dim=embed_dim, num_heads=num_heads, **given(kdim=kdim, vdim=vdim))
        if embed_dim % num_heads:
            raise ValueError(f"num_heads must divide embed_dim, but they are {num_heads} and {embed_dim}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be between 0 and 1, but is {dropout}")
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        inner = resolved_attention(inner, num_heads=num_heads, head_dim=self.head_dim)
        self.inner = checked_ungated(inner, "TorchMultiheadAttention").to(device=device, dtype=dtype)
        self.return_weights = return_weights
        self._extra_keys = int(add_bias_kv) + int(add_zero_attn)
        if self._extra_keys and any(isinstance(part, LocalAttention) for part in inner.modules()):
            raise ValueError("add_bias_kv and add_zero_attn add keys that all queries see: no window has them")
        # in a tuple, so that its weights, which are those of `inner`, are not registered twice
        self._causal_form = (self.inner, self.inner.as_causal())
        self.register_load_state_dict_pre_hook(_keep_inner)

    def _reset_parameters(self) -> None:
        # this attribute makes torch initialise packed projections, so that the weights are the same to the bit
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        # but nn.TransformerEncoderLayer would then compute softmax attention itself, with our weights
        self._qkv_same_embed_dim = False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        was_meta = self.out_proj.weight.is_meta
        super()._apply(fn, recurse)
        if was_meta and not self.out_proj.weight.is_meta:
            _reset(self.inner)
        return self

    def forward(
        self,
        query: Float[Tensor, "*bn e"],
        key: Float[Tensor, "*bm ek"],
        value: Float[Tensor, "*bm ev"],
        key_padding_mask: Shaped[Tensor, "*#b m"] | None = None,
        need_weights: bool = True,
        attn_mask: Shaped[Tensor, "*#bh n m"] | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Float[Tensor, "*bn e"], Float[Tensor, "..."] | None]:
        """Attend as torch's module does, to batches, single sequences or nested tensors; masks hide by True or −inf."""
        self._check(query, key, value)
        check_tensors(query=query, **given(key_padding_mask=key_padding_mask, attn_mask=attn_mask))
        q = to_batches(query, self.batch_first)
        # the same object stays one, so that one product projects it
        k = q if key is query else to_batches(key, self.batch_first)
        v = k if value is key else to_batches(value, self.batch_first)
        key_padding_mask = padding_of(key, k, key_padding_mask)
        shape = (len(q), self.num_heads, q.shape[1], k.shape[1])
        if self.inner.causal and shape[2] != shape[3]:
            raise ValueError(f"causal attention needs a query for every key, but there are {shape[2]} and {shape[3]}")
        masks = TorchMasks.checked(key_padding_mask, attn_mask, is_causal, shape)
        y, weights = self._attend(*self._heads(q, k, v), masks, need_weights and self.return_weights)
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights.squeeze(0) if query.ndim == 2 else weights
        return from_batches(y, query, self.batch_first), weights

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        parts = {"query": (query, self.embed_dim), "key": (key, self.kdim), "value": (value, self.vdim)}
        check_tensors(query=query, key=key, value=value)
        for name, (x, width) in parts.items():
            check_input(x, self.out_proj, name=name)
            if x.is_nested != query.is_nested or x.ndim != query.ndim or x.ndim not in (2, 3):
                raise ValueError("query, key and value must be alike: all (n, d), all (n, b, d), or all nested")
            if x.size(-1) != width:
                raise ValueError(f"{name} must have {width} channels, but has {x.size(-1)}")
        if query.is_nested:
            check_lengths(query, key, value)
            return
        batch_dim, batched = 0 if self.batch_first else 1, query.ndim == 3
        if key.shape[:-1] != value.shape[:-1] or (batched and query.size(batch_dim) != key.size(batch_dim)):
            shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, (x, _) in parts.items())
            layout = ("batch, tokens" if self.batch_first else "tokens, batch") if batched else "tokens"
            raise ValueError(
                f"keys and values must match, and all batch sizes, ({layout}, channels), but the inputs are {shapes}"
            )

    def _heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Queries, Keys, Values]:
        if self.in_proj_weight is not None and q is k and k is v:
            parts = F.linear(q, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            packed, separate = self.in_proj_weight, (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            weights = separate if packed is None else packed.chunk(3)
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            parts = [F.linear(x, w, b) for x, w, b in zip((q, k, v), weights, biases, strict=True)]
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        return q, k, v

    def _attend(
        self, q: Queries, k: Keys, v: Values, masks: TorchMasks, need_weights: bool
    ) -> tuple[Outputs, Float[Tensor, "b h n columns"] | None]:
        inner, dropout, extra = self.inner, self.dropout if self.training else 0.0, self._extra_keys
        if extra:
            # in front, where each query sees them in causal attention too; torch puts them at the end
            k, v = (torch.cat([self._extra(x, bias), x], -2) for x, bias in ((k, self.bias_k), (v, self.bias_v)))
        if isinstance(inner, SoftmaxAttention):
            k, v = (x.roll(-extra, -2) if extra else x for x in (k, v))
            return torch_softmax(q, k, v, masks, causal=inner.causal, dropout=dropout, need_weights=need_weights)
        key_mask, causal = read_masks(masks)
        inner = self._causal() if causal else inner
        if key_mask is not None and extra:
            key_mask = F.pad(key_mask, (extra, 0), value=True)
        # pads the queries too, so that queries and keys of the same token keep the same place
        skipped = extra if q.shape[-2] + extra == k.shape[-2] else 0
        q = F.pad(q, (0, 0, skipped, 0)) if skipped else q
        keep = F.dropout(v.new_ones(*v.shape[:-1], 1), dropout) if dropout else None
        y = inner(q, k, v if keep is None else v * keep, key_mask=key_mask)[..., skipped:, :]
        if not need_weights:
            return y, None
        if isinstance(inner, LinformerAttention):
            k, _, present = inner.summarize(k, v, key_mask=key_mask)
            weights = attention_weights(SoftmaxAttention(), q, k, key_mask=present)
        else:
            weights = attention_weights(inner, q, k, key_mask=key_mask)
            # the columns in torch's order
            weights = (weights if keep is None else weights * keep.mT).roll(-extra, -1)
        return y, weights[..., skipped:, :]

    def _causal(self) -> InnerAttention:
        if self._causal_form[0] is not self.inner:
            self._causal_form = (self.inner, self.inner.as_causal())
        form = self._causal_form[1]
        if form is None:
            raise ValueError(
                f"{type(self.inner).__name__} cannot be made causal by a call: Linformer never can, as it mixes "
                "the whole sequence into every key; others are made with causal=True"
            )
        return form

    def _extra(self, x: Keys, bias: Tensor | None) -> Float[Tensor, "b h e d"]:
        """Return the learned key or value `bias` of `add_bias_kv` and the zeros of `add_zero_attn`, per row of x."""
        parts = [] if bias is None else [bias.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)]
        if self.add_zero_attn:
            parts.append(x.new_zeros(1, x.shape[1], 1, x.shape[3]))
        return torch.cat(parts, -2).to(x.dtype).expand(x.shape[0], -1, -1, -1)


@check_types
def with_inner(
    attention: nn.MultiheadAttention, inner: InnerAttention | str, *, return_weights: bool = True
) -> TorchMultiheadAttention:
    """Return the projections of `attention`, with the very same Parameters, around another inner attention.

    See `TorchMultiheadAttention` for `inner` and `return_weights`. Raises ValueError if `attention` has hooks, which
    the new module would leave out, or computes weights from others."""
    if not isinstance(attention, nn.MultiheadAttention):
        raise ValueError(f"attention must be an nn.MultiheadAttention, but is a {type(attention).__name__}")
    hooks = (getattr(attention, f"_{kind}_hooks") for kind in ("forward", "forward_pre", "backward", "backward_pre"))
    if any(hooks) or "forward" in vars(attention):
        raise ValueError(
            f"this {type(attention).__name__} has hooks, or a forward that something else has set, such as pruning or "
            "accelerate: replace attention first"
        )
    # made outside of the meta device, where random features would be lost
    inner = resolved_attention(inner, num_heads=attention.num_heads, head_dim=attention.head_dim)
    sizes = attention.embed_dim, attention.num_heads, attention.dropout
    added = attention.in_proj_bias is not None, attention.bias_k is not None, attention.add_zero_attn
    inputs = attention.kdim, attention.vdim, attention.batch_first
    with torch.device("meta"):
        new = TorchMultiheadAttention(*sizes, *added, *inputs, inner=inner, return_weights=return_weights)
    weights = dict(attention.named_parameters(recurse=False, remove_duplicate=False))
    if missing := sorted(dict(new.named_parameters(recurse=False)).keys() - weights.keys()):
        raise ValueError(
            f"this {type(attention).__name__} computes {', '.join(missing)} from other parameters, as a "
            "parametrization does: replace attention first"
        )
    for name, weight in weights.items():
        setattr(new, name, weight)
    new.out_proj = attention.out_proj
    new.inner.to(device=attention.out_proj.weight.device, dtype=attention.out_proj.weight.dtype)
    return new.train(attention.training)


def _keep_inner(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Keep the inner attention's parameters if the state_dict, as nn.MultiheadAttention's, has none of them."""
    assert isinstance(module, TorchMultiheadAttention)
    own = module.inner.state_dict(prefix=f"{prefix}inner.")
    if any(name in state_dict for name in own):
        return
    weight = state_dict.get(f"{prefix}out_proj.weight")
    if weight is not None and any(tensor.is_meta for tensor in own.values()):
        _reset(module.inner.to_empty(device=weight.device))
        own = module.inner.state_dict(prefix=f"{prefix}inner.")
    state_dict.update(own)


def _reset(inner: nn.Module) -> None:
    """Fill the weights and features with new numbers."""
    for part in inner.modules():
        if callable(reset := getattr(part, "reset_parameters", None)):
            reset()
