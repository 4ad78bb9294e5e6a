"""Attentions of other packages on the same queries, keys and values, beside ours that compute the same.

    python benchmarks/peers.py [--not-causal] [--workloads forward,training] [--lengths 2048] [--json FILE]

The packages are installed by the extra `peers`, are used as their readmes do, and are left out where they are missing.
Time and memory are measured as `linattn bench` does it, and --help lists its options. `linattn bench --redraw FILE`
draws the record."""

import argparse
import contextlib
import importlib
import io
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from linattn.cli.argument_types import names_from
from linattn.cli.bench import FORWARD, SOFTMAX, TRAINING, add_conditions, attentions
from linattn.cli.bench.attentions import attention_workload
from linattn.cli.bench.command import case_groups
from linattn.cli.bench.measure import Workload, measure
from linattn.cli.bench.record import Case, Setup, write_record
from linattn.cli.bench.report import printed

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Peer(NamedTuple):
    module: str
    build: Callable[[Any, Setup, Case], Attention]
    """Makes the attention from the module."""
    counterpart: dict[bool, str]
    """Our method that computes the same, causal or not. Without an entry the package has no such form."""


def installed(causal: bool) -> list[str]:
    return [name for name, peer in PEERS.items() if causal in peer.counterpart and find_spec(peer.module)]


def prepare(setup: Setup, case: Case) -> Workload:
    """Prepare the attention of a package, or ours."""
    if case.method in PEERS:
        return attention_workload(build_peer(setup, case), setup, case)
    return attentions.prepare(setup, case)


def build_peer(setup: Setup, case: Case) -> Attention:
    peer = PEERS[case.method]
    # performer-pytorch prints that it found no CUDA code
    with contextlib.redirect_stdout(io.StringIO()):
        attention = peer.build(importlib.import_module(peer.module), setup, case)
    return attention.to(setup.device, case.torch_dtype) if isinstance(attention, nn.Module) else attention


def performer(package: Any, setup: Setup, case: Case, no_projection: bool = False) -> Attention:
    return package.FastAttention(setup.head_dim, causal=setup.causal, no_projection=no_projection)


def linear_attention_transformer(package: Any, setup: Setup, case: Case, blindspot: int = 1) -> Attention:
    """Use its function. With a blindspot of 1 a query sees all keys up to its own, as with ours."""
    package = package.linear_attention_transformer
    return partial(package.causal_linear_attn, bucket_size=blindspot) if setup.causal else package.linear_attn


def local_attention(package: Any, setup: Setup, case: Case) -> Attention:
    return package.LocalAttention(setup.window, causal=setup.causal, autopad=True, use_rotary_pos_emb=False)


def linformer(package: Any, setup: Setup, case: Case) -> Attention:
    """Use its layer without the four linear projections, which the others do not have either. Keys and values are then
    the queries, which takes the same time."""
    dim = setup.heads * setup.head_dim
    layer = package.LinformerSelfAttention(dim, case.n, k=min(128, case.n), heads=setup.heads)
    layer.to_q = layer.to_k = layer.to_v = layer.to_out = nn.Identity()
    layer.to(setup.device, case.torch_dtype)
    return lambda q, k, v: layer(q.transpose(1, 2).flatten(2)).unflatten(-1, (setup.heads, -1)).transpose(1, 2)


# A softmax of the keys over all tokens has no causal form: there they take exponentials, divided by their sum with the
# query, where the softmax of the query cancels.
EFFICIENT = {True: "exp", False: "efficient"}
FAVOR, LOCAL = dict.fromkeys((True, False), "favor"), dict.fromkeys((True, False), "local")

PEERS: dict[str, Peer] = {
    "performer-pytorch": Peer("performer_pytorch", performer, FAVOR),
    "performer-pytorch (efficient)": Peer("performer_pytorch", partial(performer, no_projection=True), EFFICIENT),
    "linear-attention-transformer": Peer("linear_attention_transformer", linear_attention_transformer, EFFICIENT),
    # its queries see none of the last 64 keys
    "linear-attention-transformer (blindspot)": Peer(
        "linear_attention_transformer", partial(linear_attention_transformer, blindspot=64), {True: "exp"}
    ),
    "local-attention": Peer("local_attention", local_attention, LOCAL),
    "linformer package": Peer("linformer", linformer, {False: "linformer"}),
}


def methods(causal: bool) -> list[str]:
    """Return softmax, then each package that is installed, after the method of ours that computes the same."""
    pairs = ((PEERS[name].counterpart[causal], name) for name in installed(causal))
    return list(dict.fromkeys([SOFTMAX, *(name for pair in pairs for name in pair)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    workloads = (FORWARD, TRAINING)
    parser.add_argument("--workloads", type=names_from(workloads), default=workloads, metavar="A,B")
    parser.add_argument("--not-causal", dest="causal", action="store_false", help="let every query see all keys")
    parser.add_argument("--json", type=Path, help="write the record here too")
    add_conditions(parser)
    options = vars(parser.parse_args())
    path, options["methods"] = options.pop("json"), methods(options["causal"])
    record = measure(prepare, case_groups(options), options)
    print(printed(record))
    if path:
        write_record(record, path)


if __name__ == "__main__":
    main()
