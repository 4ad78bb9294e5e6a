"""Wrong shapes, masks and states: every module answers with a ValueError in the caller's own names and shapes."""

import contextlib
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import linattn
from linattn import generate, map_state, named_attention
from linattn.compat.fast_transformers.post_norm import PostNormSequence
from linattn.compat.linear_attention_transformer.blindspot import BlindspotAttention
from tests.attention.cases import CAUSAL, CHANNELS, GLOBAL, HEADS, KEY_HEADS, heads, make, over
from tests.models.causal import MODELS, small_model

pytestmark = pytest.mark.usefixtures("unchecked")

B, N, DIM = 2, 5, 16


def inner(spec: str = "local+elu", *, causal: bool = True) -> linattn.InnerAttention:
    return named_attention(spec, num_heads=4, head_dim=4, causal=causal, window=3, max_length=9)


def mixer(**options: Any) -> linattn.MultiheadAttention:
    return linattn.MultiheadAttention(DIM, 4, inner(), **options)


def branches() -> list[linattn.Branch]:
    return [linattn.Branch(mixer()), linattn.Branch(linattn.FeedForward(DIM, DIM), shift=linattn.TokenShift((1, 0)))]


def of_tokens(**options: Any) -> linattn.SequenceModel:
    return linattn.SequenceModel(nn.Embedding(9, DIM), linattn.ResidualSequence(branches()), **options)


# of embeddings (b, n, 16), with a mask (b, n); what has `extend` is asked for its states too
OF_EMBEDDINGS: dict[str, Callable[[], nn.Module]] = {
    "attention": mixer,
    "attention with rotary": lambda: mixer(rotary=10.0),
    "attention with convolution": lambda: mixer(convolution=3),
    "attention with convolutions": lambda: mixer(convolution=3, convolution_on="projections"),
    "attention with gates": lambda: linattn.MultiheadAttention(DIM, 4, inner("kda+local")),
    "attention of other heads": lambda: linattn.MultiheadAttention(DIM, 2, inner("elu")),
    "short convolution": lambda: linattn.ShortConvolution(DIM, 3),
    "wider convolution": lambda: linattn.ShortConvolution(DIM, 4),
    "gated convolution": lambda: linattn.GatedConvolution(DIM, 2),
    "branch": lambda: branches()[0],
    "branch with shift": lambda: linattn.Branch(mixer(), shift=linattn.TokenShift((1, 0))),
    "residual": lambda: linattn.ResidualSequence(branches()),
    "more residual": lambda: linattn.ResidualSequence([*branches(), *branches()]),
    "reversible": lambda: linattn.ReversibleSequence([(branches()[0], branches()[1])]),
    "post-norm": lambda: PostNormSequence(branches()[:1], [nn.LayerNorm(DIM)]),
    "projected": lambda: linattn.Projected(linattn.ResidualSequence(branches()[:1]), DIM, DIM),
}
OF_TOKENS: dict[str, Callable[[], nn.Module]] = {
    "language model": lambda: linattn.LanguageModel(linattn.LanguageModelConfig(vocab_size=9, dim=DIM, depth=2)),
    "learned positions": lambda: linattn.LanguageModel(
        linattn.LanguageModelConfig(vocab_size=9, dim=DIM, depth=3, positions="learned", max_length=20)
    ),
    "sequence model": of_tokens,
    "sequence model with positions": lambda: of_tokens(positions=linattn.SinusoidalPositions(DIM)),
}
MODULES = OF_EMBEDDINGS | OF_TOKENS


def some(name: str, b: int = B, n: int = N) -> Tensor:
    return torch.randn(b, n, DIM) if name in OF_EMBEDDINGS else torch.randint(9, (b, n))


def refused(call: Callable[[], Any], *shown: str) -> None:
    """With a ValueError that shows these and no shape of four dimensions or more, as heads have."""
    with pytest.raises(ValueError, match=r".") as error:
        call()
    message = str(error.value)
    assert all(text in message for text in shown), message
    assert not any(part.split(")")[0].count(",") > 2 for part in message.split("(")[1:]), message


@pytest.mark.parametrize("name", MODULES)
def test_wrong_masks_and_shapes(name: str) -> None:
    module = MODULES[name]()
    x = some(name)
    for call in (module, module.extend, partial(module.extend, state=module.extend(x)[1])):
        for wrong in (None, x.tolist()):
            refused(lambda wrong=wrong, call=call: call(wrong), "must be a tensor")
        for shape in ((B, N + 1), (N,), (B, 1, N), (B + 1, N)):
            refused(
                lambda shape=shape, call=call: call(x, key_mask=torch.ones(shape, dtype=torch.bool)),
                str(shape),
                "(2, 5)",
            )
        refused(lambda call=call: call(x, key_mask=torch.ones(B, N)), "key_mask must be boolean", "torch.float32")
        if name in OF_TOKENS:
            refused(lambda call=call: call(x[0]), "int64 or int32 (b, n)", "(5,)")
            refused(lambda call=call: call(x.float()), "int64 or int32", "torch.float32")
        elif "attention" in name or "convolution" in name:
            refused(lambda call=call: call(x[0]), f"(b, n, {DIM})", "(5, 16)")
            refused(lambda call=call: call(x[..., 1:]), f"(b, n, {DIM})", "(2, 5, 15)")


@pytest.mark.parametrize("kind", [linattn.FeedForward, linattn.GatedFeedForward])
def test_other_widths_are_refused(kind: type[nn.Module]) -> None:
    layer = kind(DIM, 2 * DIM)
    for module in (layer, linattn.Branch(layer), linattn.Chunked(layer, 2), MODULES["projected"]()):
        refused(lambda module=module: module(torch.randn(B, N, DIM - 1)), "16 channels", "15)")


def form(state: Any) -> Any:
    if isinstance(state, tuple):
        return type(state).__name__, *map(form, state)
    return (tuple(state.shape), state.dtype) if isinstance(state, Tensor) else state


@cache
def state_of(name: str) -> Any:
    return MODULES[name]().extend(some(name))[1]


@pytest.mark.parametrize("name", MODULES)
def test_a_state_of_another_module_is_refused(name: str) -> None:
    module, x = MODULES[name](), some(name)
    own = module.extend(x)[1]
    for other in MODULES:
        state = state_of(other)
        if form(state) == form(own):
            module.extend(x, state)
        else:
            with pytest.raises(ValueError, match=r"^the state"):
                module.extend(x, state)
                pytest.fail(f"{name} takes the state of {other}")
    for state in (3, "elu", [own], torch.zeros(3)):
        with pytest.raises(ValueError, match=r"^the state"):
            module.extend(x, state)


@pytest.mark.parametrize("name", MODULES)
def test_one_sequences_state_serves_many(name: str) -> None:
    module = MODULES[name]().double().eval()
    past, new = some(name, b=1), some(name, b=3)
    past, new = (x.double() if x.is_floating_point() else x for x in (past, new))
    _, state = module.extend(past)
    y, after = module.extend(new, state)
    repeated = map_state(lambda t: t.expand(3, *t.shape[1:]), state)
    expected, expected_after = module.extend(new, repeated)
    assert_close(y, expected)
    assert form(after) == form(expected_after)
    _, state = module.extend(past.expand(2, *past.shape[1:]))
    with pytest.raises(ValueError, match=r"state is of 2 sequences, but there are 3|batch sizes must be .* state 2"):
        module.extend(new, state)


def test_prompts_go_on_from_one_past() -> None:
    model = small_model(MODELS["mixture"])
    _, state = model.extend(torch.tensor([[1, 2, 3]]))
    together = generate(model, [[4], [5, 6]], max_new_tokens=5, state=state)
    assert together == [generate(model, [[1, 2, 3, *row]], max_new_tokens=5)[0] for row in ([4], [5, 6])]


@over([(spec, causal) for spec, causal in CAUSAL + GLOBAL if "+" not in spec])
def test_attentions_made_for_other_heads_say_so(spec: str, causal: bool) -> None:
    """What belongs to a head is not broadcast: if a call with other numbers of heads runs, each query has an output."""
    attention, (q, k, v) = make(spec, causal), heads(N)
    for h, hk in ((HEADS, 1), (KEY_HEADS, 1), (HEADS, HEADS)):
        x = [t.repeat(1, count, 1, 1)[:, :count] for t, count in ((q, h), (k, hk), (v, hk))]
        with contextlib.suppress(ValueError):
            assert attention(*x).shape == x[0].shape


@over(CAUSAL + GLOBAL)
def test_inner_attentions_show_what_they_were_given(spec: str, causal: bool) -> None:
    attention = make(spec, causal)
    q, k, v = heads(N)

    def wrong(*shapes: str, message: str, **change: Any) -> None:
        given = {"q": q, "k": k, "v": v, "key_mask": None} | change
        x = given["q"], given["k"], given["v"]
        for call in (attention, attention.extend) if causal else (attention,):
            with pytest.raises(ValueError, match=message) as error:
                call(*x, key_mask=given["key_mask"])
            assert all(shape in str(error.value) for shape in shapes), error.value

    mask = torch.ones(B, 1, N, dtype=torch.bool)
    wrong("(2, 1, 4)", "(2, 2, 5)", message="key_mask must be", key_mask=mask[..., 1:])
    wrong("(2, 5)", "(2, 2, 5)", message="key_mask must be", key_mask=mask[:, 0])
    wrong("(2, 3, 5)", "(2, 2, 5)", message="key_mask must be", key_mask=mask.expand(2, 3, 5))
    wrong("torch.float64", message="key_mask must be boolean", key_mask=mask.double())
    wrong("(2, 4, 5, 5)", "(2, 2, 5, 6)", message="same number of channels", q=q[..., 1:])
    wrong("(2, 3, 5, 6)", "(2, 2, 5, 6)", message="must divide", q=q[:, 1:])
    wrong("(2, 2, 4, 6)", "(2, 2, 5, 6)", message="every key must have a value", v=v[..., 1:, :])
    wrong("(4, 5, 6)", message=r"must be \(b, h, n, d\)", q=q[0])
    wrong("(2, 5, 6)", message=r"must be \(b, h, m, d\)", k=k[0])
    wrong("q 3, k 2, v 2", message="batch sizes must be the same, or 1", q=torch.cat([q, q])[:3])
    assert (HEADS, KEY_HEADS, CHANNELS) == (4, 2, 6)


@over(CAUSAL + GLOBAL)
def test_what_is_there_once_serves_the_batch(spec: str, causal: bool) -> None:
    attention, (q, k, v) = make(spec, causal), heads(N, b=3)
    for one in ([q[:1], k, v], [q, k[:1], v[:1]], [q, k[:1], v]):
        assert_close(attention(*one), attention(*(x.expand(3, *x.shape[1:]) for x in one)))


def test_torchs_module_shows_what_it_was_given() -> None:
    x, other = torch.randn(B, N, DIM), torch.randn(B, N + 1, DIM)
    for spec in ("elu", "softmax", "local"):
        module = linattn.TorchMultiheadAttention(DIM, 4, inner=inner(spec, causal=False), batch_first=True)
        refused(lambda m=module: m(x[..., 1:], x, x), "query must have 16 channels")
        refused(lambda m=module: m(x, x, other), "(2, 5, 16)", "(2, 6, 16)")
        refused(lambda m=module: m(x, x.double(), x), "key must be torch.float32", "torch.float64")
        refused(lambda m=module: m(x, x, x.half()), "value must be torch.float32", "torch.float16")
        refused(lambda m=module: m(x, x, x, key_padding_mask=torch.zeros(B, 4, dtype=torch.bool)), "(2, 5)", "(2, 4)")
    refused(lambda: module(x, other, other), "there are 5 and 6")
    linformer = linattn.LinearMultiheadAttention(DIM, 4, seq_len=4, batch_first=True)
    refused(lambda: linformer(x, x, x), "at most 4 keys, but there are 5")
    cross = linattn.MultiheadAttention(DIM, 4, inner("elu", causal=False), context_dim=8)
    refused(lambda: cross(x, x), "context must be (b, n, 8)", "(2, 5, 16)")
    refused(lambda: cross(x, x[..., :8], key_mask=torch.ones(2, 4, dtype=torch.bool)), "(2, 5), as context", "(2, 4)")
    refused(lambda: cross.summarize(x), "context must be (b, n, 8)")
    refused(lambda: cross.read(x[..., 1:], cross.summarize(x[..., :8])), "x must be (b, n, 16)", "(2, 5, 15)")
    refused(lambda: cross.read(x, 3), "must be a FeatureState", "int")


@pytest.mark.parametrize(
    "prompts", [[1, [2]], [[1], 2], 3, None, [[1.5]], [1.5], [["a"]], torch.rand(1, 2), torch.rand(2)]
)
def test_prompts_that_are_not_rows_of_tokens(prompts: Any) -> None:
    for call in (generate, linattn.stream):
        with pytest.raises(ValueError, match=r"prompts must be tokens, \[1, 2\], or rows of them, .*, but are"):
            call(small_model(MODELS["mixture"]), prompts, max_new_tokens=2)


@pytest.mark.parametrize("prompts", ["ab", ["ab", "c"]])
def test_text_for_a_model_without_a_tokenizer(prompts: Any) -> None:
    for call in (generate, linattn.stream):
        with pytest.raises(ValueError, match=r"the model has no tokenizer: LanguageModel.load finds"):
            call(small_model(MODELS["mixture"]), prompts, max_new_tokens=2)


def draws(logits: Callable[[Tensor], Any]) -> Callable[[], Any]:
    sampling = linattn.Sampling(temperature=1.0, filter=logits)
    return lambda: generate(small_model(MODELS["mixture"]), [[1]], max_new_tokens=2, sampling=sampling)


def with_base(base: float) -> list[Callable[[], Any]]:
    return [
        lambda: mixer(rotary=base),
        lambda: linattn.RotaryAttention(inner(), base=base),
        lambda: linattn.RotaryLinearAttention(linattn.TaylorFeatureMap(), base=base),
        lambda: linattn.SinusoidalPositions(DIM, base=base),
    ]


def packs(*starts: Any, n: int = 5) -> Callable[[], Any]:
    return lambda: linattn.packed_log_decay(torch.tensor(starts), n)


def generates(**options: Any) -> Callable[[], Any]:
    return lambda: generate(small_model(MODELS["mixture"]), [[1]], **{"max_new_tokens": 2} | options)


def blindspot(size: Any) -> linattn.InnerAttention:
    return BlindspotAttention(linattn.LinearAttention(linattn.TaylorFeatureMap(), causal=True), size)


VALUES = {
    "base|rotary": [make for base in (0.0, -1.0, math.nan, math.inf) for make in with_base(base)],
    "logits .* NaN": [draws(lambda x: x * math.nan), draws(lambda x: torch.full_like(x, -math.inf))],
    "filter must return logits": [draws(lambda x: None), draws(lambda x: x[:, 1:])],
    "stop_tokens must be tokens": [generates(stop_tokens=x) for x in (3, [1.5], "a", None)],
    "sampling must be a Sampling": [generates(sampling=x) for x in (0.8, "greedy", None)],
    "seed": [generates(seed=x) for x in (2**64, -(2**63) - 1)],
    "cu_seqlens must": [packs(0, 9), packs(0, 4, 2, 5), packs(-1, 5), packs(0.0, 5.0), packs((0, 5))],
    "n must": [packs(0, 5, n=-1)],
    "size must be": [lambda: blindspot(2.5)],
    "parts must be pairs": [lambda: linattn.SplitHeads(inner(), inner()), lambda: linattn.SplitHeads((1, 2, 3))],
    "heads": [lambda: linattn.SplitHeads(("2", inner())), lambda: linattn.SplitHeads((2.0, inner()))],
}
"""Calls with values that nothing can be made of, by what their errors say."""


@pytest.mark.parametrize("message", VALUES)
def test_values_that_cannot_be(message: str) -> None:
    for call in VALUES[message]:
        with pytest.raises(ValueError, match=message):
            call()
