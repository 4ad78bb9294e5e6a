"""transformers' models whose sequences are shared by two processes are those of one process."""

import contextlib
import io
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from linattn.distributed import SequenceSharding, sequence_loss, shard_sequence
from linattn.integrations.transformers import speed_up
from tests.integrations.transformers.hybrids.families import FAMILIES, SELECTIVE, VOCABULARY
from tests.integrations.transformers.hybrids.families import make as hybrid
from tests.integrations.transformers.stock_attention.families import DECODERS, WINDOWED
from tests.integrations.transformers.stock_attention.families import make as decoder
from tests.processes import needs_processes, run_in_group

pytestmark = needs_processes
REFUSED = {
    "qwen4_exp": "n-grams look across documents",
    "glm5_next": "indexed attention looks across documents",
    "minimax": "takes no state",
    **dict.fromkeys(SELECTIVE, "its scan gets no documents"),
}
"""The hybrid models that cannot be shared, and the reasons."""


def error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def share(model: Any) -> SequenceSharding:
    return shard_sequence(model, dist.group.WORLD)


def is_one_process(rank: int, name: str, model: Any) -> None:
    """Logits, and all gradients; the parts have 13 and 10 tokens."""
    tokens = torch.randint(VOCABULARY, (2, 23), generator=torch.Generator().manual_seed(0))
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    options = {"use_cache": False}
    logits = model(tokens, **options).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    expected = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
    sharding = share(model)
    part, own = (x.split([13, 10], 1)[rank] for x in (tokens, labels))
    found = model(part).logits
    assert error(found, logits.split([13, 10], 1)[rank]) < 1e-12, name
    grads = torch.autograd.grad(
        sequence_loss(found, own, group=dist.group.WORLD), list(model.parameters()), materialize_grads=True
    )
    for grad, wanted in zip(grads, expected, strict=True):
        dist.all_reduce(grad)
        # some weights are used in float32, and their gradients are sums of float32 numbers
        assert error(grad / 2, wanted) < 1e-6, name
    sharding.undo()
    assert torch.equal(model(tokens, **options).logits, logits), name


def hybrids(rank: int) -> None:
    for name in FAMILIES:
        # torch's grouped products for experts take no float64
        model = hybrid(name, torch.float64)
        model.set_experts_implementation("eager")
        with contextlib.suppress(ValueError):
            # of those with softmax layers
            model.set_attn_implementation("linattn:softmax")
        with contextlib.redirect_stdout(io.StringIO()):
            speed_up(model)
        if name in REFUSED:
            with pytest.raises(ValueError, match=REFUSED[name]):
                share(model)
        else:
            is_one_process(rank, name, model)


def test_every_hybrid_model():
    run_in_group(2, hybrids)


def decoders(rank: int) -> None:
    methods = itertools.cycle(("elu", "favor", "retention", "local+elu", "softmax"))
    for (name, family), method in zip(DECODERS.items(), methods, strict=False):
        is_one_process(rank, f"{name} by {method}", decoder(family, attn_implementation=f"linattn:{method}"))
    for name, family in WINDOWED.items():
        is_one_process(rank, name, decoder(family, attn_implementation="linattn:softmax"))


def test_every_decoder():
    run_in_group(2, decoders)
