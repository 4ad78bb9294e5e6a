"""Small random models of the families whose attention goes through transformers' interface."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

VOCABULARY = 37
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SIZE, **TOKENS}
GROUPED = {**TEXT, "num_key_value_heads": 2}
HEADS_OF_8 = {**GROUPED, "head_dim": 8}
IMAGE = {**SIZE, "image_size": 12, "patch_size": 4}
SEQ2SEQ = {
    **{
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in {"layers": 2, "attention_heads": 4, "ffn_dim": 48}.items()
    },
    **TOKENS,
    "d_model": 32,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}

# the class, and the options of its configuration
DECODERS = {
    "llama": ("LlamaForCausalLM", GROUPED),
    "mistral": ("MistralForCausalLM", {**HEADS_OF_8, "sliding_window": None}),
    "qwen3": ("Qwen3ForCausalLM", HEADS_OF_8),
    "gpt2": ("GPT2LMHeadModel", {**TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gpt_neox": ("GPTNeoXForCausalLM", TEXT),
    "opt": ("OPTForCausalLM", {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64}),
    "phi3": ("Phi3ForCausalLM", GROUPED),
    "olmo2": ("Olmo2ForCausalLM", GROUPED),
    "smollm3": ("SmolLM3ForCausalLM", GROUPED),
    "gemma2": ("Gemma2ForCausalLM", {**HEADS_OF_8, "attn_logit_softcapping": None, "query_pre_attn_scalar": 16}),
}
WINDOWED = {
    "mistral": ("MistralForCausalLM", {**HEADS_OF_8, "sliding_window": 5}),
    "gemma2": ("Gemma2ForCausalLM", {**HEADS_OF_8, "attn_logit_softcapping": None, "sliding_window": 5}),
}
# its forward takes use_cache through **kwargs
EXPERTS = {
    "granitemoe": (
        "GraniteMoeForCausalLM",
        {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"},
    ),
}
ENCODERS = {
    "bert": ("BertModel", TEXT),
    "distilbert": ("DistilBertModel", {**TOKENS, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}),
    "modernbert": ("ModernBertModel", {**TEXT, "local_attention": 6, "global_attn_every_n_layers": 2}),
    "clip_text": ("CLIPTextModel", TEXT),
}
IMAGES = {
    "vit": ("ViTModel", IMAGE),
    "dinov2": ("Dinov2Model", IMAGE),
    "clip_vision": ("CLIPVisionModel", IMAGE),
}
AUDIO = {
    "wav2vec2": (
        "Wav2Vec2Model",
        {
            **TEXT,
            "conv_dim": (8, 8),
            "conv_stride": (4, 4),
            "conv_kernel": (8, 8),
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
        },
    ),
}
ENCODER_DECODERS = {
    "bart": ("BartForConditionalGeneration", {**SEQ2SEQ, "max_position_embeddings": 64}),
    "whisper": (
        "WhisperForConditionalGeneration",
        {**SEQ2SEQ, "max_source_positions": 20, "max_target_positions": 32, "num_mel_bins": 8},
    ),
}
"""Every family by its kind."""

Family = tuple[str, dict[str, Any]]


def every(families: dict[str, Family]) -> Callable[..., Any]:
    return pytest.mark.parametrize("family", families.values(), ids=families)


def make(family: Family, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """Return a model in evaluation, with weights large enough that attention shows in the outputs."""
    name, options = family
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**options, **changes}))
    # models with soft caps refuse sdpa; these have none
    model._supports_sdpa = True
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(5)
    return model.to(dtype).eval()
