"""The laws of redrawing: exact counts, nothing in evaluation or recomputation, ranks alike, saved with the model."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from linattn.compat.performer_pytorch import FastAttention, ProjectionUpdater
from tests.processes import needs_processes, run_in_two


class Model(nn.Module):
    """Each kind of random features, and weights in front of them."""

    def __init__(self, interval: int | None):
        super().__init__()
        relu = FastAttention(8, 12, ortho_scaling=1, generalized_attention=True)
        self.net = nn.ModuleList([FastAttention(8, 12), relu, FastAttention(8, no_projection=True)])
        self.linear = nn.Linear(8, 8)
        self.updater = ProjectionUpdater(self.net, interval)

    def forward(self, x: Tensor) -> Tensor:
        self.updater.redraw_projections()
        x = self.linear(x)
        for attention in self.net:
            x = x + attention(x, x, x)
        return x


def inputs() -> Tensor:
    return torch.randn(2, 1, 5, 8)


def matrices(model: Model) -> list[Tensor]:
    return [part.projection_matrix.clone() for part in model.net if part.projection_matrix is not None]


def changes(model: Model, steps: int) -> list[int]:
    """The steps, counted from 1, whose forward has other matrices than the one before; all change together."""
    changed, before = [], matrices(model)
    for step in range(1, steps + 1):
        model(inputs()).sum().backward()
        after = matrices(model)
        differ = {not torch.equal(a, b) for a, b in zip(before, after, strict=True)}
        assert len(differ) == 1
        if differ.pop():
            changed.append(step)
        before = after
    return changed


@pytest.mark.parametrize(
    ("interval", "expected"), [(1, [2, 3, 4, 5, 6, 7, 8, 9]), (2, [3, 5, 7, 9]), (4, [5, 9]), (9, []), (None, [])]
)
def test_each_drawing_serves_so_many_training_steps(interval, expected):
    """Theirs serve one more: with an interval of 1 the changes are at 2, 4, 6, …"""
    assert changes(Model(interval), 9) == expected


def test_new_rows_are_of_their_kind():
    model = Model(1)
    changes(model, 2)
    gaussian, equal = matrices(model)
    for rows in (gaussian, equal):
        units = rows[:8] / rows[:8].norm(dim=-1, keepdim=True)
        assert_close(units @ units.mT, torch.eye(8), rtol=0, atol=1e-5)
    assert_close(equal.norm(dim=-1), torch.full((12,), 8**0.5))
    assert gaussian.norm(dim=-1).std() > 0.1


def test_evaluation_neither_counts_nor_draws():
    model = Model(2)
    model.eval()
    state = copy.deepcopy(model.state_dict())
    for _ in range(5):
        model(inputs())
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    model.train()
    # a standalone updater asks the model, not only itself
    model.net.eval()
    model(inputs())
    assert model.updater.calls_since_last_redraw == 0


def test_drawing_touches_no_other_randomness():
    model, x = Model(1), inputs()
    state = torch.get_rng_state()
    model(x), model(x)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("reentrant", [False, True])
def test_p7_a_recomputation_neither_counts_nor_draws(reentrant):
    plain = Model(1)
    recomputed = copy.deepcopy(plain)
    for step in range(4):
        x = inputs().requires_grad_()
        plain.zero_grad(), recomputed.zero_grad()
        expected = plain(x).sin().sum()
        actual = checkpoint(recomputed, x, use_reentrant=reentrant).sin().sum()
        assert_close(actual, expected)
        (expected_x,) = torch.autograd.grad(expected, x, retain_graph=True)
        expected.backward(), x.grad.zero_()
        actual.backward()
        assert_close(x.grad, expected_x)
        assert_close(recomputed.linear.weight.grad, plain.linear.weight.grad)
        assert all(torch.equal(a, b) for a, b in zip(matrices(plain), matrices(recomputed), strict=True))
        assert plain.updater.calls_since_last_redraw == recomputed.updater.calls_since_last_redraw == 1, step


def test_a_loaded_model_goes_on_as_the_saved_one_would():
    model, other = Model(3), Model(3)
    changes(model, 5)
    other.load_state_dict(model.state_dict())
    assert changes(other, 6) == changes(model, 6) == [2, 5]
    assert all(torch.equal(a, b) for a, b in zip(matrices(model), matrices(other), strict=True))


def test_fixing_is_saved():
    model, other = Model(2), Model(2)
    changes(model, 3)
    model.updater.fix_projections_()
    other.load_state_dict(model.state_dict())
    before = matrices(other)
    assert changes(model, 5) == changes(other, 5) == []
    assert all(torch.equal(a, b) for a, b in zip(before, matrices(other), strict=True))


def test_p9_nothing_is_saved_twice():
    model = Model(3)
    tensors = list(model.state_dict(keep_vars=True).values())
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    assert [name for name in model.state_dict() if name.startswith("updater")] == [
        "updater.calls_since_last_redraw",
        "updater.seed",
        "updater.fixed",
    ]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_redraws_its_own(duplicate):
    model = Model(1)
    other = duplicate(model)
    before = matrices(model)
    assert other.updater.instance is other.net
    assert changes(other, 3) == [2, 3]
    assert all(torch.equal(a, b) for a, b in zip(before, matrices(model), strict=True))


def test_models_that_begin_alike_stay_alike():
    """Whatever else draws numbers."""
    model = Model(1)
    other = copy.deepcopy(model)
    for part in (model, other):
        torch.manual_seed(hash(part is model))
        changes(part, 5)
    assert all(torch.equal(a, b) for a, b in zip(matrices(model), matrices(other), strict=True))


def test_from_the_meta_device():
    with torch.device("meta"):
        model = Model(2)
    model.to_empty(device="cpu")
    for module in model.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    assert changes(model, 5) == [3, 5]


def test_an_interval_of_nothing_is_refused():
    with pytest.raises(ValueError, match="feature_redraw_interval must be a whole number of at least 1, but is 0"):
        ProjectionUpdater(nn.Identity(), 0)


def work(rank: int) -> None:
    for broadcast in (True, False):
        check_rank(rank, broadcast)


def check_rank(rank: int, broadcast: bool) -> None:
    # if nothing ever sends buffers, ranks must begin alike; if DDP does, it sends those of before the forward
    torch.manual_seed(rank if broadcast else 0)
    model = Model(2)
    parallel = DistributedDataParallel(model, broadcast_buffers=broadcast)
    # from here on, ranks draw different numbers
    torch.manual_seed(rank)
    seen = []
    for _ in range(5):
        parallel(inputs()).sum().backward()
        seen.append(torch.cat(matrices(model)))
    mine = torch.stack(seen)
    everyones = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(everyones, mine)
    assert torch.equal(*everyones)
    assert [not torch.equal(a, b) for a, b in itertools.pairwise(mine)] == [False, True, False, True]


@needs_processes
@pytest.mark.filterwarnings("ignore:.*broadcast_buffers:FutureWarning")
def test_p8_ranks_have_the_same_matrices():
    run_in_two(work)
