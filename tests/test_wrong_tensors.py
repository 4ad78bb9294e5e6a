"""What is no tensor, or a tensor on another device: every operator and attention answers with a ValueError."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linattn
from linattn import ChannelLinearAttention, Features, ImageLinearAttention, PositionLinearAttention, ops
from tests.attention.cases import CAUSAL, GLOBAL, heads, make, over

pytestmark = pytest.mark.usefixtures("unchecked")

WRONG = {"number": 0.5, "list": [1.0], "array": torch.rand(2, 5).numpy()}


def arguments() -> dict[str, Any]:
    """Return what operators take, by name."""
    q, k, v = torch.rand(3, 1, 2, 5, 4).unbind()
    features = {"queries": Features(q, q[..., 0], "exp"), "keys": Features(k, k[..., 0], "exp")}
    mask = torch.ones(5, dtype=torch.bool)
    return {"q": q, "k": k, "v": v, "beta": k[..., 0], "log_decay": -k[..., 0], "key_mask": mask, **features}


def states() -> dict[str, Any]:
    given = arguments()
    of_features = ops.summarize_features(given["keys"], given["v"])
    sums = ops.summarize(given["k"], given["v"])
    return {"causal_delta_attention": sums.S, "causal_feature_attention": of_features, "read_features": of_features}


def calls() -> Iterator[Any]:
    """Yield (function, positional arguments by name, options by name) for each operator."""
    for name in ops.__all__:
        function = getattr(ops, name)
        if inspect.isfunction(function) and name not in ("explain_backend", "packed_log_decay"):
            parameters = inspect.signature(function).parameters
            given = arguments() | {"state": states().get(name, ops.summarize(arguments()["k"], arguments()["v"]))}
            own = {key: value for key, value in given.items() if key in parameters}
            yield pytest.param(function, own, id=name)
    q = arguments()
    yield pytest.param(linattn.attend, {key: q[key] for key in ("q", "k", "v", "key_mask")}, id="attend")


def call(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    parameters = inspect.signature(function).parameters
    positional = [given[name] for name, each in parameters.items() if each.kind is each.POSITIONAL_ONLY]
    named = {name: x for name, x in given.items() if parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY}
    return function(*positional, **named)


def parts(value: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield each tensor in a value, by its name ("" for the value itself), and the function that replaces it."""
    if isinstance(value, Tensor):
        yield "", lambda new: new
        return
    for field, part in value._asdict().items() if hasattr(value, "_asdict") else ():
        for name, replace in parts(part):
            yield name or field, lambda new, field=field, replace=replace: value._replace(**{field: replace(new)})


def tensor_in(value: Any, part: str) -> Tensor:
    found = value
    while not isinstance(found, Tensor):
        found = getattr(found, part) if hasattr(found, part) else found[0]
    return found


@pytest.mark.parametrize(("function", "given"), list(calls()))
def test_what_is_no_tensor_is_named(function: Callable[..., Any], given: dict[str, Any]) -> None:
    call(function, given)
    for name, value in given.items():
        for part, replace in parts(value):
            for wrong in WRONG.values():
                with pytest.raises(ValueError, match=rf"\b{part or name}\b.*tensor"):
                    call(function, given | {name: replace(wrong)})
                    pytest.fail(f"{name} {part} takes {wrong!r}")
        if isinstance(value, tuple) or name in ("q", "k", "v", "beta"):
            with pytest.raises(ValueError, match=rf"\b{name}\b"):
                call(function, given | {name: 0.5 if name != "state" else "elu"})


@pytest.mark.parametrize(("function", "given"), list(calls()))
def test_tensors_of_two_devices_are_refused(function: Callable[..., Any], given: dict[str, Any]) -> None:
    for name, value in given.items():
        for part, replace in parts(value):
            with pytest.raises(ValueError, match=r"one device.*cpu.*meta|one device.*meta.*cpu"):
                call(function, given | {name: replace(tensor_in(value, part).to("meta"))})
                pytest.fail(f"{name} {part} may be on another device")


@over(CAUSAL + GLOBAL)
def test_attentions_take_tensors_of_one_device(spec: str, causal: bool) -> None:
    attention, (q, k, v) = make(spec, causal), heads(5)
    given = {"q": q, "k": k, "v": v, "key_mask": torch.ones(2, 1, 5, dtype=torch.bool)}
    functions: list[Callable[..., Any]] = [attention, attention.extend] if causal else [attention]
    for function in functions:
        for name, x in given.items():
            with pytest.raises(ValueError, match=r"one device.*cpu.*meta|one device.*meta.*cpu"):
                function(**given | {name: x.to("meta")})
            for wrong in WRONG.values():
                with pytest.raises(ValueError, match=rf"\b{name}\b.*tensor"):
                    function(**given | {name: wrong})
        if causal:
            past = attention.extend(q, k, v)[1]
            elsewhere = linattn.map_state(lambda x: x.to("meta"), past)
            with pytest.raises(ValueError, match=r"one device.*cpu.*meta|one device.*meta.*cpu"):
                attention.extend(q, k, v, elsewhere)


@over(CAUSAL + GLOBAL)
def test_attentions_take_floating_point_numbers(spec: str, causal: bool) -> None:
    attention, (q, k, v) = make(spec, causal), heads(5)
    functions = [attention, attention.extend if causal else lambda q, k, v: attention.summarize(k, v)]
    for function in functions:
        for wrong in ((q, k, v.long()), (q, k.long(), v), (q.long(), k.long(), v.long())):
            with pytest.raises(ValueError, match=r"must be floating-point, but is torch\.int64"):
                function(*wrong)


@over(GLOBAL)
def test_summaries_are_read_by_queries_of_split_heads(spec: str, causal: bool) -> None:
    attention, (q, k, v) = make(spec, causal), heads(5)
    summary = attention.summarize(k, v)
    assert attention.read(q, summary).shape == q.shape[:-1] + v.shape[-1:]
    wrong: Any
    for wrong in (q[0], q[:, :3], q.long(), q.numpy(), None):
        with pytest.raises(ValueError, match=r"\bq\b|heads"):
            attention.read(wrong, summary)
            pytest.fail(f"{type(wrong)} is read")


@pytest.mark.parametrize(("function", "given"), list(calls()))
def test_operators_never_round_to_whole_numbers(function: Callable[..., Any], given: dict[str, Any]) -> None:
    for name in ("q", "k", "v"):
        if name in given:
            with contextlib.suppress(ValueError):
                outputs = call(function, given | {name: (4 * given[name]).long()})
                y = outputs if isinstance(outputs, Tensor) else outputs[0]
                assert isinstance(y, tuple) or y.is_floating_point(), f"{name} of whole numbers gives {y}"


def image_module(module: nn.Module) -> bool:
    return isinstance(module, (ImageLinearAttention, PositionLinearAttention, ChannelLinearAttention))


def modules() -> dict[str, nn.Module]:
    """Return a module of every public class of nn that takes floats, by its name."""
    inner = linattn.named_attention("elu", num_heads=4, head_dim=4, causal=True)
    attention = linattn.MultiheadAttention(16, 4, inner)
    branch = linattn.Branch(attention)
    return {
        "Branch": branch,
        "ChannelLinearAttention": ChannelLinearAttention(),
        "Chunked": linattn.Chunked(linattn.FeedForward(16, 8), 2),
        "FeedForward": linattn.FeedForward(16, 8),
        "GatedConvolution": linattn.GatedConvolution(16, 3),
        "GatedFeedForward": linattn.GatedFeedForward(16, 8),
        "HeadNorm": linattn.HeadNorm(16),
        "ImageLinearAttention": ImageLinearAttention(16),
        "LinearMultiheadAttention": linattn.LinearMultiheadAttention(16, 4, seq_len=9),
        "MultiheadAttention": attention,
        "PositionLinearAttention": PositionLinearAttention(16),
        "Projected": linattn.Projected(linattn.ResidualSequence([branch]), 16, 16),
        "ResidualSequence": linattn.ResidualSequence([branch]),
        "ReversibleSequence": linattn.ReversibleSequence([(branch, linattn.Branch(linattn.FeedForward(16, 8)))]),
        "ScaleNorm": linattn.ScaleNorm(16),
        "ShortConvolution": linattn.ShortConvolution(16, 3),
        "TokenShift": linattn.TokenShift((1, 0)),
        "TorchMultiheadAttention": linattn.TorchMultiheadAttention(16, 4, inner="elu", batch_first=True),
    }


STATES = {"AttentionState", "BranchState"}
TAKE_POSITIONS = {"AxialPositions", "LearnedPositions", "SinusoidalPositions"}


@pytest.mark.parametrize("name", sorted({x for x in linattn.nn.__all__ if x[0].isupper()} - TAKE_POSITIONS - STATES))
def test_modules_take_the_numbers_of_their_weights(name: str) -> None:
    module = modules()[name].eval()
    x = torch.rand(2, 16, 3, 3) if image_module(module) else torch.rand(2, 5, 16)
    run = (lambda x: module(x, x, x)) if isinstance(module, nn.MultiheadAttention) else module
    run(x)
    for wrong in (x.long(), x.bool(), x.numpy(), x.tolist()):
        for autocast in (False, True):
            with (
                torch.autocast("cpu", torch.bfloat16, enabled=autocast),
                pytest.raises(ValueError, match=r"tensor|float"),
            ):
                run(wrong)
                pytest.fail(f"{type(wrong)} is taken")
    for other in (x.double(), x.bfloat16(), x.to("meta")):
        # a module may compute in the dtype of x
        with contextlib.suppress(ValueError):
            run(other)
    with torch.autocast("cpu", torch.bfloat16):
        run(x.bfloat16())
