"""Small random models of all classes of transformers: their configurations follow from the names of the fields."""

import re
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

VOCABULARY = 64
LARGEST = 17_000_000
"""The number of parameters beyond which a model is not built."""
# the classes of a configuration are tried in this order
KINDS = {
    "decoder": ("MODEL_FOR_CAUSAL_LM",),
    "encoder-decoder": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_SPEECH_SEQ_2_SEQ"),
    "image and text": ("MODEL_FOR_IMAGE_TEXT_TO_TEXT", "MODEL_FOR_MULTIMODAL_LM"),
    "other": ("MODEL", "MODEL_FOR_PRETRAINING", "MODEL_FOR_TEXT_TO_WAVEFORM", "MODEL_FOR_TEXT_TO_SPECTROGRAM"),
}
# the first pattern that matches the whole name of a field gives its value
NUMBERS: tuple[tuple[str, Any], ...] = (
    (r"pad_token_id|bos_token_id|eos_token_id|decoder_start_token_id", {"pad": 0, "bos": 1, "eos": 2, "decoder": 1}),
    (r"(image|boi|vision_start|image_start).*_token_(id|index)", 50),
    (r"(video|eoi|vision_end|image_end).*_token_(id|index)", 51),
    (r".*_token_(id|index)|token_(id|index)", 52),
    (r".*vocab_size.*", VOCABULARY),
    (r"head_dim|.*_head_dim|dim_head|d_kv|kv_channels|d_head|rotary_dim|mamba_d_head|.*_head_dim", 8),
    (r".*kv_heads|.*key_value_heads|num_kv_heads|multi_query_group_num|.*query_groups|num_key_value_groups", 2),
    (r".*n_groups?|.*topk_group|.*num_groups|num_expert_group", 1),
    (r".*heads|.*n_heads?|.*attention_heads_.*|num_self_attention_heads|mamba_num_heads", 4),
    (r".*experts_per_tok.*|.*top_?k(_experts)?|moe_k|num_selected_experts|index_topk", 2),
    (r".*(num|routed)_(local_)?experts|.*num_experts|n_experts|moe_num_experts", 4),
    (r".*shared_experts", 1),
    (r".*lora_rank|.*_rank", 16),
    (r"first_k_dense_replace|moe_layer_start_index|num_dense_layers|max_window_layers|num_nextn_predict_layers", 1),
    (r".*num_kv_shared_layers|full_attn_mod|.*layer_interval|.*_layer_period|.*_sparse_step|.*_layer_frequency", 1),
    (r".*_layer_offset|freeze_at", 0),
    (r".*layers|.*n_layers?|.*_depth|depth|.*num_blocks", 2),
    (r".*(intermediate|ffn|mlp|inner|feedforward|feed_forward|ff)_?(hidden_)?(size|dim)(_.*)?|d_ff|n_inner", 48),
    (r".*sliding_window(_size)?|.*attention_chunk_size|local_attention|attention_window", 128),
    (r".*spatial_merge_size|.*merge_size|.*scale_factor|.*_shuffle_factor", 2),
    (r"temporal_patch_size|patch_temporal", 1),
    (r".*patch_size", 4),
    (r".*(image|input|crop|img)_size|image_resolution|resolution", 16),
    (r".*num_position_embeddings|max_num_patches|.*num_patches", 16),
    (r".*(max_|n_).*positions?(_embeddings)?|max_.*length|max_seq_len|n_ctx|context_length", 128),
    (r".*mel_bins|.*mel_dim|feature_size|n_mels", 8),
    (r".*mamba_d_state|state_size|ssm_state_size", 8),
    (r".*num_conv_pos_embeddings|.*num_conv_pos_embedding_groups", 4),
    (r"num_queries|num_query_tokens|num_latents|.*num_image_tokens", 4),
    (r".*(hidden|embed|embedding|model|projection|proj|output|out|query|latent|fpn|channel|fusion|codebook)s?"
     r"_?(size|dim|dims|channels|s)(_.*)?|d_model|n_embd|dim|hidden|d_.*|.*_features|.*_channels|width", 32),
)  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    "DonutSwinModel": {"window_size": 2},
    "Dots1ForCausalLM": {"num_experts_per_tok": 2},
    "EsmModel": {"pad_token_id": 0, "mask_token_id": 4},
    "EsmcModel": {"num_key_value_heads": 4},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "InformerModel": {"attention_type": "full"},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "NllbMoeForConditionalGeneration": {"router_ignore_padding_tokens": True},
    # its encoder pads to whole blocks
    "PegasusXForConditionalGeneration": {"block_size": 8},
    "Qwen3_5ForCausalLM": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    # it reads the number, but has no such field
    "Qwen3OmniMoeThinkerForConditionalGeneration": {"vision_start_token_id": 50},
    "SwinModel": {"window_size": 2},
}
"""Fields of single classes that do not follow from their names."""
LISTS: tuple[tuple[str, int], ...] = (
    (r"depths|layers|.*num_blocks.*|num_block_repeats|.*depth.*|blocks_per_stage", 1),
    (r".*heads.*", 2),
    (r".*(hidden|embed|channel|conv_dim|out|tdnn_dim).*", 32),
)
# fields without a default value
MISSING = {
    **{"n_group": 1, "topk_group": 1, "n_routed_experts": 4, "n_shared_experts": 1},
    **{"prediction_length": 4, "head_dim": 8, "vocab_size": VOCABULARY},
}
# fields per layer, which transformers derives from the number of layers
DERIVED = re.compile(
    r".*layer_types|.*layers_block_type|no_rope_layers|attn_type_list|layers_types|attention_layers|hybrid_override_pattern|.*_pattern"
    r"|_?out_(features|indices)|stage_names|num_feat_extract_layers|per_layer_config"
    r"|transformers_version|architectures|_name_or_path|.*dtype|max_window_layers_list|moe_layers|attention_types"
)


def classes() -> dict[str, str]:
    """Return the kind of each model's class, by the class's name: one class for each configuration."""
    first: dict[str, tuple[str, str]] = {}
    for kind, mappings in KINDS.items():
        for mapping in mappings:
            for model_type, name in getattr(modeling_auto, f"{mapping}_MAPPING_NAMES").items():
                for each in (name,) if isinstance(name, str) else name:
                    first.setdefault(model_type, (each, kind))
    return {name: kind for name, kind in sorted(first.values())}


def small_config(kind: type[PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    """Return a configuration whose model is small."""
    fields = _smaller(kind().to_dict())
    config = kind(**{**fields, **changes})
    # the others compute in float32 at most
    config._experts_implementation = "eager"
    return config


def make(name: str, kind_of_class: str) -> PreTrainedModel:
    """Return a model of the class in evaluation, with weights large enough that attention shows in the outputs."""
    kind = getattr(transformers, name)
    changes = CHANGES.get(name, {})
    if kind_of_class == "decoder" and getattr(kind.config_class(), "is_decoder", True) is False:
        changes = {**changes, "is_decoder": True}
    with torch.device("meta"):
        size = sum(weight.numel() for weight in kind(small_config(kind.config_class, **changes)).parameters())
    if size > LARGEST:
        raise OverflowError(f"{size:,} parameters")
    torch.manual_seed(0)
    model = kind(small_config(kind.config_class, **changes))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(3)
    if getattr(model, "generation_config", None) and model.config.is_encoder_decoder:
        model.generation_config.update(decoder_start_token_id=1, pad_token_id=0, forced_eos_token_id=None)
    return model.double().eval()


# models that rotate by three positions, whose sections have a default value for large heads
_THREE_POSITIONS = re.compile(r"(glm(4v|46v|_image|_ocr)|qwen2(_5)?_(vl|omni)|paddleocr_vl|hunyuan_vl).*")


def _smaller(fields: dict[str, Any]) -> dict[str, Any]:
    # these make one layer of each kind
    smaller = {k: _value(k, x) for k, x in fields.items() if isinstance(k, str) and not DERIVED.fullmatch(k)}
    if "linear_attention" in (fields.get("layer_types") or ()):
        smaller["num_hidden_layers"] = 4
    if "rope_parameters" in smaller and _THREE_POSITIONS.fullmatch(fields.get("model_type", "")):
        rope = smaller["rope_parameters"] or {"rope_type": "default", "rope_theta": 10_000.0}
        sections = [1, 1, 0] if rope.get("partial_rotary_factor") == 0.5 else [2, 1, 1]
        smaller["rope_parameters"] = {**rope, "mrope_section": sections}
    # keys of one latent have a head for each query head
    if "kv_lora_rank" in smaller and "num_key_value_heads" in smaller:
        smaller["num_key_value_heads"] = smaller["num_attention_heads"]
    if "encoder_num_key_value_heads" in smaller:
        smaller |= {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4}
    if "mamba_d_head" in smaller:
        smaller["mamba_d_head"] = 16
    if "lags_sequence" in smaller:
        smaller = {name: value for name, value in smaller.items() if name not in ("feature_size", "input_size")}
    return smaller


def _value(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        if "mrope_section" in value:
            value = {**value, "mrope_section": [2, 1, 1]}
        return value if name.startswith("rope") else _smaller(value) | _kept(value)
    if value is None and name in MISSING:
        return MISSING[name]
    if isinstance(value, float) and ("drop" in name):
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, list, tuple)):
        return value
    if isinstance(value, int):
        return _number(name, value)
    if value and all(type(each) is int for each in value):
        if re.fullmatch(r".*index(es)?|.*_indices|.*idxs?|.*layers", name):
            return type(value)(sorted({min(each, 1) for each in value}))
        if re.fullmatch(r".*(image|patch)_size", name):
            return type(value)([_number(name, each) for each in value])
        for pattern, number in LISTS:
            if re.fullmatch(pattern, name):
                return type(value)([number] * len(value))
    return value


def _kept(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": fields["model_type"]} if "model_type" in fields else {}


def _number(name: str, value: int) -> int:
    for pattern, number in NUMBERS:
        if re.fullmatch(pattern, name):
            if isinstance(number, dict):
                return next(each for start, each in number.items() if name.startswith(start))
            if number == 0:
                return 0
            # 0 and 1 switch something off, -1 means none
            return value if value in (0, -1) or (value == 1 and "heads" not in name) else min(number, value)
    return value
