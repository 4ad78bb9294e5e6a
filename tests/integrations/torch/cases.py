"""torch's attention and ours from one seed, and inputs for both."""

import torch
from torch import nn

from linattn import ATTENTIONS, TorchMultiheadAttention, named_attention, traits

DIM, HEADS, N, M, BATCH = 24, 4, 9, 7, 3
GLOBAL = [name for name in ATTENTIONS if traits(name).bidirectional]
# torch's arguments have no place for gates
CAUSAL = [name for name in ATTENTIONS if traits(name).causal and not traits(name).gated]

SHAPES = {
    "plain": {},
    "no bias": {"bias": False},
    "widths": {"kdim": 10, "vdim": 14},
    "widths, no bias": {"kdim": 10, "bias": False},
    "bias kv": {"add_bias_kv": True},
    "zero": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    "batch first": {"batch_first": True},
}


def bool_keys(n, m, unbatched):
    mask = torch.rand(BATCH, m) < 0.4
    mask[:, 0] = False
    return mask[0] if unbatched else mask


MASKS = {
    "none": lambda n, m, unbatched: {},
    "bool keys": lambda n, m, unbatched: {"key_padding_mask": bool_keys(n, m, unbatched)},
    "float keys": lambda n, m, unbatched: {
        "key_padding_mask": torch.randn(*(() if unbatched else (BATCH,)), m, dtype=torch.float64)
    },
    "bool": lambda n, m, unbatched: {"attn_mask": (torch.rand(n, m) < 0.5).index_fill(1, torch.tensor([1]), False)},
    "float": lambda n, m, unbatched: {"attn_mask": torch.randn(n, m, dtype=torch.float64)},
    "for each head": lambda n, m, unbatched: {
        "attn_mask": torch.randn((1 if unbatched else BATCH) * HEADS, n, m, dtype=torch.float64)
    },
    "both": lambda n, m, unbatched: {
        "attn_mask": torch.ones(n, m, dtype=torch.bool).triu(m - n + 1).index_fill(1, torch.tensor([0]), False),
        "key_padding_mask": bool_keys(n, m, unbatched),
    },
}


def pair(name="softmax", *, options=None, seed=0, **ours):
    """torch's module and ours, from one seed."""
    options = options or {}
    torch.manual_seed(seed)
    theirs = nn.MultiheadAttention(DIM, HEADS, dtype=torch.float64, **options)
    torch.manual_seed(seed)
    inner = named_attention(name, num_heads=HEADS, head_dim=DIM // HEADS, window=3, max_length=40)
    mine = TorchMultiheadAttention(DIM, HEADS, dtype=torch.float64, inner=inner, **options, **ours)
    for attention in (theirs, mine):
        for weight in (attention.in_proj_bias, attention.out_proj.bias):
            if weight is not None:
                torch.manual_seed(seed + len(weight))
                nn.init.normal_(weight)
    return theirs, mine


def inputs(options=None, n=N, m=M, unbatched=False):
    options = options or {}
    shapes = [(n, DIM), (m, options.get("kdim", DIM)), (m, options.get("vdim", DIM))]
    if unbatched:
        return [torch.randn(*shape, dtype=torch.float64) for shape in shapes]
    batched = [(BATCH, *x) if options.get("batch_first") else (x[0], BATCH, x[1]) for x in shapes]
    return [torch.randn(*shape, dtype=torch.float64) for shape in batched]


def self_inputs(n=N, *, batch=BATCH):
    return torch.randn(batch, n, DIM, dtype=torch.float64)


def causal_mask(n):
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def call(attention, x, **options):
    return attention(x, x, x, **options)
