"""Messages between the processes of a group: states, and their gradients.

The processes are the ranks of a group, in the order of the tokens that they hold. A state is sent with a header, which
says of what it consists, so that the receiver needs to know nothing. A rank does not wait until its message has been
received."""

import pickle
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.nested import map_state, tensors_in, with_tensors

# more messages than a model sends in a pass; each keeps its buffer alive until it has been received
_LARGEST_BACKLOG = 8192


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

    def send_state(self, state: Any, rank: int) -> None:
        """Send a state, nested tuples of tensors and of numbers that are options of a layer."""
        header, numbers = self._encoded(state)
        for x in (torch.tensor([len(header), len(numbers)], device=self.device), header, numbers):
            if len(x):
                self.send(x, rank)

    def receive_state(self, rank: int, what: str) -> Any:
        """Return the state that the `rank` sends; `what` names it in errors."""
        sizes = self.receive(torch.empty(2, dtype=torch.int64, device=self.device), rank, what).tolist()
        parts = (torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes)
        return _decoded(*(self.receive(x, rank, what) if len(x) else x for x in parts))

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return the x of all ranks, which have the same number of elements."""
        self.bytes_sent += x.numel() * x.element_size()
        everything = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(everything, x, group=self.group)
        return everything

    def gather_states(self, state: Any) -> list[Any]:
        """Return the states of all ranks, whose tensors may differ in length."""
        header, numbers = self._encoded(state)
        own = torch.tensor([len(header), len(numbers)], device=self.device)
        sizes = [x.tolist() for x in self.gather(own)]
        padding = max(map(sum, sizes)) - int(own.sum())
        rows = self.gather(F.pad(torch.cat([header, numbers]), (0, padding)))
        return [_decoded(*row[: sum(size)].split(size)) for row, size in zip(rows, sizes, strict=True)]

    def texts(self, mine: str) -> list[str]:
        """Return the texts of all ranks."""
        everything = [""] * self.size
        dist.all_gather_object(everything, mine, group=self.group)
        return everything

    def agree(self, mine: str) -> None:
        """Raise ValueError on every rank unless the description `mine` is the same on all."""
        first, *others = self.texts(mine)
        for rank, text in enumerate(others, 1):
            if text != first:
                raise ValueError(f"all ranks must do the same, but rank 0 has {first}, and rank {rank} {text}")

    @property
    def device(self) -> torch.device:
        """The device of the tensors that the group sends: the current GPU, or the CPU."""
        if dist.get_backend(self.group) in ("gloo", "mpi"):
            return torch.device("cpu")
        accelerator = torch.accelerator.current_accelerator()
        return torch.device("cpu") if accelerator is None else accelerator

    def _encoded(self, state: Any) -> tuple[Tensor, Tensor]:
        """Return the header of a state, its form without numbers, and the bytes of its numbers."""
        form = pickle.dumps(map_state(lambda x: torch.empty_like(x, device="meta"), state))
        header = torch.frombuffer(bytearray(form), dtype=torch.uint8).to(self.device)
        return header, packed(tensors_in(state)).to(self.device)


def _decoded(header: Tensor, numbers: Tensor) -> Any:
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
