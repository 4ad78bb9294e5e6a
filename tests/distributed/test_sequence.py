"""Several processes with a part of each sequence are one process with the whole sequence."""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from linattn import causal_linear_attention
from linattn.attention import named_attention
from linattn.distributed import last_state, sequence_loss, shard_sequence, split_sequence, tensor_parallel
from linattn.distributed.sequence import ENGINES
from linattn.distributed.transport import Line
from linattn.models import LanguageModel, next_token_loss
from linattn.models.loss import NO_LABEL
from linattn.nn import GatedConvolution, MultiheadAttention, TokenShift
from linattn.ops.nested import map_state
from tests.models.causal import KINDS, MODELS, VOCABULARY, small_model, some_tokens
from tests.models.stacks import model as sequence_model
from tests.models.test_sequence_model import KINDS as SEQUENCE_KINDS
from tests.processes import needs_processes, run_in_group

pytestmark = needs_processes
every_engine = pytest.mark.parametrize("engine", ENGINES)
# weights of these models are wide, and features of either sign are among them: rounding alone changes 2e-13
CLOSE = 1e-12

# what each rank holds of 23 tokens: odd parts, one token alone
CUTS = {2: [13, 10], 4: [9, 1, 3, 10]}


def part_of(x: Tensor, rank: int, size: int) -> Tensor:
    return x.split(CUTS[size], 1)[rank]


def error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def masks(b: int, n: int, size: int) -> dict[str, Tensor | None]:
    holes = torch.rand(b, n) < 0.7
    gap = torch.ones(b, n, dtype=torch.bool)
    # nothing is present on one rank, in one row
    gap[0, CUTS[size][0] :][: CUTS[size][1]] = False
    return {"none": None, "holes": holes, "gap": gap}


def whole_equals_parts(rank: int, size: int, name: str, options: dict[str, Any], mask: str, engine: str) -> None:
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    model, tokens = small_model(options).train(), some_tokens(2, 23)
    key_mask = masks(2, 23, size)[mask]
    labels = torch.randint(VOCABULARY, (2, 23))
    if key_mask is not None:
        labels = labels.masked_fill(~key_mask, NO_LABEL)
    logits, state = model.extend(tokens, key_mask=key_mask)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    sharding = shard_sequence(model, group, engine=engine)
    own_mask = None if key_mask is None else part_of(key_mask, rank, size)
    own = model(part_of(tokens, rank, size), key_mask=own_mask)
    own_loss = sequence_loss(own, part_of(labels, rank, size), group=group)
    grads = torch.autograd.grad(own_loss, list(model.parameters()), materialize_grads=True)
    where = slice(None) if own_mask is None else own_mask
    assert error(own[where], part_of(logits, rank, size)[where]) <= CLOSE or own[where].numel() == 0, name
    assert abs(own_loss - loss) <= CLOSE * abs(loss), name
    for grad, wanted, (parameter, _) in zip(grads, expected, model.named_parameters(), strict=True):
        dist.all_reduce(grad)
        assert error(grad / size, wanted) <= CLOSE or wanted.norm() < 1e-9, f"{name}: {parameter}"
    with torch.no_grad():
        found = last_state(model.extend(part_of(tokens, rank, size), key_mask=own_mask)[1], group=group)
        tensors: list[Tensor] = []
        map_state(tensors.append, state)
        map_state(lambda x: compare(x, tensors.pop(0), name), found)
        # the next tokens: sharded again from that state, then by one process alone
        more, _ = model.extend(part_of(tokens, rank, size), found)
        sharding.undo()
        whole, _ = model.extend(tokens, state)
        assert error(more, part_of(whole, rank, size)) <= CLOSE, name
        assert error(model.extend(tokens[:, :3], found)[0], model.extend(tokens[:, :3], state)[0]) <= CLOSE


def compare(found: Tensor, expected: Tensor, name: str) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape, name
    finite = expected.isfinite() if expected.is_floating_point() else torch.ones_like(expected, dtype=torch.bool)
    assert torch.equal(found[~finite], expected[~finite]), name
    assert error(found[finite].double(), expected[finite].double()) <= CLOSE, name


def every_model(rank: int, size: int, engine: str) -> None:
    """For the scan, whose maps depend on the layer; the wave hands on states, of which each kind is enough."""
    for name, options in (MODELS if engine == "scan" else KINDS).items():
        whole_equals_parts(rank, size, name, options, "none", engine)


@every_engine
def test_two_parts_equal_the_whole(engine: str):
    run_in_group(2, every_model, 2, engine)


def every_kind(rank: int, size: int, engine: str) -> None:
    """For the scan; of the wave, whose chain of four does not depend on the layer, every third is enough."""
    for number, (name, options) in enumerate([*KINDS.items()][:: 1 if engine == "scan" else 3]):
        whole_equals_parts(rank, size, name, options, ("holes", "gap")[number % 2], engine)


@every_engine
def test_four_parts_with_masks_equal_the_whole(engine: str):
    run_in_group(4, every_kind, 4, engine)


def empty_parts(rank: int, engine: str) -> None:
    for cut in ([0, 23], [23, 0]):
        with patch.dict(CUTS, {2: cut}):
            for name, options in KINDS.items():
                whole_equals_parts(rank, 2, name, options, "none", engine)


@every_engine
def test_a_rank_may_have_no_tokens(engine: str):
    run_in_group(2, empty_parts, engine)


def outputs_and_gradients(module: nn.Module, x: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, list[Tensor]]:
    y = module(x, **options)
    parameters = [*module.parameters(), *([x] if x.requires_grad else [])]
    return y.detach(), list(torch.autograd.grad((y * weight).sum(), parameters, materialize_grads=True))


def modules_equal(rank: int, engine: str, name: str, module: nn.Module, x: Tensor, **options: Any) -> None:
    """A module that is no language model, with x (b n d): outputs, and gradients of parameters and of x."""
    group = dist.group.WORLD
    assert group is not None
    with torch.no_grad():
        weight = torch.randn_like(module(x, **options))
    if "key_mask" in options:
        # what a masked token gives means nothing
        weight = weight * options["key_mask"].unsqueeze(-1)
    y, grads = outputs_and_gradients(module, x, weight, **options)
    sharding = shard_sequence(module, group, engine=engine)
    x = part_of(x.detach(), rank, 2).requires_grad_(x.requires_grad)
    own = {key: part_of(value, rank, 2) if key in ("key_mask", "starts") else value for key, value in options.items()}
    own_y, own_grads = outputs_and_gradients(module, x, part_of(weight, rank, 2), **own)
    seen = part_of(weight, rank, 2) != 0
    assert error(own_y[seen], part_of(y, rank, 2)[seen]) <= CLOSE, name
    for grad, wanted in zip(own_grads[: len(list(module.parameters()))], grads, strict=False):
        dist.all_reduce(grad)
        assert error(grad, wanted) <= CLOSE or wanted.norm() < 1e-9, name
    if x.requires_grad:
        assert error(own_grads[-1], part_of(grads[-1], rank, 2)) <= CLOSE, name
    sharding.undo()


def widths(rank: int, engine: str) -> None:
    """An attention takes heads of any width, one after another; dropout of what shows a state's sizes draws nothing."""
    attention = named_attention("elu", num_heads=2, head_dim=4, causal=True)
    shard_sequence(attention, dist.group.WORLD, engine=engine)
    for width in (4, 6):
        torch.manual_seed(width)
        q, k, v = torch.randn(3, 1, 2, 20, width, dtype=torch.float64).unbind()
        own = attention(*(x.chunk(2, 2)[rank] for x in (q, k, v)))
        expected, _ = causal_linear_attention(q, k, v, feature_map="elu_plus_one")
        assert error(own, expected.chunk(2, 2)[rank]) <= CLOSE
    layer = MultiheadAttention(8, 2, named_attention("elu", num_heads=2, head_dim=4, causal=True), dropout=0.5)
    shard_sequence(layer, dist.group.WORLD, engine=engine)
    x, seen = torch.randn(1, 4, 8), []
    for _ in range(2):
        torch.manual_seed(0)
        layer(x)
        seen.append(torch.rand(1).item())
    assert seen[0] == seen[1]


@every_engine
def test_what_a_layer_is_called_with_may_change(engine: str):
    run_in_group(2, widths, engine)


def labels(rank: int) -> None:
    group = dist.group.WORLD
    torch.manual_seed(0)
    model, tokens = small_model({"attention": "elu"}), some_tokens(3, 24)
    left, holes = torch.ones(3, 24, dtype=torch.bool), torch.rand(3, 24) < 0.6
    left[0, :7], left[1, :13] = False, False
    for key_mask in (None, left, holes, left.flip(1)):
        expected = next_token_loss(model(tokens, key_mask=key_mask), tokens, key_mask=key_mask)
        sharding = shard_sequence(model, group)
        part = split_sequence(tokens, group=group, key_mask=key_mask)
        found = sequence_loss(model(part.tokens, key_mask=part.key_mask), part.labels, group=group)
        assert abs(found - expected) <= CLOSE * expected
        sharding.undo()
    part = split_sequence(tokens.int(), group=group)
    logits = model(part.tokens)
    assert_close(
        sequence_loss(logits, part.labels, group=group), sequence_loss(logits, part.labels.long(), group=group)
    )
    with pytest.raises(ValueError, match=r"labels must be \(3, 12\), as the logits, but are \(12, 3\)"):
        sequence_loss(logits, part.labels.mT, group=group)
    for wrong in (logits[0], logits[0, 0, 0], logits.long()):
        with pytest.raises(ValueError, match=r"logits must be floating-point \(b, n, v\), but are torch"):
            sequence_loss(wrong, part.labels, group=group)
    with pytest.raises(ValueError, match=r"labels must be int64 or int32"):
        split_sequence(tokens, tokens.double(), group=group)


def test_the_loss_is_that_of_the_next_present_tokens():
    run_in_group(2, labels)


def other_modules(rank: int, engine: str) -> None:
    torch.manual_seed(0)
    for name, options in SEQUENCE_KINDS.items():
        modules_equal(rank, engine, name, sequence_model(**options), some_tokens(2, 23))
    context = {"context": torch.randn(2, 5, 16, dtype=torch.float64)}
    modules_equal(rank, engine, "cross attention", sequence_model(cross=True), some_tokens(2, 23), **context)
    x, starts = torch.randn(2, 23, 16, dtype=torch.float64, requires_grad=True), torch.rand(2, 23) < 0.2
    key_mask = (torch.rand(2, 23) < 0.8) | starts
    for name in ("ssd", "gated_delta", "kda", "gla"):
        inner = named_attention(name, num_heads=4, head_dim=4, causal=True)
        extra = {"convolution": 3, "convolution_on": "projections", "rotary": 10.0}
        layer = MultiheadAttention(16, 4, inner, **extra).double()
        modules_equal(rank, engine, name, layer, x, starts=starts)
        modules_equal(rank, engine, name, nn.Sequential(nn.LayerNorm(16), layer, layer).double(), x)
        modules_equal(rank, engine, name, layer, x, starts=starts, key_mask=key_mask)
    modules_equal(rank, engine, "convolution", GatedConvolution(16, 4).double(), x, key_mask=key_mask)
    modules_equal(rank, engine, "shift", TokenShift((3, 0)), x, key_mask=key_mask)
    # nothing before the first attention has a gradient, on any rank
    frozen = small_model({"attention": "gated_delta"})
    frozen.embedding.requires_grad_(False)
    frozen.blocks[0].requires_grad_(False)
    learned = [parameter for parameter in frozen.parameters() if parameter.requires_grad]
    expected = torch.autograd.grad(frozen(tokens := some_tokens(1, 23)).square().mean(), learned)
    shard_sequence(frozen, dist.group.WORLD, engine=engine)
    found = torch.autograd.grad(frozen(part_of(tokens, rank, 2)).square().sum() / 23 / VOCABULARY, learned)
    for grad, wanted in zip(found, expected, strict=True):
        dist.all_reduce(grad)
        assert error(grad, wanted) <= CLOSE


@every_engine
def test_other_modules(engine: str):
    run_in_group(2, other_modules, engine)


def wrapped(rank: int, engine: str) -> None:
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    options = {"attention": "local:2+gated_delta:2", "convolution": 3, "rotary": 10.0, "depth": 3}
    whole, tokens = small_model(options).train(), some_tokens(2, 24)
    part = split_sequence(tokens, group=group)
    expected = torch.autograd.grad(next_token_loss(whole(tokens), tokens), list(whole.parameters()))

    def check(name: str, model: nn.Module, call: Any = None) -> None:
        loss = sequence_loss((call or model)(part.tokens), part.labels, group=group)
        loss.backward()
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            grad = parameter.grad
            assert grad is not None, name
            grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
            if name in ("checkpoint", "compile"):
                dist.all_reduce(grad)
                grad = grad / 2
            assert error(grad, wanted) <= CLOSE, name

    def copy() -> LanguageModel:
        model = LanguageModel(whole.config).double()
        model.load_state_dict(whole.state_dict())
        shard_sequence(model, group, engine=engine)
        return model

    check("ddp", DistributedDataParallel(copy()))
    sharded = copy()
    for block in sharded.blocks:
        fully_shard(block)
    check("fsdp", fully_shard(sharded))
    checkpointed = copy()
    for block in checkpointed.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    check("checkpoint", checkpointed)
    if engine == "wave":
        # the compiler breaks the graph at the same places for both
        compiled = copy()
        for block in compiled.blocks:
            block.compile(backend="eager")
        check("compile", compiled)


@every_engine
def test_wrapped_models(engine: str):
    run_in_group(2, wrapped, engine)


def errors(rank: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"blocks.0.mixer, a MultiheadAttention, is not causal"):
        shard_sequence(small_model({"attention": "elu", "causal": False}), group)
    for bad, why in [
        (nn.Linear(2, 2), "no causal layer of linattn"),
        (nn.Sequential(GatedConvolution(4, 2), nn.Conv1d(4, 4, 3)), "1, a Conv1d, sees more than one token"),
        (nn.Sequential(GatedConvolution(4, 2), TokenShift((1, -1))), "1, a TokenShift, looks ahead"),
        (small_model().float() if rank else small_model(), r"rank 0 has LanguageModel .*float64.*rank 1 .*float32"),
        (small_model() if rank else nn.Linear(2, 2), "no causal layer"),
    ]:
        with pytest.raises(ValueError, match=why):
            shard_sequence(bad, group)
    # torch counts milliseconds, and waits without a limit for none of them
    for timeout in ("1", -1.0, 0, 1e-5):
        with pytest.raises(ValueError, match=f"timeout must be .*, but is {timeout!r}"):
            shard_sequence(small_model(), group, timeout=timeout)
    torch.manual_seed(0)
    model, tokens = small_model(), some_tokens(2, 8)
    sharding = shard_sequence(model, group, timeout=1.0)
    for call in (
        lambda: model(tokens, key_mask=torch.ones(2, 8, dtype=torch.bool) if rank else None),
        lambda: model(tokens[:1] if rank else tokens),
        lambda: model.eval()(tokens) if rank else model.train()(tokens),
    ):
        with pytest.raises(ValueError, match=r"all ranks must do the same, but rank 0 has .*, and rank 1"):
            call()
    others, other_mesh = dist.new_group([0]), DeviceMesh("cpu", [0])
    if rank == 1:
        for call in (
            lambda: split_sequence(tokens, group=other_mesh),
            lambda: tensor_parallel(small_model(), other_mesh),
            lambda: split_sequence(tokens, group=others),
            lambda: sequence_loss(torch.randn(2, 8, 7), tokens, group=others),
            lambda: last_state(tokens, group=others),
            lambda: shard_sequence(small_model(), others),
        ):
            with pytest.raises(ValueError, match=r"rank 1 is not in the (group|mesh), whose ranks alone may call this"):
                call()
    with pytest.raises(ValueError, match="number of ranks, 2, must divide that of tokens, but there are 7"):
        split_sequence(tokens[:, :7], group=group)
    present = torch.ones(2, 8, dtype=torch.bool)
    for wrong, mask, why in (
        (tokens[0], None, r"tokens must be int64 or int32 \(b, n\), but are torch.int64 \(8,\)"),
        (tokens.double(), None, r"tokens must be int64 or int32 \(b, n\), but are torch.float64 \(2, 8\)"),
        (tokens, present.long(), "key_mask must be boolean, .* but is torch.int64"),
        (tokens, present[:, :6], r"key_mask must be \(2, 8\), as tokens, but is \(2, 6\)"),
        (tokens, present[:1], r"key_mask must be \(2, 8\), as tokens, but is \(1, 8\)"),
    ):
        with pytest.raises(ValueError, match=why):
            split_sequence(wrong, group=group, key_mask=mask)
    with pytest.raises(
        ValueError, match=r"blocks.0.mixer.inner is sharded already: call undo\(\) of what that returned"
    ):
        shard_sequence(model, group)
    inner, x = named_attention("elu", num_heads=4, head_dim=4, causal=True), torch.randn(2, 4, 16)
    rotary = MultiheadAttention(16, 4, inner, rotary=10.0)
    shard_sequence(rotary, group)
    for arguments, options in (((x, x), {}), ((x,), {"context": x})):
        with pytest.raises(ValueError, match="cross attention has no order of queries and keys"):
            rotary(*arguments, **options)
    assert sharding.layers == ["blocks.0.mixer.inner", "blocks.1.mixer.inner"]
    assert "2 layers" in str(sharding)
    before = model.eval()(tokens)
    sharding.undo()
    assert not {"forward", "extend", "packs"} & {name for part in model.modules() for name in vars(part)}
    assert error(before, model(torch.cat([tokens, tokens], 1)).chunk(2, 1)[rank]) <= CLOSE


def test_errors_are_raised_on_every_rank():
    run_in_group(2, errors)


def bytes_of(rank: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    for name, engine, limit in (
        ("elu", "wave", 140_000),
        ("elu", "scan", 140_000),
        ("ssd", "scan", 140_000),
        ("gated_delta", "wave", 140_000),
        ("gated_delta", "scan", 270_000),
    ):
        inner = named_attention(name, num_heads=8, head_dim=64, causal=True)
        layer = MultiheadAttention(512, 8, inner)
        sharding, counts, messages = shard_sequence(layer, group, engine=engine), [], []
        for n in (16, 48):
            before = sharding.line.bytes_sent
            with patch("torch.distributed.isend", wraps=dist.isend) as send:
                layer(torch.randn(1, n, 512)).sum().backward()
            counts.append(sharding.line.bytes_sent - before)
            messages.append(send.call_count)
        assert counts[0] == counts[1] <= (2 if engine == "scan" else 1) * limit, (name, engine, counts)
        assert counts[0] >= 8 * 64 * 64 * 4
        # of a state whose length the next rank knows, and of its gradient
        assert messages[1] == (engine == "wave")
        sharding.undo()


def test_bytes_do_not_depend_on_the_length():
    run_in_group(2, bytes_of)


def states_in_turn(rank: int) -> None:
    """Under one name, longer and shorter than the first message, and than the last state."""
    assert dist.group.WORLD is not None
    line = Line(dist.group.WORLD)
    for n in (1, 3_000, 3_000, 2, 0, 500, 3_000):
        state = (torch.arange(n), None, (torch.full((2, n), 0.5, dtype=torch.float64), n))
        if rank == 0:
            line.send_state(state, 1, "a layer")
        else:
            numbers, nothing, (halves, count) = line.receive_state(0, "a layer")
            assert torch.equal(numbers, state[0]) and nothing is None
            assert torch.equal(halves, state[2][0]) and halves.dtype == torch.float64 and count == n
    line.finish()


def test_states_of_one_name_may_have_any_lengths():
    run_in_group(2, states_in_turn)


def lower_precision(rank: int, engine: str) -> None:
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    options = {"attention": "local:1+gated_delta:2+elu:1", "convolution": 3, "rotary": 10.0}
    exact, tokens = small_model(options), some_tokens(2, 24)
    expected = exact(tokens)
    part = tokens.chunk(2, 1)[rank]
    for dtype in (torch.float32, torch.bfloat16):
        model = small_model(options).to(dtype)
        model.load_state_dict(exact.state_dict())
        one = error(model(tokens).double(), expected)
        sharding = shard_sequence(model, group, engine=engine)
        # as far from the exact outputs as one process is
        assert error(model(part).double(), expected.chunk(2, 1)[rank]) <= 2 * one + 1e-6
        sharding.undo()
    model = small_model(options).float()
    model.load_state_dict(exact.state_dict())
    shard_sequence(model, group, engine=engine)
    with torch.autocast("cpu", torch.bfloat16):
        loss = sequence_loss(model(part), part, group=group)
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


@every_engine
def test_lower_precision(engine: str):
    run_in_group(2, lower_precision, engine)


def mesh(rank: int) -> None:
    torch.manual_seed(0)
    options = {"attention": "local:2+kda:2", "convolution": 3, "rotary": 10.0}
    whole, tokens = small_model(options).train(), some_tokens(4, 24)
    expected = torch.autograd.grad(next_token_loss(whole(tokens), tokens), list(whole.parameters()))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    rows = tokens.chunk(2)[rank // 2]
    for over, engine in (("data", "wave"), ("data and sequence", "scan")):
        model = LanguageModel(whole.config).double()
        model.load_state_dict(whole.state_dict())
        shards = both["data"] if over == "data" else both._flatten("all")
        for block in model.blocks:
            fully_shard(block, mesh=shards)
        fully_shard(model, mesh=shards)
        sharding = shard_sequence(model, both["sequence"])
        assert sharding.engine == engine
        part = split_sequence(rows, group=both["sequence"])
        loss = sequence_loss(model(part.tokens), part.labels, group=both["sequence"])
        loss.backward()
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            grad = parameter.grad.full_tensor()
            if over == "data":
                dist.all_reduce(grad, group=both.get_group("sequence"))
                grad = grad / 2
            assert error(grad, wanted) <= CLOSE, over

    heads = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "heads"))
    for engine in ENGINES:
        model = LanguageModel(whole.config).double()
        model.load_state_dict(whole.state_dict())
        tensor_parallel(model, heads["heads"])
        shard_sequence(model, heads["sequence"], engine=engine)
        part = split_sequence(tokens, group=heads["sequence"])
        sequence_loss(model(part.tokens), part.labels, group=heads["sequence"]).backward()
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            grad = parameter.grad.full_tensor()
            dist.all_reduce(grad, group=heads.get_group("sequence"))
            assert error(grad / 2, wanted) <= 1e-13, engine


def test_meshes_of_data_or_heads_and_sequence():
    run_in_group(4, mesh)


def late(rank: int) -> None:
    group = dist.new_group([0, 1])
    torch.manual_seed(0)
    model, tokens = small_model({"attention": "elu"}), some_tokens(1, 8)
    shard_sequence(model, group, timeout=0.3)
    loss = model(tokens).sum()
    if rank == 0:
        wanted = "rank 0 waited 0.3 s for the gradient of the state of blocks.1.mixer.inner from rank 1"
        with pytest.raises(RuntimeError, match=wanted):
            loss.backward()


def test_a_rank_does_not_wait_for_ever():
    run_in_group(2, late)
