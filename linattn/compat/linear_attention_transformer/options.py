"""Rules on the options of linear-attention-transformer that have no effect beside others."""

from linattn.compat.options import Options, Rule


def _local_heads(options: Options) -> tuple[int, ...]:
    counts = options["n_local_attn_heads"]
    return (counts,) if isinstance(counts, int) else tuple(counts)


def has_window(options: Options) -> bool:
    """Return True if some attention is made with `local_attn_window_size`."""
    return any(_local_heads(options)) or options["attend_axially"]


_RULES = (
    Rule(
        ("blindspot_size", "linformer_settings"),
        lambda options: all(count == options["heads"] for count in _local_heads(options)),
        "where all heads are local",
    ),
    Rule(
        ("context_linformer_settings",),
        lambda options: not options["receives_context"],
        "where receives_context is False",
    ),
)
STACK_RULES = (
    *_RULES,
    Rule(("rotary",), lambda options: not any(_local_heads(options)), "without local heads"),
    Rule(
        ("local_attn_window_size",),
        lambda options: not has_window(options),
        "without local heads and without attend_axially",
    ),
)
MODEL_RULES = (
    *_RULES,
    Rule(
        ("use_axial_pos_emb",),
        lambda options: options["use_rotary_emb"],
        "with use_rotary_emb, whose positions are sinusoids",
    ),
    Rule(
        ("local_attn_window_size",),
        lambda options: (
            not has_window(options) and (options["use_rotary_emb"] or options["use_axial_pos_emb"] is False)
        ),
        "without local heads, without attend_axially and without axial positions",
    ),
)
