"""The window through FlexAttention. Uncompiled it runs on a CPU, where it has no gradients; compiled, on a GPU."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from linattn.ops.softmax.flex import flex_window, unsupported
from linattn.ops.softmax.local import local_attention
from linattn.ops.softmax.window import Window

WINDOWS = [Window(*options) for options in itertools.product((1, 7, 128, 300), (False, True), (False, True))]


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()


@pytest.mark.parametrize(("window", "masked"), [*((window, True) for window in WINDOWS), (WINDOWS[4], False)], ids=str)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_it_is_local_attention(window, masked):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 300, width) for heads, width in ((4, 16), (2, 16), (2, 24)))
    real = torch.arange(300) < torch.tensor([[[300], [170]], [[1], [299]]]) if masked else None
    y = flex_window(q, k, v, window=window, present=real)
    expected = local_attention(q.double(), k.double(), v.double(), window=window, key_mask=real)
    if real is not None:
        y = torch.where(real.repeat_interleave(2, 1).unsqueeze(-1), y, 0)
        expected = torch.where(real.repeat_interleave(2, 1).unsqueeze(-1), expected, 0)
    assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_on_a_gpu_it_runs_by_itself_and_has_gradients(window, masked):
    torch.manual_seed(0)
    real = torch.arange(300) < torch.tensor([[[300]], [[170]]]) if masked else None
    inputs = [torch.randn(2, heads, 300, 32, dtype=torch.float64) for heads in (4, 2, 2, 4)]
    results = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        q, k, v, dy = (x.to(device, dtype).requires_grad_() for x in inputs)
        assert (unsupported(q, v) is None) == (device == "cuda")
        y = local_attention(q, k, v, window=window, key_mask=None if real is None else real.to(device))
        results.append([y, *torch.autograd.grad(y, (q, k, v), dy)])
    for exact, found in zip(*results, strict=True):
        assert_close(found.cpu().double(), exact, rtol=1e-3, atol=1e-4)
