"""Other packages' attentions on the same queries, keys and values, where installed, used as their readmes do."""

import contextlib
import importlib.util
import io
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    n: int
    heads: int
    head_dim: int
    window: int
    causal: bool
    dtype: torch.dtype
    device: str


class Peer(NamedTuple):
    module: str
    build: Callable[[Shape], Attention]
    like: dict[bool, str]
    """The method of ours that it is, causal or not: it can be what is here."""


def installed(causal: bool) -> list[str]:
    return [
        name
        for name, peer in PEERS.items()
        if causal in peer.like and importlib.util.find_spec(peer.module) is not None
    ]


def _performer(shape: Shape) -> Attention:
    from performer_pytorch import FastAttention

    # it prints that it found no CUDA code
    with contextlib.redirect_stdout(io.StringIO()):
        return FastAttention(shape.head_dim, causal=shape.causal).to(shape.device, shape.dtype)


def _performer_efficient(shape: Shape) -> Attention:
    from performer_pytorch import FastAttention

    with contextlib.redirect_stdout(io.StringIO()):
        return FastAttention(shape.head_dim, causal=shape.causal, no_projection=True).to(shape.device, shape.dtype)


def _linear_attention_transformer(shape: Shape) -> Attention:
    from linear_attention_transformer import linear_attention_transformer as package

    # a query sees all keys up to its own, as ours do
    return partial(package.causal_linear_attn, bucket_size=1) if shape.causal else package.linear_attn


def _blindspot(shape: Shape) -> Attention:
    from linear_attention_transformer import linear_attention_transformer as package

    return partial(package.causal_linear_attn, bucket_size=64)


def _local_attention(shape: Shape) -> Attention:
    from local_attention import LocalAttention

    local = LocalAttention(shape.window, causal=shape.causal, autopad=True, use_rotary_pos_emb=False)
    return local.to(shape.device)


def _linformer(shape: Shape) -> Attention:
    """Its layer without the four linear projections, so that it does what the others do: keys and values are the
    queries, which takes the same time."""
    from linformer import LinformerSelfAttention

    dim = shape.heads * shape.head_dim
    layer: Any = LinformerSelfAttention(dim, shape.n, k=min(128, shape.n), heads=shape.heads)
    layer.to_q = layer.to_k = layer.to_v = layer.to_out = nn.Identity()
    layer = layer.to(shape.device, shape.dtype)
    return lambda q, k, v: layer(q.transpose(1, 2).flatten(2)).unflatten(-1, (shape.heads, -1)).transpose(1, 2)


def _both(method: str) -> dict[bool, str]:
    return {True: method, False: method}


# softmax of the keys over all tokens is no causal thing: there they take exponentials, divided by their sum with the
# query, where the softmax of the query cancels
_EFFICIENT = {True: "exp", False: "efficient"}

PEERS: dict[str, Peer] = {
    "performer-pytorch": Peer("performer_pytorch", _performer, _both("favor")),
    "performer-pytorch (efficient)": Peer("performer_pytorch", _performer_efficient, _EFFICIENT),
    "linear-attention-transformer": Peer("linear_attention_transformer", _linear_attention_transformer, _EFFICIENT),
    # its queries see none of the last 64 keys
    "linear-attention-transformer (blindspot)": Peer("linear_attention_transformer", _blindspot, {True: "exp"}),
    "local-attention": Peer("local_attention", _local_attention, _both("local")),
    "linformer package": Peer("linformer", _linformer, {False: "linformer"}),
}
