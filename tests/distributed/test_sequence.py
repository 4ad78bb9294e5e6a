"""Several processes with a part of each sequence are one process with the whole sequence."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from linattn.distributed import last_state, sequence_loss, shard_sequence, split_sequence
from linattn.models.loss import NO_LABEL
from linattn.ops.nested import map_state
from tests.models.causal import MODELS, VOCABULARY, small_model, some_tokens
from tests.processes import needs_processes, run_in_group

pytestmark = needs_processes
CLOSE = 1e-12

# what each rank holds of 23 tokens: odd parts, one token alone
CUTS = {2: [13, 10], 4: [9, 1, 3, 10]}


def part_of(x: Tensor, rank: int, size: int) -> Tensor:
    return x.split(CUTS[size], 1)[rank]


WORST: list[tuple[float, str]] = []


def error(found: Tensor, expected: Tensor) -> float:
    x = ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()
    WORST.append(x)
    return x


def masks(b: int, n: int, size: int) -> dict[str, Tensor | None]:
    holes = torch.rand(b, n) < 0.7
    gap = torch.ones(b, n, dtype=torch.bool)
    # nothing is present on one rank, in one row
    gap[0, CUTS[size][0] :][: CUTS[size][1]] = False
    return {"none": None, "holes": holes, "gap": gap}


def whole_equals_parts(rank: int, size: int, name: str, options: dict[str, Any], mask: str) -> None:
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    model, tokens = small_model(options).train(), some_tokens(2, 23)
    key_mask = masks(2, 23, size)[mask]
    labels = torch.randint(VOCABULARY, (2, 23))
    if key_mask is not None:
        labels = labels.masked_fill(~key_mask, NO_LABEL)
    logits, state = model.extend(tokens, key_mask=key_mask)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    sharding = shard_sequence(model, group)
    own_mask = None if key_mask is None else part_of(key_mask, rank, size)
    own = model(part_of(tokens, rank, size), key_mask=own_mask)
    own_loss = sequence_loss(own, part_of(labels, rank, size), group=group)
    grads = torch.autograd.grad(own_loss, list(model.parameters()), materialize_grads=True)
    where = slice(None) if own_mask is None else own_mask
    assert error(own[where], part_of(logits, rank, size)[where]) <= CLOSE or own[where].numel() == 0, name
    assert abs(own_loss - loss) <= CLOSE * abs(loss), name
    for grad, wanted, (parameter, _) in zip(grads, expected, model.named_parameters(), strict=True):
        dist.all_reduce(grad)
        assert error(grad / size, wanted) <= CLOSE or wanted.norm() < 1e-9, f"{name}: {parameter}"
    with torch.no_grad():
        found = last_state(model.extend(part_of(tokens, rank, size), key_mask=own_mask)[1], group=group)
        tensors: list[Tensor] = []
        map_state(tensors.append, state)
        map_state(lambda x: compare(x, tensors.pop(0), name), found)
        # the next tokens: sharded again from that state, then by one process alone
        more, _ = model.extend(part_of(tokens, rank, size), found)
        sharding.undo()
        whole, _ = model.extend(tokens, state)
        assert error(more, part_of(whole, rank, size)) <= CLOSE, name
        assert error(model.extend(tokens[:, :3], found)[0], model.extend(tokens[:, :3], state)[0]) <= CLOSE


def compare(found: Tensor, expected: Tensor, name: str) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape, name
    finite = expected.isfinite() if expected.is_floating_point() else torch.ones_like(expected, dtype=torch.bool)
    assert torch.equal(found[~finite], expected[~finite]), name
    assert error(found[finite].double(), expected[finite].double()) <= CLOSE, name


def every_model(rank: int, size: int) -> None:
    for name, options in MODELS.items():
        for mask in ("none", "holes", "gap"):
            whole_equals_parts(rank, size, f"{name}, {mask}", options, mask)


@pytest.mark.parametrize("size", CUTS)
def test_parts_equal_the_whole(size: int):
    run_in_group(size, every_model, size)
