import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from linattn.nn import GatedConvolution, ShortConvolution

widths = pytest.mark.parametrize("width", [1, 2, 4])
KINDS = [ShortConvolution, GatedConvolution]
every_kind = pytest.mark.parametrize("kind", KINDS)


def some_inputs(n: int, b: int = 2) -> torch.Tensor:
    return torch.randn(b, n, 6, dtype=torch.float64)


@widths
@pytest.mark.parametrize("n", [1, 3, 65])
def test_is_torchs_depthwise_convolution_with_a_residual_or_without(width, n):
    module, x = ShortConvolution(6, width).double(), some_inputs(n)
    torch.nn.init.normal_(module.bias)
    kernel = module.weight.mT.unsqueeze(1)
    expected = F.conv1d(F.pad(x.mT, (width - 1, 0)), kernel, module.bias, groups=6).mT
    assert_close(module(x), x + expected)
    module.residual = False
    assert_close(module(x), expected)


@widths
def test_the_gated_one_multiplies_by_a_projection(width):
    module, x = GatedConvolution(6, width).double(), some_inputs(9)
    gate = 1 + F.linear(x, module.g_proj.weight, module.g_proj.bias)
    assert not module.convolution.residual
    assert_close(module(x), module.convolution(x) * gate)


@widths
@every_kind
@pytest.mark.parametrize("cuts", [(1,) * 7, (0, 2, 0, 9), (5, 1)])
def test_pieces_make_the_whole(kind, width, cuts):
    module, x = kind(6, width).double(), some_inputs(sum(cuts))
    state, pieces = None, []
    for piece in x.split(cuts, dim=1):
        y, state = module.extend(piece, state)
        pieces.append(y)
    assert_close(torch.cat(pieces, 1), module(x))


@widths
@every_kind
def test_a_masked_token_is_a_missing_token(kind, width):
    module, x = kind(6, width).double(), some_inputs(31, b=4)
    mask = torch.rand(4, 31) < 0.5
    x = x.masked_fill(~mask.unsqueeze(-1), float("nan")) if kind is ShortConvolution else x
    whole, state = module.extend(x, key_mask=mask)
    first, between = module.extend(x[:, :8], key_mask=mask[:, :8])
    second, end = module.extend(x[:, 8:], between, key_mask=mask[:, 8:])
    for row in range(4):
        alone, alone_state = module.extend(x[row, mask[row]].unsqueeze(0))
        assert_close(whole[row, mask[row]], alone[0])
        assert_close(torch.cat([first, second], 1)[row, mask[row]], alone[0])
        assert_close(state[row], alone_state[0])
        assert_close(end[row], alone_state[0])


def test_the_state_does_not_keep_the_sequence():
    _, state = ShortConvolution(6, 4).extend(torch.randn(2, 1000, 6))
    assert state.untyped_storage().nbytes() == 2 * 3 * 6 * 4


@every_kind
def test_gradients_are_right(kind):
    module, x = kind(6, 3).double(), some_inputs(5).requires_grad_()
    mask = torch.tensor([[True, False, True, True, False], [False, True, True, True, True]])
    torch.autograd.gradcheck(lambda x, *weights: module(x, key_mask=mask)[mask], (x, *module.parameters()))


def test_a_convolution_has_a_width():
    with pytest.raises(ValueError, match="width must be a whole number of at least 1, but is 0"):
        ShortConvolution(6, 0)


def test_neighbours_begin_with_weights_up_to_one():
    for convolution in (ShortConvolution(500, 4), GatedConvolution(500, 4).convolution):
        assert 0.95 < convolution.weight.abs().max() <= 1 and convolution.bias.count_nonzero() == 0
