"""Two processes train as one: data in two halves, gradients averaged, or every weight in two halves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from linattn.attention.decay import Decay
from linattn.models import LanguageModel, LanguageModelConfig
from tests.models.causal import MODELS, NAMES, VOCABULARY
from tests.processes import needs_processes, run_in_two

CONFIG = LanguageModelConfig(
    vocab_size=13,
    dim=16,
    depth=4,
    attention=("local+elu", "favor", "ssd:2+kda:2", "rwkv7"),
    window=5,
    convolution=3,
    convolution_on="projections",
    gate=True,
)


def train(model: nn.Module, batches: list[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for tokens in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()


def shard(model: Any) -> Any:
    for block in getattr(model, "blocks", ()):
        fully_shard(block)
    return fully_shard(model)


def distribute(model: LanguageModel, how: str) -> nn.Module:
    return {"ddp": DistributedDataParallel, "fsdp": shard}[how](model)


def work(rank: int, folder: Path, how: str) -> None:
    model = LanguageModel(CONFIG)
    model.load_state_dict(torch.load(folder / "start", weights_only=True))
    batches = torch.load(folder / "batches", weights_only=True)
    train(distribute(model, how), [tokens.chunk(2)[rank] for tokens in batches])
    weights = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }
    if rank == 0:
        torch.save(weights, folder / "end")


def work_from_meta(rank: int) -> None:
    # of one head, one of the two processes has all that is a number per head
    for options in (*MODELS.values(), *({"attention": name, "num_heads": 1} for name in NAMES)):
        config = LanguageModelConfig(**({"vocab_size": VOCABULARY, "dim": 16, "depth": 2, "window": 7} | options))
        model = initialised_where_it_lies(lambda config=config: LanguageModel(config))
        logits = model(torch.arange(10).unsqueeze(0))
        everyones = [torch.empty_like(logits) for _ in range(2)]
        dist.all_gather(everyones, logits.detach())
        assert torch.equal(everyones[0], everyones[1]), options
        for block in model.blocks if config.induction else ():
            assert torch.equal(*(part.weight.full_tensor() for part in (block.mixer.q_proj, block.mixer.k_proj)))
    for heads in (1, 3):
        initialised_where_it_lies(lambda heads=heads: Decay(heads, learned=True))


def initialised_where_it_lies(make: Callable[[], Any]) -> Any:
    """A sharded model whose weights have the values of a whole one, or, where those are random, their deviation."""
    with torch.device("meta"):
        model = make()
    shard(model).to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    plain, other = (make().state_dict() for _ in range(2))
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        alike = plain[name] == other[name]
        assert_close(whole[alike], plain[name][alike], msg=lambda text, name=name: f"{name}: {text}")
        assert whole.isfinite().all(), name
        if name.endswith("_proj.weight"):
            assert 0.5 < whole.std() / plain[name].std() < 2, name
            assert not torch.equal(*whole.flatten()[: whole.numel() // 2 * 2].chunk(2)), name
    return model


@needs_processes
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_processes_train_as_one(tmp_path, how):
    model = LanguageModel(CONFIG)
    batches = [torch.randint(13, (4, 18)) for _ in range(3)]
    torch.save(model.state_dict(), tmp_path / "start")
    torch.save(batches, tmp_path / "batches")
    run_in_two(work, tmp_path, how)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(model, batches)
    end = torch.load(tmp_path / "end", weights_only=True)
    for name, tensor in model.state_dict().items():
        assert_close(end[name], tensor, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    assert not torch.allclose(start["embedding.weight"], end["embedding.weight"], atol=1e-3)


@needs_processes
def test_a_sharded_model_is_initialised_where_it_lies():
    run_in_two(work_from_meta)
