"""A model of one sequence over many devices: the seconds of each rank's work, and the clocks of ranks and wires.

The seconds are FLOP and bytes over rates. Nothing is run on a device."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


class Wire(NamedTuple):
    """A connection: bytes per second each way, and the seconds from a message's last byte to the receiver's first."""

    bandwidth: float
    latency: float


class Work(NamedTuple):
    """The seconds of one rank, `forward` and `backward`."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Machine:
    """The rates of a device: FLOP per second of the weights' products and of softmax attention, and bytes per second.
    `near` is the wire within a node, `far` that between nodes. `recompute` repeats a block's forward pass, but not its
    attention, before its backward pass."""

    dense: float
    softmax: float
    memory: float
    near: Wire
    far: Wire
    node: int = 8
    element: int = 2
    recompute: bool = True

    def nodes(self, ranks: int) -> tuple[int, int]:
        """Return the number of ranks per node, and of nodes."""
        if ranks > self.node and ranks % self.node:
            raise ValueError(f"devices must be at most {self.node}, or a multiple of it, but are {ranks}")
        return min(ranks, self.node), math.ceil(ranks / self.node)

    def gather(self, num_bytes: float, ranks: int) -> float:
        """The seconds until every rank has `num_bytes` of each: first along the nodes, then within each."""
        local, nodes = self.nodes(ranks)
        across = (nodes - 1) * num_bytes / self.far.bandwidth + log2(nodes) * self.far.latency
        return across + (local - 1) * nodes * num_bytes / self.near.bandwidth + log2(local) * self.near.latency

    def turns(self, ranks: int) -> tuple[int, int]:
        """Return the messages near and far by which each rank gets the sum over the ranks before it: within each node,
        where those in turn i come from 2^i places before, then between nodes in the same way, and within again."""
        local, nodes = self.nodes(ranks)
        return log2(local) + (nodes > 1), log2(nodes)

    def prefix(self, num_bytes: float, ranks: int) -> float:
        """The seconds of these turns, with `num_bytes` in each message."""
        near, far = self.turns(ranks)
        across = far * (num_bytes / self.far.bandwidth + self.far.latency)
        return near * (num_bytes / self.near.bandwidth + self.near.latency) + across

    def swap(self, num_bytes: float, ranks: int) -> float:
        """The seconds of an all-to-all in which every rank has `num_bytes`, and keeps the part that is its own."""
        local, nodes = self.nodes(ranks)
        within = num_bytes * (local - 1) / ranks / self.near.bandwidth + (local > 1) * self.near.latency
        return max(within, num_bytes * (ranks - local) / ranks / self.far.bandwidth + (nodes > 1) * self.far.latency)

    def reduce(self, num_bytes: float, ranks: int) -> float:
        """The seconds of an all-reduce, as a reduce-scatter and an all-gather of shares."""
        return 2 * self.gather(num_bytes / ranks, ranks)


@dataclass(frozen=True)
class Model:
    """The sizes of a language model, whose feed-forward layers have 8 · dim² weights. `chunk` is the kernels'."""

    depth: int = 24
    dim: int = 2048
    heads: int = 16
    vocab: int = 50257
    chunk: int = 64

    @property
    def state_bytes(self) -> float:
        """S and z of one layer in float32, whatever the number of tokens."""
        d = self.dim // self.heads
        return 4 * self.heads * d * (d + 1)


@dataclass(frozen=True)
class Run:
    """One sequence of `tokens` over `ranks`, and the work of one rank on some tokens."""

    model: Model
    machine: Machine
    tokens: float
    ranks: int
    training: bool

    @property
    def local(self) -> float:
        return self.tokens / self.ranks

    @property
    def stored_bytes(self) -> float:
        """One rank's inputs of all blocks, and outputs of all attentions, which the backward pass needs."""
        return 2 * self.model.depth * self.model.dim * self.machine.element * self.local

    def dense(self, tokens: float) -> Work:
        """A block without its attention: 24 dim² FLOP per token, and 18 dim elements of norms, sums and activations."""
        model, machine = self.model, self.machine
        products = 24 * model.dim**2 * tokens / machine.dense
        forward = products + 18 * model.dim * machine.element * tokens / machine.memory
        return Work(forward, (2 + machine.recompute) * forward)

    def operator(self, tokens: float, forward: tuple[int, int, int], backward: tuple[int, int, int]) -> Work:
        """Kernels that move (a) d elements per token and head, and compute (b) chunk · d + (c) d² FLOP."""
        model, machine = self.model, self.machine
        d = model.dim // model.heads
        seconds = [
            max(a * d * machine.element / machine.memory, (b * model.chunk * d + c * d**2) / machine.dense)
            for a, b, c in (forward, backward)
        ]
        return Work(*(model.heads * tokens * x for x in seconds))

    def linear(self, tokens: float) -> Work:
        """The operator, with the bytes and FLOP of docs/gpu.md."""
        return self.operator(tokens, (4, 4, 4), (11, 14, 10))

    def summary(self, tokens: float) -> Work:
        """Only a scan has these: the sums of a rank's own tokens, and the gradients of the sums and of the past."""
        return self.operator(tokens, (2, 0, 2), (6, 0, 8))

    def softmax(self) -> Work:
        """A rank's share of causal softmax attention, half of the n × n matrix."""
        forward = 2 * self.model.dim * self.tokens**2 / self.ranks / self.machine.softmax
        return Work(forward, 2.5 * forward)

    def block(self, tokens: float) -> Work:
        return Work(*(a + b for a, b in zip(self.dense(tokens), self.linear(tokens), strict=True)))

    def head(self) -> float:
        """Logits, loss and their gradients, which only training needs."""
        return self.training * 6 * self.model.dim * self.model.vocab * self.local / self.machine.dense


@dataclass
class Timeline:
    """The clocks of a run. `free` has the time at which each rank has done its work so far, `wires` the same for the
    wire from each rank to the next, `complete` the time at which all ranks have a layer's gradients."""

    run: Run
    num_bytes: float = field(init=False, default=0)

    def __post_init__(self) -> None:
        machine, ranks = self.run.machine, np.arange(self.run.ranks)
        self.free, self.wires = np.zeros(len(ranks)), np.zeros(len(ranks))
        self.complete = np.zeros(self.run.model.depth)
        is_near = ranks // machine.node == (ranks + 1) % len(ranks) // machine.node
        self.bandwidth = np.where(is_near, machine.near.bandwidth, machine.far.bandwidth)
        self.latency = np.where(is_near, machine.near.latency, machine.far.latency)

    def work(self, ranks: Any, seconds: float, ready: Any = 0.0) -> Any:
        """Let the ranks work once they are free and their inputs `ready`. Return when they have done it."""
        self.free[ranks] = np.maximum(self.free[ranks], ready) + seconds
        return self.free[ranks]

    def send(self, wires: Any, ready: Any, num_bytes: float) -> Any:
        """Return when a message arrives that is `ready` for the wires, which carry one after the other."""
        self.wires[wires] = np.maximum(self.wires[wires], ready) + num_bytes / self.bandwidth[wires]
        self.num_bytes += num_bytes * np.size(self.wires[wires])
        return self.wires[wires] + self.latency[wires]

    def meet(self, seconds: float, received: float) -> None:
        """A collective, which begins when the last rank is there, and brings each rank some bytes."""
        self.free[:] = self.free.max() + seconds
        self.num_bytes += received * self.run.ranks

    def bytes_per_layer(self) -> float:
        """Return the bytes that one rank receives for each layer, without the gradients of weights."""
        return self.num_bytes / self.run.ranks / self.run.model.depth

    def seconds(self) -> float:
        """Return the end of the run. In training, layer by layer, float32 gradients are added up beside other work."""
        model, end = self.run.model, 0.0
        if self.run.training and self.run.ranks > 1:
            sizes = [12 * model.dim**2] * model.depth + [model.dim * model.vocab]
            for size, ready in zip(sizes, [*self.complete[::-1], self.free.max()], strict=True):
                end = max(end, ready) + self.run.machine.reduce(4 * size, self.run.ranks)
        return max(end, self.free.max())


def log2(count: int) -> int:
    return math.ceil(math.log2(count))


ALL = slice(None)
