"""transformers' models whose sequences are shared by two processes are those of one process."""

import contextlib
import io
import itertools
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

from linattn.distributed import SequenceSharding, sequence_loss, shard_sequence, split_sequence
from linattn.integrations.transformers import speed_up
from linattn.integrations.transformers.token_model import PretrainedTokenModel
from linattn.linearize import convert, plan
from linattn.linearize.attention import linearized_layers, own_attention
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
    # some layers round to float32, where the last bit of a float64 may decide, in one token
    errors = torch.tensor(
        [error(*x) for x in zip(found.unbind(1), logits.split([13, 10], 1)[rank].unbind(1), strict=True)]
    )
    assert errors.median() < 1e-12 and errors.max() < 1e-6, name
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


class SequenceTrainer(transformers.Trainer):
    """Every rank reads the same rows, and learns from its part of each."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=2)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Tensor:
        part = split_sequence(inputs["input_ids"], group=dist.group.WORLD)
        return sequence_loss(model(input_ids=part.tokens).logits, part.labels, group=dist.group.WORLD)


def trainer(rank: int, folder: Path) -> None:
    """Weights after three steps of SGD."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    os.environ |= dict(zip(names, (str(rank), str(rank), "2", "2", "localhost", "29500"), strict=True))
    rows = torch.randint(VOCABULARY, (6, 24), generator=torch.Generator().manual_seed(0))
    model, expected = (decoder(DECODERS["llama"], attn_implementation="linattn:elu") for _ in range(2))
    share(model)
    options = {"learning_rate": 0.01, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    arguments = transformers.TrainingArguments(
        folder, **options, max_steps=3, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True
    )
    SequenceTrainer(model, arguments, train_dataset=[{"input_ids": row} for row in rows]).train()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.01)
    for batch in rows.split(2):
        optimizer.zero_grad()
        expected.train()(batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
    for weight, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert error(weight, wanted) < 1e-6


def test_transformers_trainer(tmp_path):
    run_in_group(2, trainer, tmp_path)


def decoders(rank: int) -> None:
    model = decoder(DECODERS["llama"], attn_implementation="sdpa")
    with pytest.raises(ValueError, match=r"layers.0.self_attn, a LlamaAttention, attends by 'sdpa'.*linattn:softmax"):
        share(model)
    model.set_attn_implementation("linattn:elu")
    with pytest.raises(ValueError, match="the model, a PretrainedTokenModel, holds a model of another library"):
        share(PretrainedTokenModel(model))
    sharding, tokens = share(model), torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="is sharded already"):
        share(model)
    for options, message in (
        ({"labels": tokens}, "split_sequence moves them"),
        ({"use_cache": True}, "takes no cache"),
        ({"attention_mask": torch.tensor([[rank, 1, 1, 1]])}, "padded needs position_ids"),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens, **options)
    sharding.undo()
    rest, share_of_each = iter(DECODERS.items()), math.ceil(len(DECODERS) / 5)
    for method in ("elu", "favor", "retention", "local+elu", "softmax"):
        for name, family in itertools.islice(rest, share_of_each):
            is_one_process(rank, f"{name} by {method}", decoder(family, attn_implementation=f"linattn:{method}"))
    for method in ("elu", "hedgehog", "gla", "gated_delta"):
        model = decoder(DECODERS["llama"])
        convert(model, plan(model, method=method, window=3))
        for layer in linearized_layers(model).values():
            # at first it is the identity, which needs no past
            nn.init.normal_(own_attention(layer).convolution.weight)
        is_one_process(rank, f"linearized by {method}", model.double())
    for name, family in WINDOWED.items():
        is_one_process(rank, name, decoder(family, attn_implementation="linattn:softmax"))


def test_every_decoder():
    run_in_group(2, decoders)
