"""Rules on the options of performer-pytorch that have no effect beside others."""

from linattn.compat.options import Options, Rule

_DRAWN = ("nb_features", "ortho_scaling", "feature_redraw_interval", "auto_check_redraw")
_KERNEL = ("kernel_fn", "kernel_epsilon")
_KINDS = (*_KERNEL, "softmax_epsilon", "generalized_attention")


def _local_heads(options: Options) -> tuple[int, ...]:
    counts = options.get("local_attn_heads", options.get("local_heads", 0))
    return (counts,) if isinstance(counts, int) else tuple(counts)


def has_fast_heads(options: Options) -> bool:
    """Return True if some head of self attention attends to more than its window."""
    return any(count != options.get("heads") for count in _local_heads(options))


RULES = (
    Rule(
        (*_DRAWN, *_KINDS, "no_projection"),
        lambda options: not has_fast_heads(options) and not options.get("cross_attend"),
        "where all heads are local",
    ),
    Rule(
        (*_DRAWN, *_KINDS),
        lambda options: options["no_projection"],
        "with no_projection, whose features are a softmax and an exponential",
    ),
    Rule(
        ("softmax_epsilon",),
        lambda options: options["generalized_attention"],
        "with generalized_attention, whose epsilon is kernel_epsilon",
    ),
    Rule(_KERNEL, lambda options: not options["generalized_attention"], "without generalized_attention"),
    Rule(
        ("auto_check_redraw",),
        lambda options: options.get("feature_redraw_interval", 1) is None,
        "where feature_redraw_interval is None, as nothing is redrawn",
    ),
    Rule(("local_window_size",), lambda options: not any(_local_heads(options)), "without local heads"),
    Rule(("use_rezero",), lambda options: bool(options.get("use_scalenorm")), "with use_scalenorm"),
)
# in a PerformerLM they are sinusoids too
ROTARY_RULE = Rule(
    ("rotary_position_emb",),
    lambda options: not has_fast_heads(options),
    "where all heads are local, which have rotary positions anyway",
)
POSITION_RULES = (
    Rule(
        ("axial_position_emb",),
        lambda options: options["rotary_position_emb"],
        "without rotary_position_emb=False, which is not the default",
    ),
    Rule(
        ("axial_position_shape",),
        lambda options: options["rotary_position_emb"] or not options["axial_position_emb"],
        "where axial_position_emb is False",
    ),
)
