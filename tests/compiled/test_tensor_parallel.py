"""The blocks of a tensor-parallel model share one compiled graph."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from linattn.distributed import tensor_parallel
from tests.models.causal import small_model, some_tokens
from tests.processes import needs_processes, run_in_two


def compile_and_compare(rank: int) -> None:
    torch.manual_seed(0)
    model = small_model({"attention": "elu", "depth": 2, "feed_forward": "none", "gated_norm": True})
    reference, tokens = copy.deepcopy(model), some_tokens(2, 9)
    tensor_parallel(model, init_device_mesh("cpu", (2,)))
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        model(tokens).square().sum().backward()
    reference(tokens).square().sum().backward()
    for x, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(x.grad.full_tensor(), wanted.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="it cannot trace that an attribute is removed")
@needs_processes
def test_all_blocks_are_one_graph():
    run_in_two(compile_and_compare)
