"""The parts of a sequence that the ranks of a group hold: their labels, their loss and the state after all of them."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from linattn.checks import check_tensors
from linattn.distributed.transport import Line
from linattn.models.loss import NO_LABEL
from linattn.nn.checks import check_indices
from linattn.ops.nested import map_state, tensors_in
from linattn.ops.tokens.compaction import compact, pack, packed_mask, unpack
from linattn.types import TokenIds, TokenMask

Group = DeviceMesh | dist.ProcessGroup


def process_group(group: Group) -> dist.ProcessGroup:
    """Return the process group of a mesh of one dimension, or the group itself. Raises ValueError for another mesh, and
    in a process outside of it."""
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        name = (group.mesh_dim_names or ("name",))[0]
        raise ValueError(f"a mesh of one dimension is needed, such as mesh[{name!r}], but it has {group.ndim}")
    if group.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh, whose ranks alone may call this")
    return group.get_group()


class SequencePart(NamedTuple):
    """The tokens of one rank, and the labels for their logits; `key_mask` is None if all tokens are present."""

    tokens: TokenIds
    labels: TokenIds
    key_mask: TokenMask = None


def split_sequence(
    tokens: TokenIds, labels: TokenIds | None = None, *, group: Group, key_mask: TokenMask = None
) -> SequencePart:
    """Return this rank's part of `tokens` (b, n), which all ranks of the `group` have whole, and its labels.

    The label of a token is the next token, or the number in `labels` at the next token's place. As the next token may
    be on the next rank, labels are computed before the sequence is cut. Masked tokens (`key_mask` False) are missing
    ones: the label is that of the next present token. Masked tokens, and the last token of a row, have `NO_LABEL`,
    −100.

    Raises ValueError unless the number of ranks divides n."""
    check_indices(tokens, key_mask)
    line = Line(process_group(group))
    labels = tokens if labels is None else labels
    check_indices(labels, None, name="labels")
    n = tokens.shape[1]
    if labels.shape != tokens.shape:
        raise ValueError(f"labels must be as the tokens, {tuple(tokens.shape)}, but are {tuple(labels.shape)}")
    if n % line.size:
        raise ValueError(f"the number of ranks, {line.size}, must divide that of tokens, but there are {n}")
    part = slice(line.rank * n // line.size, (line.rank + 1) * n // line.size)
    targets = _next_labels(labels, key_mask)
    return SequencePart(tokens[:, part], targets[:, part], None if key_mask is None else key_mask[:, part])


def _next_labels(labels: Tensor, key_mask: TokenMask) -> Tensor:
    if key_mask is None:
        return F.pad(labels[:, 1:], (0, 1), value=NO_LABEL)
    where = compact(key_mask)
    packed = pack(labels.unsqueeze(-1), where).squeeze(-1).masked_fill(~packed_mask(where), NO_LABEL)
    targets = _next_labels(packed, None)
    return unpack(targets.unsqueeze(-1), where, key_mask).squeeze(-1).masked_fill(~key_mask, NO_LABEL)


def sequence_loss(logits: Float[Tensor, "b n v"], labels: TokenIds, *, group: Group) -> Float[Tensor, ""]:
    """Return the mean cross entropy of the labels of all ranks, each with its own `logits`; labels that are `NO_LABEL`
    do not count. The value is the same on every rank.

    Each rank gets the gradients from its own tokens, times the number of ranks. Averaged over the ranks, as DDP and
    FSDP do, they are the gradients of the whole sequence."""
    check_tensors(logits=logits, labels=labels)
    check_indices(labels, None, name="labels")
    if logits.ndim != 3 or not logits.is_floating_point():
        raise ValueError(f"logits must be floating-point (b, n, v), but are {logits.dtype} {tuple(logits.shape)}")
    if labels.shape != logits.shape[:2]:
        raise ValueError(f"labels must be {tuple(logits.shape[:2])}, as the logits, but are {tuple(labels.shape)}")
    line = Line(process_group(group))
    exact = logits.float() if logits.element_size() < 4 else logits
    # models take int32 tokens too, unlike torch's loss
    total = F.cross_entropy(exact.flatten(0, 1), labels.flatten().long(), ignore_index=NO_LABEL, reduction="sum")
    sums = torch.stack([total.detach().double(), (labels != NO_LABEL).sum().double()])
    dist.all_reduce(sums, group=line.group)
    count = sums[1].clamp(min=1).to(total.dtype)
    own = total * line.size / count
    return own + (sums[0].to(total.dtype) / count - own).detach()


def last_state(state: Any, *, group: Group) -> Any:
    """Return, on every rank of the `group`, the `state` that `extend` returned on the last one: that after all tokens.
    It has no gradient."""
    line = Line(process_group(group))
    # copies: what is sent of a view is the tensor that it is part of
    box = [map_state(lambda x: x.detach().clone(), state) if line.is_last else None]
    dist.broadcast_object_list(box, group=line.group, group_src=line.size - 1)
    own = next(iter(tensors_in(state)), None)
    return box[0] if own is None else map_state(lambda x: x.to(own.device), box[0])
