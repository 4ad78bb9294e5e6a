"""transformers' hybrid models on this machine's CPU, as they come and with our scans.

    python benchmarks/hybrid_models.py [--threads 1] [--repeats 5] [--only mamba2,mamba,minimax]

Both have the same random weights, in float32, and take turns in one process. Times are medians of processor time; a
machine that is slow for a while is then slow for both, so read their ratio. A step is the loss of the next tokens and
its gradients. `apart` is the relative difference of logits, or of all gradients."""

import argparse
import contextlib
import copy
import io
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from linattn.cli.argument_types import names_from
from linattn.integrations.transformers import speed_up

VOCABULARY = 1024
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ATTENTION = {"intermediate_size": 1024, "num_attention_heads": 8}
# the class, the number of tokens, and the options of its configuration; heads have the sizes of published models
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "mamba2": ("Mamba2ForCausalLM", 2048, {**TEXT, "num_heads": 16, "n_groups": 1}),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        1024,
        {
            **TEXT,
            **ATTENTION,
            "num_key_value_heads": 8,
            "mlp_layer_types": ["dense"] * 4,
            "linear_head_dim": 128,
            "linear_num_heads": 8,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
        },
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        6144,
        {
            **TEXT,
            **ATTENTION,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
        },
    ),
    "mamba": ("MambaForCausalLM", 256, {**TEXT, "state_size": 16}),
    "minimax": (
        "MiniMaxForCausalLM",
        2048,
        {
            **TEXT,
            **ATTENTION,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}
Results = list[Tensor]


def models(name: str) -> tuple[dict[str, nn.Module], Tensor]:
    """Return the model as it comes and a copy that was sped up, and tokens for them."""
    kind, n, options = MODELS[name]
    torch.manual_seed(0)
    kind = getattr(transformers, kind)
    stock = kind(kind.config_class(**options)).train()
    ours = copy.deepcopy(stock)
    with contextlib.redirect_stdout(io.StringIO()):
        speed_up(ours)
    return {"stock": stock, "ours": ours}, torch.randint(1, VOCABULARY, (1, n))


def forward(model: nn.Module, tokens: Tensor) -> Results:
    with torch.no_grad():
        return [model(tokens, use_cache=False).logits]


def step(model: nn.Module, tokens: Tensor) -> Results:
    loss = model(tokens, labels=tokens, use_cache=False).loss
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True))


def measure(name: str, work: Callable[..., Results], repeats: int) -> None:
    both, tokens = models(name)
    # also the warm-up
    results = {who: torch.cat([x.flatten() for x in work(model, tokens)]) for who, model in both.items()}
    apart = ((results["ours"] - results["stock"]).norm() / results["stock"].norm()).item()
    times: dict[str, list[float]] = {who: [] for who in both}
    for _ in range(repeats):
        for who, model in both.items():
            start = time.process_time()
            work(model, tokens)
            times[who].append(time.process_time() - start)
    stock, ours = (statistics.median(times[who]) for who in ("stock", "ours"))
    print(
        f"{name:11}  n {tokens.shape[1]:5,}  {work.__name__:7}  stock {stock:7.2f} s  ours {ours:6.2f} s  "
        f"{stock / ours:5.1f} ×  apart {apart:.0e}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", type=names_from(tuple(MODELS)), default=tuple(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.only:
        for work in (forward, step):
            measure(name, work, options.repeats)


if __name__ == "__main__":
    main()
