"""Tensor parallelism: what several ranks compute together is what one process computes."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from linattn import LocalAttention, generate, named_attention
from linattn.distributed import tensor_parallel
from linattn.models import LanguageModel, SequenceModel, next_token_loss
from linattn.nn import (
    AxialPositions,
    Branch,
    Chunked,
    FeedForward,
    MultiheadAttention,
    ReversibleSequence,
    TokenShift,
)
from tests.models.causal import MODELS, OPTIONS, SIGNED, small_model, some_tokens
from tests.processes import needs_processes, run_in_group

# with numbers of heads that two ranks can share
MIXTURES: dict[str, dict[str, Any]] = {
    "uneven mixture": {"attention": "local:4+taylor:2", "num_heads": 6, "head_dim": 4},
    "grouped keys of a mixture": {"attention": "local+elu", "num_heads": 8, "num_key_heads": 4},
    "maps of a mixture": {"attention": "hedgehog:2+t2r:2"},
    "everything": {
        "attention": "local+kda",
        "convolution": 3,
        "convolution_on": "projections",
        "gate": True,
        "head_norm": True,
        "gated_norm": True,
        "value_skip": True,
    },
}
MANY: dict[str, dict[str, Any]] = {
    name: {"depth": 1 if isinstance(options["attention"], str) else 2} | options
    for name, options in {**MODELS, **MIXTURES}.items()
}


def whole(x: Tensor) -> Tensor:
    x = x.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x


def error(x: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    return float((whole(x) - whole(wanted)).abs().max() / whole(wanted).abs().max().clamp(min=1e-300))


def gradient_error(model: nn.Module, reference: nn.Module) -> float:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(error(x.grad, wanted.grad) for x, wanted in pairs if wanted.grad is not None)


def learn(model: nn.Module, tokens: Tensor) -> Tensor:
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()
    return loss


def pair(options: dict[str, Any]) -> tuple[LanguageModel, LanguageModel]:
    torch.manual_seed(0)
    model = small_model(options)
    return model, copy.deepcopy(model)


def is_one_process(mesh: DeviceMesh, name: str) -> None:
    """Logits, loss, gradients, and tokens one after the other; and `undo` gives the model back."""
    model, reference = pair(MANY[name])
    tokens, bound = some_tokens(2, 11), 1e-11 if name in SIGNED else 5e-14
    sharding = tensor_parallel(model, mesh)
    logits, wanted = model(tokens), reference(tokens)
    assert error(logits, wanted) < bound, name
    assert error(learn(model, tokens), learn(reference, tokens)) < bound, name
    assert gradient_error(model, reference) < bound, name
    first, state = model.extend(tokens[:, :6])
    assert error(torch.cat([first, model.extend(tokens[:, 6:], state)[0]], 1), wanted) < bound, name
    sharding.undo()
    assert torch.equal(model(tokens), wanted), name
    assert model.state_dict().keys() == reference.state_dict().keys()


def updates_and_checkpoints_agree(mesh: DeviceMesh, folder: Path) -> None:
    """Clipped gradients and AdamW; what two ranks save, one process and two ranks load, the optimizer's state too."""
    model, reference = pair(MIXTURES["everything"])
    tokens = some_tokens(2, 11)
    tensor_parallel(model, mesh)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, eps=1e-3) for each in (model, reference)]
    update([model, reference], optimizers, tokens)
    pieces = dict(zip(("model", "optimizer"), get_state_dict(model, optimizers[0]), strict=True))
    dcp.save(pieces, checkpoint_id=folder)
    one, _ = pair(MIXTURES["everything"])
    with torch.device("meta"):
        empty = LanguageModel(reference.config).double()
    tensor_parallel(empty, mesh)
    empty.to_empty(device="cpu")
    for each in (one, empty):
        optimizers.append(torch.optim.AdamW(each.parameters(), lr=0.01, eps=1e-3))
        pieces = dict(zip(("model", "optimizer"), get_state_dict(each, optimizers[-1]), strict=True))
        dcp.load(pieces, checkpoint_id=folder)
        set_state_dict(each, optimizers[-1], model_state_dict=pieces["model"], optim_state_dict=pieces["optimizer"])
    update([model, reference, one, empty], optimizers, tokens)
    for each in (model, one, empty):
        for x, wanted in zip(each.parameters(), reference.parameters(), strict=True):
            assert error(x, wanted) < 1e-13


def update(models: list[LanguageModel], optimizers: list[torch.optim.Optimizer], tokens: Tensor) -> None:
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        learn(model, tokens)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def recomputation_agrees(mesh: DeviceMesh) -> None:
    model, reference = pair(MIXTURES["everything"])
    tensor_parallel(model, mesh)
    tokens = some_tokens(2, 11)
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward, **options: checkpoint(forward, x, use_reentrant=False, **options)
    learn(model, tokens), learn(reference, tokens)
    assert gradient_error(model, reference) < 5e-14


def half_precision_is_as_exact(mesh: DeviceMesh) -> None:
    model, reference = pair(OPTIONS["un-normalised"] | {"depth": 1})
    tokens, models = some_tokens(2, 11), [copy.deepcopy(model).bfloat16() for _ in range(2)]
    tensor_parallel(models[0], mesh)
    for each in (*models, reference):
        learn(each, tokens)
    errors = [gradient_error(each, reference) for each in models]
    assert errors[0] < 1.5 * errors[1] < 0.5


def generated_texts_agree(mesh: DeviceMesh) -> None:
    model, reference = pair(MIXTURES["everything"])
    tensor_parallel(model, mesh)
    texts = []
    for each in (model, reference):
        torch.manual_seed(1)
        texts.append(generate(each, [[1, 2, 3], [4]], max_new_tokens=6))
    assert texts[0] == texts[1]


def cross_attention_agrees(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = MultiheadAttention(8, 2, "elu", context_dim=6, bias=True, head_norm=True).double()
    reference, inputs = copy.deepcopy(model), [torch.randn(2, n, c).double() for n, c in ((5, 8), (7, 6))]
    tensor_parallel(model, mesh)
    results = []
    for each in (model, reference):
        x, context = (y.clone().requires_grad_() for y in inputs)
        y, again = each(x, context), each.read(x, each.summarize(context))
        (y * again).sum().backward()
        results.append((y, again, x.grad, context.grad))
    for x, wanted in zip(*results, strict=True):
        assert error(x, wanted) < 1e-14
    assert gradient_error(model, reference) < 1e-14


def reversible_models_agree(mesh: DeviceMesh) -> None:
    """Weights are inputs of an autograd function; the embedding is the head; a module has a list of parameters."""
    torch.manual_seed(0)

    def branches() -> tuple[Branch, Branch]:
        inner = named_attention("hedgehog", num_heads=2, head_dim=4, causal=True)
        attention = MultiheadAttention(8, 2, inner, head_norm=True)
        feed_forward = Chunked(FeedForward(8, 16), 2)
        return (
            Branch(attention, norm=nn.LayerNorm(8), shift=TokenShift((1, 0))),
            Branch(feed_forward, norm=nn.LayerNorm(8)),
        )

    stack = ReversibleSequence(branches() for _ in range(2))
    model = SequenceModel(nn.Embedding(13, 8), stack, positions=AxialPositions(8, (4, 8)), tied=True).double()
    reference, tokens = copy.deepcopy(model), some_tokens(2, 11)
    tensor_parallel(model, mesh)
    for each in (model, reference):
        each(tokens).square().sum().backward()
    assert gradient_error(model, reference) < 1e-14


class Unknown(nn.Module):
    pass


def what_cannot_be_shared_is_an_error(mesh: DeviceMesh) -> None:
    unknown = small_model({"attention": "elu"})
    unknown.blocks[1].mixer.inner.feature_map = Unknown()
    lone = nn.Sequential(nn.Linear(2, 2), LocalAttention(4))
    adapted = small_model({"attention": "elu"})
    adapted.blocks[0].mixer.o_proj = nn.Sequential(adapted.blocks[0].mixer.o_proj)
    again = small_model({"attention": "elu"})
    tensor_parallel(again, mesh)
    for model, message in (
        (small_model({"attention": "elu", "num_heads": 1}), r"blocks\.0\.mixer: the number of ranks, 2, .* are 1"),
        (small_model({"attention": "elu", "num_key_heads": 1}), "must divide the key heads, but there are 1"),
        (small_model({"attention": "local:3+elu:1"}), r"heads of each part, \(3, 1\), but there are 3"),
        (MultiheadAttention(8, 2, named_attention("elu", num_heads=2, head_dim=4), hidden_dropout=0.1), "dropout"),
        (FeedForward(4, 5), "must divide the hidden units, but there are 5"),
        (unknown, r"blocks\.1\.mixer\.inner\.feature_map is a Unknown"),
        (lone, "1 is a LocalAttention outside of a MultiheadAttention"),
        (adapted, "must be nn.Linear, but one is a Sequential"),
        (nn.Linear(2, 2), "nothing to share"),
        (again, "DTensors already"),
    ):
        before = dict(model.named_parameters())
        with pytest.raises(ValueError, match=message):
            tensor_parallel(model, mesh)
        assert all(x is before[name] for name, x in model.named_parameters())


def two_ranks(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name in MANY:
        is_one_process(mesh, name)
    updates_and_checkpoints_agree(mesh, folder)
    for law in (
        recomputation_agrees,
        half_precision_is_as_exact,
        generated_texts_agree,
        cross_attention_agrees,
        reversible_models_agree,
        what_cannot_be_shared_is_an_error,
    ):
        law(mesh)


def four_ranks(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "heads"))
    model, reference = pair(MIXTURES["everything"])
    tensor_parallel(model, mesh["heads"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    tokens = some_tokens(4, 11)
    learn(model, tokens.chunk(2)[mesh["data"].get_local_rank()]), learn(reference, tokens)
    assert gradient_error(model, reference) < 5e-14
    with pytest.raises(ValueError, match="one dimension"):
        tensor_parallel(reference, mesh)


@needs_processes
def test_two_ranks_are_one_process(tmp_path):
    run_in_group(2, two_ranks, tmp_path)


@needs_processes
def test_ranks_for_heads_and_ranks_for_data():
    run_in_group(4, four_ranks)


def test_the_mesh_must_be_one():
    """Unlike for a sequence, a process group is not enough."""
    with pytest.raises(ValueError, match=r"a mesh of one dimension is needed.*, but this is a object"):
        tensor_parallel(nn.Linear(2, 2), object())
