import pytest
import torch
from torch import nn
from torch.testing import assert_close

from linattn.attention import LearnedProjection, LinformerAttention, MeanPooling, StridedConvolution
from linattn.attention.linformer import pool_sequence
from tests.attention.definitions import define

KINDS = {
    "learned": lambda: LearnedProjection(50, 12),
    "learned for each head": lambda: LearnedProjection(50, 12, num_key_heads=2),
    "mean": lambda: MeanPooling(50, 12),
    "convolution": lambda: StridedConvolution(50, 12, 6),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def some_heads(n: int, m: int) -> list[torch.Tensor]:
    return [torch.randn(2, h, x, 6, dtype=torch.float64) for h, x in ((4, n), (2, m), (2, m))]


@every_kind
@pytest.mark.parametrize("m", [1, 4, 5, 49, 50])
def test_any_length_up_to_the_longest(kind, m):
    inner = LinformerAttention(KINDS[kind](), KINDS[kind]()).double()
    x = some_heads(7, m)
    assert_close(inner(*x), define(inner, *x))


@every_kind
def test_longer_is_an_error_that_says_both_lengths(kind):
    inner = LinformerAttention(KINDS[kind]()).double()
    with pytest.raises(ValueError, match="at most 50 keys, but there are 51"):
        inner(*some_heads(3, 51))


@every_kind
@pytest.mark.parametrize("values", KINDS)
def test_masks_with_any_two_kinds(kind, values):
    inner = LinformerAttention(KINDS[kind](), KINDS[values]()).double()
    if (kind.startswith("learned")) != (values.startswith("learned")):
        # the learned ones have twelve rows at any length, the others as many as there are windows: ten
        with pytest.raises(ValueError, match="the two must agree"):
            inner(*some_heads(5, 40))
        return
    q, k, v = some_heads(40, 40)
    key_mask = torch.rand(2, 1, 40) < 0.5
    y = inner(q, k, v, key_mask=key_mask)
    for row, kept in enumerate(key_mask[:, 0]):
        one = slice(row, row + 1)
        assert_close(y[one], inner(q[one], k[one][:, :, kept], v[one][:, :, kept]))


def test_gradients_of_the_weights():
    for make in (KINDS["learned for each head"], KINDS["convolution"]):
        inner, x, key_mask = LinformerAttention(make()).double(), some_heads(2, 9), torch.rand(2, 1, 9) < 0.6
        weight = inner.key_projection.weight

        def outputs(w, inner=inner, x=x, key_mask=key_mask):
            return torch.func.functional_call(inner, {"key_projection.weight": w}, tuple(x), {"key_mask": key_mask})

        assert torch.autograd.gradcheck(outputs, weight.detach().requires_grad_(), fast_mode=True)


def test_sharing_is_passing_the_same_object():
    one, two = LearnedProjection(50, 12), LearnedProjection(50, 12)

    def weights(*inners):
        return sum(p.numel() for p in nn.ModuleList(inners).parameters())

    assert weights(LinformerAttention(one, two)) == 2 * 600
    assert weights(LinformerAttention(one)) == weights(LinformerAttention(one, one)) == 600
    assert weights(LinformerAttention(one), LinformerAttention(one)) == 600


def test_weights_are_filled_after_construction_on_the_meta_device():
    with torch.device("meta"):
        projections = nn.ModuleList([LearnedProjection(40, 10), StridedConvolution(40, 10, 4)])
    for projection in projections.to_empty(device="cpu"):
        projection.reset_parameters()
    assert_close(projections[0].weight.std(), torch.tensor(10**-0.5), rtol=0.2, atol=0)
    assert_close(projections[1].weight, torch.full((4, 4), 0.25))


def test_errors():
    with pytest.raises(ValueError, match="they are 60 and 50"):
        MeanPooling(50, 60)
    q, k, v = some_heads(3, 5)
    with pytest.raises(ValueError, match="made for 3 key heads, but there are 2"):
        LinformerAttention(LearnedProjection(50, 12, num_key_heads=3)).double()(q, k, v)
    with pytest.raises(ValueError, match="made for 4 channels"):
        LinformerAttention(StridedConvolution(50, 12, 4)).double()(q, k, v)


def test_a_package_slices_its_projection_and_so_do_we():
    """Which is the projection of the sequence filled up with zeros."""
    x, projection = torch.randn(2, 3, 20, 4), LearnedProjection(32, 5)
    padded = torch.cat([x, torch.zeros(2, 3, 12, 4)], -2)
    assert_close(projection(x)[0], projection.weight @ padded)


def test_means_of_what_is_there():
    x = torch.arange(8.0).view(1, 1, 8, 1)
    key_mask = torch.tensor([False, True, True, True, False, False, True, False])[None, None]
    pooled, present = pool_sequence(x, 3, key_mask=key_mask)
    assert_close(pooled.flatten(), torch.tensor([2.0, 6, 0]))
    assert present is not None and present.flatten().tolist() == [True, True, False]
    pooled, present = pool_sequence(x, 3)
    assert_close(pooled.flatten(), torch.tensor([1.0, 4, 6.5]))
    assert present is None


def test_half_precision_sums_do_not_saturate():
    x = torch.ones(1, 1, 100_000, 1, dtype=torch.float16)
    assert pool_sequence(x, 100_000)[0].item() == 1
    assert pool_sequence(x, 100_000, weight=torch.full((100_000, 1), 1e-5))[0].item() == 1
