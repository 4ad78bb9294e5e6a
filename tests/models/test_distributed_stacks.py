"""Two processes with reversible stacks train as one, also where all decoder layers read one encoder."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from linattn.attention.named import named_attention
from linattn.nn import Branch, FeedForward, MultiheadAttention, ReversibleSequence
from tests.processes import needs_processes, run_in_two

DIM = 8


def branch(module: nn.Module) -> Branch:
    return Branch(module, norm=nn.LayerNorm(DIM))


def attention(causal: bool, cross: bool) -> Branch:
    inner = named_attention("elu", num_heads=2, head_dim=DIM // 2, causal=causal)
    return branch(MultiheadAttention(DIM, 2, inner, context_dim=DIM if cross else None))


class Reader(nn.Module):
    """An encoder and a decoder of two layers, both reversible; with a layer that nothing uses."""

    def __init__(self, unused: bool):
        super().__init__()
        self.encoder = ReversibleSequence([(attention(False, False), branch(FeedForward(DIM, DIM)))])
        pairs = [(attention(not cross, cross), branch(FeedForward(DIM, DIM))) for cross in (False, True, False, True)]
        self.decoder = ReversibleSequence(pairs)
        self.unused = nn.Linear(DIM, DIM) if unused else None

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decoder(target, context=self.encoder(source)).square().mean()


def make(unused: bool) -> Reader:
    torch.manual_seed(0)
    return Reader(unused).double()


def train(model: nn.Module, batches: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for source, target in batches:
        optimizer.zero_grad()
        model(source, target).backward()
        optimizer.step()


def work(rank: int, folder: Path) -> None:
    batches = torch.load(folder / "batches", weights_only=True).chunk(2, 2)[rank]
    models = {unused: make(unused) for unused in (False, True)}
    for unused, model in models.items():
        train(DistributedDataParallel(model, find_unused_parameters=unused), batches)
    if rank == 0:
        torch.save({unused: model.state_dict() for unused, model in models.items()}, folder / "end")


@needs_processes
def test_two_processes_train_as_one(tmp_path):
    batches = torch.randn(3, 2, 4, 7, DIM, dtype=torch.float64)
    torch.save(batches, tmp_path / "batches")
    run_in_two(work, tmp_path)
    end = torch.load(tmp_path / "end", weights_only=True)
    for unused, weights in end.items():
        model = make(unused)
        start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        train(model, batches)
        for name, tensor in model.state_dict().items():
            assert_close(weights[name], tensor)
        same = {name for name, tensor in weights.items() if torch.equal(tensor, start[name])}
        assert same == ({"unused.weight", "unused.bias"} if unused else set())
