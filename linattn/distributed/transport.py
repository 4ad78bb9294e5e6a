"""Messages between the processes of a group: states, and their gradients.

The processes are the ranks of a group, in the order of the tokens that they hold. A state is sent with a header, which
says of what it consists, so that the receiver needs to know nothing but how long the message is, as both ranks do once
a state of that name went from one to the other. Where all cores compute, each message takes as long as a thread of the
group waits for a core, some 3 ms. A rank does not wait until its message has been received."""

import pickle
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from linattn.checks import check_numbers, given
from linattn.ops.nested import map_state, tensors_in, with_tensors

# more messages than a model sends in a pass; each keeps its buffer alive until it has been received
_LARGEST_BACKLOG = 8192

# bytes of the first message with a state of a name: those of most headers, and all those of a small state
_SHORT = 1024

# bytes of the two lengths with which a state begins
_LENGTHS = 16


class Line:
    """The ranks of a `group` in order, each of which exchanges messages with the rank before it and the one after it. A
    rank that waits longer than `timeout` seconds (None: the group's limit) raises an error that names the message.

    Raises ValueError for a timeout of less than a millisecond, and in a process outside of the group."""

    def __init__(self, group: dist.ProcessGroup, timeout: float | None = None):
        # torch counts whole milliseconds, and takes 0 for its own limit
        check_numbers(least=1e-3, **given(timeout=timeout))
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in the group, whose ranks alone may call this")
        self.timeout = None if timeout is None else timedelta(seconds=timeout)
        self.is_first, self.is_last = self.rank == 0, self.rank == self.size - 1
        # whether the ranks are inside of a call that they have compared
        self.bytes_sent, self.is_busy = 0, False
        self._backlog = deque[tuple[Any, Tensor]]()
        # bytes of the last state of each name from or to a rank, which both of the two know
        self._known: dict[tuple[int, str], int] = {}

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

    def send_state(self, state: Any, rank: int, name: str) -> None:
        """Send the state of what has this `name`: nested tuples of tensors and of numbers that are options of a layer.
        It is one message if it is no longer than the last of that name, else two."""
        message, known = self._encoded(state), self._known.get((rank, name), _SHORT)
        self.send(F.pad(message[:known], (0, max(known - len(message), 0))), rank)
        if len(message) > known:
            self.send(message[known:], rank)
        self._known[rank, name] = len(message)

    def receive_state(self, rank: int, name: str) -> Any:
        """Return the state of what has this `name` that the `rank` sends."""
        what, known = f"the state of {name}", self._known.get((rank, name), _SHORT)
        message = self.receive(torch.empty(known, dtype=torch.uint8, device=self.device), rank, what)
        length = _LENGTHS + sum(message[:_LENGTHS].view(torch.int64).tolist())
        if length > known:
            rest = torch.empty(length - known, dtype=torch.uint8, device=self.device)
            message = torch.cat([message, self.receive(rest, rank, what)])
        self._known[rank, name] = length
        return _decoded(message[:length])

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return the x of all ranks, which have the same number of elements."""
        self.bytes_sent += x.numel() * x.element_size()
        everything = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(everything, x, group=self.group)
        return everything

    def gather_states(self, state: Any) -> list[Any]:
        """Return the states of all ranks, whose tensors may differ in length."""
        own = self._encoded(state)
        lengths = [int(x) for x in self.gather(torch.tensor([len(own)], device=self.device))]
        rows = self.gather(F.pad(own, (0, max(lengths) - len(own))))
        return [_decoded(row[:length]) for row, length in zip(rows, lengths, strict=True)]

    def agree(self, mine: str, problem: str = "") -> None:
        """Raise ValueError on every rank if there is a `problem` on one, or if the description `mine` is not the same
        on all."""
        everything = [("", "")] * self.size
        dist.all_gather_object(everything, (problem, mine), group=self.group)
        for rank, (other, _) in enumerate(everything):
            if other:
                raise ValueError(problem or f"rank {rank}: {other}")
        _, first = everything[0]
        for rank, (_, text) in enumerate(everything):
            if text != first:
                raise ValueError(f"all ranks must do the same, but rank 0 has {first}, and rank {rank} {text}")

    @property
    def device(self) -> torch.device:
        """The device of the tensors that the group sends: the current GPU, or the CPU."""
        if dist.get_backend(self.group) in ("gloo", "mpi"):
            return torch.device("cpu")
        accelerator = torch.accelerator.current_accelerator()
        return torch.device("cpu") if accelerator is None else accelerator

    def _encoded(self, state: Any) -> Tensor:
        """Return the bytes of a state: two lengths, a header, which is its form without numbers, and its numbers."""
        form = pickle.dumps(map_state(lambda x: torch.empty_like(x, device="meta"), state))
        header = torch.frombuffer(bytearray(form), dtype=torch.uint8).to(self.device)
        numbers = packed(tensors_in(state)).to(self.device)
        lengths = torch.tensor([len(header), len(numbers)], device=self.device)
        return torch.cat([lengths.view(torch.uint8), header, numbers])


def _decoded(message: Tensor) -> Any:
    lengths, rest = message[:_LENGTHS], message[_LENGTHS:]
    header, numbers = rest.split(lengths.view(torch.int64).tolist())
    form = pickle.loads(bytes(header.tolist()))
    return with_tensors(form, unpacked(numbers, tensors_in(form)))


def is_learned(x: Tensor) -> bool:
    """Tell whether a tensor of a state has a gradient."""
    return x.is_floating_point()


def num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of all tensors, one after the other."""
    rows = [x.detach().contiguous().view(-1).view(torch.uint8) for x in tensors]
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8)


def unpacked(buffer: Tensor, forms: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of the shapes and dtypes of those in `forms`, read from the buffer."""
    parts = buffer.split([num_bytes([x]) for x in forms])
    # copies: a part of the buffer may begin where a number of its dtype may not
    return [part.clone().view(x.dtype).view(x.shape) for part, x in zip(parts, forms, strict=True)]
