"""Two processes train as one: data in two halves, gradients averaged, or every weight in two halves."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from linattn.models import LanguageModel, LanguageModelConfig
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


def shard(model: LanguageModel) -> LanguageModel:
    for block in model.blocks:
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
    with torch.device("meta"):
        model = LanguageModel(CONFIG)
    shard(model).to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    plain = LanguageModel(CONFIG).state_dict()
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert whole.isfinite().all(), name
        # initial decays depend on the places of heads and channels, which each process has a part of
        if ".decay." in name and whole.ndim == 1:
            torch.testing.assert_close(whole, plain[name], msg=name)
        if name.endswith("q_proj.weight"):
            assert 0.015 < whole.std() < 0.025, name
            assert not torch.equal(*whole.chunk(2)), name
    logits = model(torch.arange(10).unsqueeze(0))
    everyones = [torch.empty_like(logits) for _ in range(2)]
    dist.all_gather(everyones, logits.detach())
    assert torch.equal(everyones[0], everyones[1])


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
