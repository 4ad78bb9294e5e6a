"""The package's own outputs with the same weights, wherever its mathematics is right."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from linattn import EfficientFeatureMap, LinearAttention, attend
from linattn.compat.linear_attention_transformer import (
    LinearAttentionTransformer,
    LinearAttentionTransformerLM,
    LinformerContextSettings,
    LinformerSettings,
)
from linattn.compat.linear_attention_transformer.blindspot import BlindspotAttention
from tests.compat.constructors import has_window
from tests.compat.linear_attention_transformer.original import original, package, take_language_model, take_transformer

SIZES = {"dim": 16, "depth": 2, "heads": 4, "max_seq_len": 48}
# with masks only what does not shift tokens or project the sequence: there theirs ignores masks
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "local": {"n_local_attn_heads": 2},
    "local causal": {"n_local_attn_heads": (1, 4), "causal": True},
    "blindspot": {"blindspot_size": 8, "n_local_attn_heads": 2, "causal": True},
    "shifted": {"shift_tokens": True},
    "shifted causal": {"shift_tokens": True, "causal": True, "ff_chunks": 2},
    "reversible": {"reversible": True, "n_local_attn_heads": 1},
    "axial": {"attend_axially": True, "ff_glu": False},
    "axial causal": {"attend_axially": True, "causal": True, "n_local_attn_heads": 1},
    "wide heads": {"dim_head": 10},
    "Linformer": {"linformer_settings": {"k": 6}},
}
every_kind = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())


def pair(kind: str, **options: Any) -> tuple[Any, Any]:
    """Ours and theirs, with the same weights, in float64."""
    fields = SIZES | options | ({"local_attn_window_size": 8} if has_window(options, lm=kind == "lm") else {})
    settings = {
        "linformer_settings": (LinformerSettings, package.LinformerSettings),
        "context_linformer_settings": (LinformerContextSettings, package.LinformerContextSettings),
    }
    sides = []
    for side in range(2):
        made = {name: kinds[side](**fields[name]) for name, kinds in settings.items() if name in fields}
        sides.append(fields | made)
    if kind == "lm":
        ours = LinearAttentionTransformerLM(num_tokens=11, **sides[0]).double().eval()
        return ours, take_language_model(package.LinearAttentionTransformerLM(num_tokens=11, **sides[1]), ours)
    ours = LinearAttentionTransformer(**sides[0]).double().eval()
    return ours, take_transformer(package.LinearAttentionTransformer(**sides[1]), ours)


def some_tokens(n: int = 48) -> torch.Tensor:
    return torch.randint(11, (2, n))


@every_kind
def test_stacks_agree(options):
    ours, theirs = pair("stack", **options)
    x = torch.randn(2, 48, 16, dtype=torch.float64)
    assert_close(ours(x), theirs(x), rtol=1e-9, atol=1e-9)


@every_kind
def test_language_models_agree(options):
    ours, theirs = pair("lm", **options)
    assert_close(ours(x := some_tokens()), theirs(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "options",
    [{"emb_dim": 6}, {"use_axial_pos_emb": False}, {"return_embeddings": True}, {"emb_dim": 6, "causal": True}],
    ids=str,
)
def test_embeddings_agree(options):
    ours, theirs = pair("lm", **options)
    assert_close(ours(x := some_tokens()), theirs(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["plain", "causal", "local", "local causal", "blindspot", "reversible"])
def test_padding_on_the_right_agrees(name):
    ours, theirs = pair("lm", **KINDS[name])
    x, mask = some_tokens(), torch.arange(48) < torch.tensor([[33], [48]])
    assert_close(ours(x, input_mask=mask)[mask], theirs(x, input_mask=mask)[mask], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("reversible", [False, True])
@pytest.mark.parametrize("settings", [{}, {"context_linformer_settings": {"seq_len": 20, "k": 5}}], ids=str)
def test_decoders_agree(reversible, settings):
    ours, theirs = pair(
        "lm", causal=True, receives_context=True, reversible=reversible, n_local_attn_heads=1, ff_glu=False, **settings
    )
    x, context, mask = some_tokens(), torch.randn(2, 20, 16, dtype=torch.float64), torch.rand(2, 20) < 0.6
    given = {"context": context} if settings else {"context": context, "context_mask": mask}
    assert_close(ours(x, **given), theirs(x, **given), rtol=1e-9, atol=1e-9)


def test_rotary_without_it_in_linear_heads_agrees():
    """Their linear heads turn queries and keys before a softmax over channels, which knows no angles; with heads of
    zeros there what is left, the sinusoids, is the same."""
    ours, theirs = pair("lm", use_rotary_emb=True, dim_head=4)
    for module in theirs.modules():
        if hasattr(module, "to_q"):
            torch.nn.init.zeros_(module.to_q.weight)
            torch.nn.init.zeros_(module.to_k.weight)
    for module in ours.modules():
        if hasattr(module, "q_proj"):
            torch.nn.init.zeros_(module.q_proj.weight)
            torch.nn.init.zeros_(module.k_proj.weight)
    assert_close(ours(x := some_tokens()), theirs(x), rtol=1e-5, atol=1e-5)


def test_the_functions_are_those_that_the_page_names():
    q, k, v = torch.randn(3, 2, 4, 24, 9, dtype=torch.float64).unbind()
    assert_close(attend(q, k, v, "efficient"), 3 * original.linear_attn(q, k, v))
    causal = LinearAttention(EfficientFeatureMap(), causal=True, normalize="output")
    assert_close(causal(q, k, v), original.causal_linear_attn(q, k, v, bucket_size=1))
    assert_close(BlindspotAttention(causal, 8)(q, k, v), original.causal_linear_attn(q, k, v, bucket_size=8))
