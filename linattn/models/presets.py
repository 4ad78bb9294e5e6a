"""Published architectures as options of `LanguageModelConfig`, each with its paper and what still differs from it."""

import math
from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any, NamedTuple

_ON_PROJECTIONS = {"convolution": 4, "convolution_on": "projections"}


class Preset(NamedTuple):
    """An architecture of a `paper`, which is at its `url`; `differences` says what here is not as in the paper.

    `attention` names the attentions of the first layers; later layers repeat them. `options` are the fields that differ
    from the defaults of `LanguageModelConfig`. `key_width` is the number of channels of a token's keys in all heads
    together, divided by the model's channels; `value_width` likewise for values."""

    paper: str
    url: str
    attention: tuple[str, ...]
    options: Mapping[str, Any]
    differences: str
    key_width: float = 1.0
    value_width: float = 1.0

    def fields(self, *, dim: int, depth: int, num_heads: int) -> dict[str, Any]:
        """Return the options for these sizes. Widths of heads are rounded up."""
        attention = self.attention[0] if len(self.attention) == 1 else tuple(islice(cycle(self.attention), depth))
        widths = {}
        if (self.key_width, self.value_width) != (1, 1):
            widths = {
                "key_dim": math.ceil(self.key_width * dim / num_heads),
                "head_dim": math.ceil(self.value_width * dim / num_heads),
            }
        return {"attention": attention, **widths, **self.options}


PRESETS = {
    "transformer": Preset(
        "LLaMA", "https://arxiv.org/abs/2302.13971", ("softmax",), {}, "none: the Transformer++ of the other papers"
    ),
    "performer": Preset(
        "Performer",
        "https://arxiv.org/abs/2009.14794",
        ("favor",),
        {"norm": "layer", "feed_forward": "gelu"},
        "rotary positions instead of positions added to the embeddings, which would end at a longest sequence; "
        "features are resampled only by `redraw_features_`",
    ),
    "retnet": Preset(
        "RetNet",
        "https://arxiv.org/abs/2307.08621",
        ("retention",),
        {"head_norm": True, "gate": True, "norm": "layer", "feed_forward": "gelu", "mlp_ratio": 2.0},
        "the norm of a head does not subtract the mean, and has weights",
        value_width=2.0,
    ),
    "based": Preset(
        "Based",
        "https://arxiv.org/abs/2402.18668",
        ("convolution:3", "taylor2", "local", "convolution:3", "convolution:3"),
        {"key_dim": 16, "window": 64, "mlp_ratio": 3.0},
        "the window's keys have 16 channels too, and rotary positions are also in the Taylor layers; the gated "
        "convolution has neither a SiLU nor wider projections",
    ),
    "gla": Preset(
        "Gated Linear Attention",
        "https://arxiv.org/abs/2312.06635",
        ("gla",),
        {"head_norm": True, "gate": True, "rotary": None},
        "the norm of a head is an RMSNorm, as in the paper's code",
        key_width=0.5,
    ),
    "mamba2": Preset(
        "Mamba-2",
        "https://arxiv.org/abs/2405.21060",
        ("ssd",),
        {
            "key_dim": 128,
            **_ON_PROJECTIONS,
            "value_skip": True,
            "gate": True,
            "gated_norm": True,
            "rotary": None,
            "feed_forward": "none",
        },
        "each head has its own q and k (C and B), which the paper's heads share; its heads have 64 values each, as "
        "`num_heads = dim / 32` gives",
        value_width=2.0,
    ),
    "deltanet": Preset(
        "DeltaNet",
        "https://arxiv.org/abs/2406.06484",
        ("delta",),
        {**_ON_PROJECTIONS, "head_norm": True, "rotary": None},
        "none",
    ),
    "gated_deltanet": Preset(
        "Gated DeltaNet",
        "https://arxiv.org/abs/2412.06464",
        ("gated_delta",),
        {**_ON_PROJECTIONS, "head_norm": True, "gate": True, "rotary": None},
        "none; Qwen3-Next has such layers, with one of softmax after every three",
        key_width=0.75,
        value_width=1.5,
    ),
    "gated_deltaproduct": Preset(
        "Gated DeltaProduct",
        "https://arxiv.org/abs/2502.10297",
        ("gated_delta",),
        {**_ON_PROJECTIONS, "writes": 2, "beta_limit": 2.0, "head_norm": True, "gate": True, "rotary": None},
        "none; the paper has models of up to four writes per token, too",
        key_width=0.75,
        value_width=1.5,
    ),
    "rwkv7": Preset(
        "RWKV-7",
        "https://arxiv.org/abs/2503.14456",
        ("rwkv7",),
        {
            "convolution": 2,
            "head_norm": True,
            "gate": True,
            "gate_function": "sigmoid",
            "rotary": None,
            "norm": "layer",
            "feed_forward": "squared_relu",
        },
        "a short convolution of width 2, one for q, k and v, instead of a token shift for each projection, gate and "
        "feed-forward; the gate is σ(W x), the paper's W₂ σ(W₁ x); values have no share of the first layer's, and no "
        "bonus of the token itself is added",
    ),
    "kimi_linear": Preset(
        "Kimi Linear",
        "https://arxiv.org/abs/2510.26692",
        ("kda", "kda", "kda", "softmax"),
        {**_ON_PROJECTIONS, "head_norm": True, "gate": True, "gate_function": "sigmoid", "rotary": None},
        "the softmax layers are not latent attention and have the others' convolution, norm and gate; the gate is one "
        "matrix, the paper's a product of two; the feed-forward is no mixture of experts",
    ),
}
"""The architectures by name."""
