"""Messages between the processes of a group: states, and their gradients.

The processes are the ranks of a group, in the order of the tokens that they hold. A message is one buffer with all
tensors of a state. A rank does not wait until its message has been received."""

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# more messages than a model has layers; each keeps its buffer alive until it has been received
_LARGEST_BACKLOG = 1024
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
_DIMENSIONS = 6
# the longest description of a call or a model that ranks compare, in bytes
_DESCRIPTION = 1000


class Line:
    """The ranks of a `group` in order, each of which exchanges messages with the rank before it and the one after it. A
    rank that waits longer than `timeout` seconds (None: the group's limit) raises an error that names the message."""

    def __init__(self, group: dist.ProcessGroup, timeout: float | None = None):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.timeout = None if timeout is None else timedelta(seconds=timeout)
        self.is_first, self.is_last = self.rank == 0, self.rank == self.size - 1
        # whether the ranks are inside of a call that they have compared
        self.bytes_sent, self.is_busy = 0, False
        self._backlog = deque[tuple[Any, Tensor]]()

    def send(self, x: Tensor, rank: int) -> None:
        """Begin to send the numbers of x to the `rank` of the group."""
        self.bytes_sent += x.numel() * x.element_size()
        self._backlog.append((dist.isend(x, group=self.group, group_dst=rank), x))
        while self._backlog and (self._backlog[0][0].is_completed() or len(self._backlog) > _LARGEST_BACKLOG):
            self._backlog.popleft()[0].wait()

    def receive(self, x: Tensor, rank: int, what: str) -> Tensor:
        """Fill x with what the `rank` of the group sends, which `what` names in errors, and return it."""
        work: Any = dist.irecv(x, group=self.group, group_src=rank)
        try:
            work.wait() if self.timeout is None else work.wait(self.timeout)
        except RuntimeError as error:
            limit = "as long as the group allows" if self.timeout is None else f"{self.timeout.total_seconds():g} s"
            raise RuntimeError(
                f"rank {self.rank} waited {limit} for {what} from rank {rank}, which has ended or does something else"
            ) from error
        return x

    def finish(self) -> None:
        """Wait until all messages have been received."""
        while self._backlog:
            self._backlog.popleft()[0].wait()

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return the x of all ranks, which have the same number of elements."""
        self.bytes_sent += x.numel() * x.element_size()
        everything = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(everything, x, group=self.group)
        return everything

    def descriptions(self, mine: str) -> list[str]:
        """Return the texts that the ranks gave, of at most 1,000 bytes each."""
        device = self.group_device
        encoded = mine.encode()[:_DESCRIPTION].ljust(_DESCRIPTION, b"\0")
        own = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(device)
        texts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(texts, own, group=self.group)
        return [bytes(x.tolist()).rstrip(b"\0").decode(errors="replace") for x in texts]

    def agree(self, mine: str) -> None:
        """Raise ValueError on every rank unless the description `mine` is the same on all."""
        first, *others = self.descriptions(mine)
        for rank, text in enumerate(others, 1):
            if text != first:
                raise ValueError(f"all ranks must do the same, but rank 0 has {first}, and rank {rank} {text}")

    @property
    def group_device(self) -> torch.device:
        """The device of the tensors that the group sends: the current GPU, or the CPU."""
        if dist.get_backend(self.group) in ("gloo", "mpi"):
            return torch.device("cpu")
        accelerator = torch.accelerator.current_accelerator()
        return torch.device("cpu") if accelerator is None else accelerator


class Format(NamedTuple):
    """The format of a message. `leaves` are the leaves of a state after no tokens, whose tensors have the right dtypes
    and, unless the state `grows` with the tokens, the right sizes; if it does, a header with the sizes comes before the
    message."""

    leaves: list[Any]
    grows: bool


def is_learned(leaf: Any) -> bool:
    """Tell whether a leaf of a state has a gradient."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def leaves_of(state: Any) -> list[Any]:
    """Return everything in nested tuples that is no tuple: tensors, None, and numbers that are options of a layer."""
    return [leaf for part in state for leaf in leaves_of(part)] if isinstance(state, tuple) else [state]


def with_leaves(state: Any, leaves: Sequence[Any]) -> Any:
    """Return the nested tuples of `state` with its leaves replaced, in order, by `leaves`."""
    following = iter(leaves)

    def built(part: Any) -> Any:
        if not isinstance(part, tuple):
            return next(following)
        parts = [built(x) for x in part]
        return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)

    return built(state)


def header_of(leaves: Sequence[Any]) -> Tensor:
    """Return a table with a row per leaf: the number of its dtype from 1 on (0: no tensor), dimensions and sizes."""
    header = torch.zeros(len(leaves), 2 + _DIMENSIONS, dtype=torch.int64)
    for row, leaf in zip(header, leaves, strict=True):
        if isinstance(leaf, Tensor):
            sizes = [1 + _DTYPES.index(leaf.dtype), leaf.ndim, *leaf.shape]
            row[: len(sizes)] = torch.tensor(sizes)
    return header


def with_sizes(leaves: Sequence[Any], header: Tensor) -> list[Any]:
    """Return the leaves with tensors without storage, of the sizes that the `header` tells."""
    described = []
    for leaf, (kind, ndim, *sizes) in zip(leaves, header.tolist(), strict=True):
        other = None if isinstance(leaf, Tensor) else leaf
        described.append(torch.empty(sizes[:ndim], dtype=_DTYPES[kind - 1], device="meta") if kind else other)
    return described


def send_leaves(line: Line, rank: int, form: Format, leaves: Sequence[Any], device: torch.device) -> None:
    """Send the tensors among the `leaves` of a state to the `rank`."""
    if form.grows:
        line.send(header_of(leaves).to(device), rank)
    if num_bytes(leaves):
        line.send(packed(leaves), rank)


def receive_leaves(line: Line, rank: int, form: Format, device: torch.device, what: str) -> list[Any]:
    """Return what `send_leaves` sent; `what` names it in errors."""
    leaves = form.leaves
    if form.grows:
        leaves = with_sizes(leaves, line.receive(header_of(leaves).to(device), rank, what))
    buffer = torch.empty(num_bytes(leaves), dtype=torch.uint8, device=device)
    return unpacked(line.receive(buffer, rank, what) if len(buffer) else buffer, leaves)


def tensors_in(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def num_bytes(leaves: Sequence[Any]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors_in(leaves))


def packed(leaves: Sequence[Any]) -> Tensor:
    """Return the bytes of all tensors, one after the other."""
    return torch.cat([x.detach().contiguous().view(-1).view(torch.uint8) for x in tensors_in(leaves)])


def unpacked(buffer: Tensor, leaves: Sequence[Any]) -> list[Any]:
    """Return the `leaves` with each tensor replaced by one of the same shape and dtype, read from the buffer."""
    parts = iter(buffer.split([num_bytes([x]) for x in tensors_in(leaves)]))
    # copies: a part of the buffer may begin where a number of its dtype may not
    return [next(parts).clone().view(x.dtype).view(x.shape) if isinstance(x, Tensor) else x for x in leaves]
