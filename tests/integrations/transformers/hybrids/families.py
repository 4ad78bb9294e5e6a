"""Small random models of the families with linear attention inside: the class, and the options of its configuration."""

from typing import Any

import torch
import transformers

VOCABULARY = 37
LAYERS = ["linear_attention", "full_attention", "linear_attention"]
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DELTA = {
    **TEXT,
    "head_dim": 8,
    "layer_types": LAYERS,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
LATENT = {
    **TEXT,
    "num_key_value_heads": 4,
    "layer_types": LAYERS,
    "mlp_layer_types": ["dense"] * 3,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
KDA = {"linear_head_dim": 12, "linear_num_heads": 3}
MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 16}
SMALL = {name: TEXT[name] for name in ("vocab_size", "hidden_size", "pad_token_id", "bos_token_id", "eos_token_id")}
MAMBA1 = {**SMALL, "num_hidden_layers": 2, "state_size": 6}
SELECTIVE = ("mamba", "falcon_mamba", "jamba", "zamba")
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextForCausalLM", {**DELTA, **EXPERTS}),
    "qwen3_5": ("Qwen3_5ForCausalLM", DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", {**DELTA, **EXPERTS}),
    "olmo_hybrid": ("OlmoHybridForCausalLM", DELTA),
    "lara_mini": (
        "LaraMiniForCausalLM",
        {
            **{name: value for name, value in (DELTA | EXPERTS).items() if name != "intermediate_size"},
            "layer_types": ["linear_attention", "sliding_attention", "linear_attention"],
            "sliding_window": 8,
        },
    ),
    "qwen4_exp": (
        "Qwen4ExpForCausalLM",
        {
            **DELTA,
            **EXPERTS,
            "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
            "hc_count": 2,
            "hc_lowrank": 8,
            "ple_layer_ids": [1],
            "ple_embed_dim": 32,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 64,
            "split_ngram_parts": 1,
            "make_ngram_vocab_size_divisible_by": 1,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 64,
            "indexer_compress_ratio": 4,
        },
    ),
    "kimi_linear": ("KimiLinearForCausalLM", {**LATENT, **KDA, "qk_rope_head_dim": 4}),
    "bailing_hybrid": (
        "BailingHybridForCausalLM",
        {**LATENT, "head_dim": 12, "qk_rope_head_dim": 4, "n_group": 1, "topk_group": 1, "num_mtp_layers": 0},
    ),
    "glm5_next": (
        "Glm5NextTextModel",
        {
            **LATENT,
            **KDA,
            "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
            "q_lora_rank": 8,
            "n_routed_experts": 4,
            "qk_rope_head_dim": 0,
            "index_topk": 64,
            "index_head_dim": 8,
            "index_n_heads": 2,
            "index_kpool": 4,
            "hc_mult": 2,
        },
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        {
            **SMALL,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 16,
            "n_groups": 2,
            "chunk_size": 16,
        },
    ),
    "bamba": ("BambaForCausalLM", {**TEXT, **MAMBA, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1ForCausalLM", {**TEXT, **MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 64, "head_dim": 8}),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        {**TEXT, **MAMBA, "layer_types": LAYERS, "num_local_experts": 4, "shared_intermediate_size": 16},
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        {
            **TEXT,
            "num_hidden_layers": 4,
            "layer_types": [*LAYERS, "mlp"],
            "head_dim": 8,
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": 16,
        },
    ),
    "zamba2": (
        "Zamba2ForCausalLM",
        {
            **TEXT,
            "num_key_value_heads": 4,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
            "mamba_d_state": 16,
            "mamba_ngroups": 2,
            "n_mamba_heads": 8,
            "chunk_size": 16,
            "adapter_rank": 4,
        },
    ),
    "mamba": ("MambaForCausalLM", MAMBA1),
    "falcon_mamba": ("FalconMambaForCausalLM", MAMBA1),
    "jamba": (
        "JambaForCausalLM",
        {**TEXT, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 6},
    ),
    "zamba": (
        "ZambaForCausalLM",
        {
            **TEXT,
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "mamba_d_state": 6,
        },
    ),
    "minimax": (
        "MiniMaxForCausalLM",
        {**TEXT, "head_dim": 8, "layer_types": LAYERS, "num_local_experts": 4, "block_size": 16},
    ),
}


def make(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a model in evaluation, with weights large enough that each part of it shows in the outputs, and decays
    weak enough that the past does."""
    kind, options = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, kind)
    model = model(model.config_class(**{**options, **changes}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(-3, -1)
            elif name.endswith(".D"):
                # Mamba-2's way around the scan, beside which small keys and queries would hide it
                weight.fill_(0.1)
            elif weight.dim() > 1:
                # a stack of nothing but Mamba-1's scans amplifies rounding, as time steps grow with the token
                others = 1.5 if family in ("mamba", "falcon_mamba") else 3
                weight.mul_(10 if others == 3 and ("in_proj.weight" in name or "conv1d" in name) else others)
    return model.to(dtype).eval()
