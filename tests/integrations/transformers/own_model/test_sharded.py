from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.testing import assert_close

from .models import make, prompts


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_sharded_model_trains_and_generates(one_process):
    model, sharded, tokens = make("local+elu"), make("local+elu"), prompts()
    sharded.load_state_dict(model.state_dict())
    for block in sharded.model.blocks:
        fully_shard(block)
        register_fsdp_forward_method(block, "extend")
    fully_shard(sharded)
    for each in (model, sharded):
        each.train()
        each(tokens, labels=tokens).loss.backward()
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    assert_close({name: weight.grad.full_tensor() for name, weight in sharded.named_parameters()}, expected)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert sharded.eval().generate(tokens, **options).tolist() == model.eval().generate(tokens, **options).tolist()
