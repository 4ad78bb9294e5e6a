"""Other packages' attentions on the same queries, keys and values, where installed, used as their readmes do."""

import contextlib
import importlib
import io
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

from torch import Tensor, nn

from linattn.cli.bench.record import Case, Setup

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Peer(NamedTuple):
    module: str
    build: Callable[[Any, Setup, Case], Attention]
    """Makes the attention from the module."""
    counterpart: dict[bool, str]
    """Our method that computes the same, causal or not; without an entry the package has no such form."""


def installed(causal: bool) -> list[str]:
    return [name for name, peer in PEERS.items() if causal in peer.counterpart and find_spec(peer.module)]


def build_peer(setup: Setup, case: Case) -> Attention:
    peer = PEERS[case.method]
    # performer-pytorch prints that it found no CUDA code
    with contextlib.redirect_stdout(io.StringIO()):
        attention = peer.build(importlib.import_module(peer.module), setup, case)
    return attention.to(setup.device, case.torch_dtype) if isinstance(attention, nn.Module) else attention


def _performer(package: Any, setup: Setup, case: Case, no_projection: bool = False) -> Attention:
    return package.FastAttention(setup.head_dim, causal=setup.causal, no_projection=no_projection)


def _linear_attention_transformer(package: Any, setup: Setup, case: Case, blindspot: int = 1) -> Attention:
    """Let a query see all keys up to its own, as ours do, if the blindspot is 1."""
    package = package.linear_attention_transformer
    return partial(package.causal_linear_attn, bucket_size=blindspot) if setup.causal else package.linear_attn


def _local_attention(package: Any, setup: Setup, case: Case) -> Attention:
    return package.LocalAttention(setup.window, causal=setup.causal, autopad=True, use_rotary_pos_emb=False)


def _linformer(package: Any, setup: Setup, case: Case) -> Attention:
    """Take its layer without the four linear projections, so that it does what the others do. Keys and values are then
    the queries, which takes the same time."""
    dim = setup.heads * setup.head_dim
    layer = package.LinformerSelfAttention(dim, case.n, k=min(128, case.n), heads=setup.heads)
    layer.to_q = layer.to_k = layer.to_v = layer.to_out = nn.Identity()
    layer.to(setup.device, case.torch_dtype)
    return lambda q, k, v: layer(q.transpose(1, 2).flatten(2)).unflatten(-1, (setup.heads, -1)).transpose(1, 2)


# A softmax of the keys over all tokens has no causal form: there they take exponentials, divided by their sum with the
# query, where the softmax of the query cancels.
_EFFICIENT = {True: "exp", False: "efficient"}
_FAVOR, _LOCAL = dict.fromkeys((True, False), "favor"), dict.fromkeys((True, False), "local")

PEERS: dict[str, Peer] = {
    "performer-pytorch": Peer("performer_pytorch", _performer, _FAVOR),
    "performer-pytorch (efficient)": Peer("performer_pytorch", partial(_performer, no_projection=True), _EFFICIENT),
    "linear-attention-transformer": Peer("linear_attention_transformer", _linear_attention_transformer, _EFFICIENT),
    # its queries see none of the last 64 keys
    "linear-attention-transformer (blindspot)": Peer(
        "linear_attention_transformer", partial(_linear_attention_transformer, blindspot=64), {True: "exp"}
    ),
    "local-attention": Peer("local_attention", _local_attention, _LOCAL),
    "linformer package": Peer("linformer", _linformer, {False: "linformer"}),
}
