"""The originals' modules: everything public in them can be imported by changing the package's prefix alone, or stands
in a table with the reason."""

import importlib
import inspect
import re
import warnings
from pathlib import Path
from types import ModuleType

import pytest

import linattn

PACKAGES = {
    "performer_pytorch": ("performer_pytorch", "autoregressive_wrapper", "performer_enc_dec", "reversible"),
    "linear_attention_transformer": (
        "linear_attention_transformer",
        "autoregressive_wrapper",
        "autopadder",
        "images",
        "reversible",
    ),
    "linformer": ("linformer", "reversible"),
}
HELPER = "a helper of the original's own code"
STACK = "linattn.nn has ResidualSequence and ReversibleSequence, made of pairs of branches"
PART = "docs/compat.md says which part of linattn.nn stands in its place"
OPERATOR = "linattn.linear_attention and causal_linear_attention are the functions, EfficientFeatureMap the features"
LEFT_OUT = {
    "performer_pytorch.performer_pytorch": {
        HELPER: (
            *("exists", "empty", "default", "null_context", "cast_tuple", "get_module_device", "find_modules"),
            *("shift", "rotate_every_two", "apply_rotary_pos_emb", "Always"),
        ),
        PART: (
            *("PreShiftTokens", "ReZero", "PreScaleNorm", "PreLayerNorm", "Chunk", "FeedForward"),
            *("AbsolutePositionalEmbedding", "FixedPositionalEmbedding"),
        ),
    },
    "performer_pytorch.autoregressive_wrapper": {HELPER: ("exists", "repetition_penalty_fn")},
    "performer_pytorch.performer_enc_dec": {
        HELPER: (
            *("group_dict_by_key", "string_begins_with", "group_by_key_prefix"),
            *("group_by_key_prefix_and_remove_prefix", "extract_enc_dec_kwargs", "extract_and_set_enc_dec_kwargs"),
        )
    },
    "linear_attention_transformer.linear_attention_transformer": {
        HELPER: (
            *("exists", "default", "always", "cast_tuple", "safe_div", "lcm", "merge_dims", "expand_dim"),
            *("split_at_index", "max_neg_value", "shift", "rotate_every_two", "apply_rotory_pos_emb", "GELU_"),
        ),
        PART: (
            *("PreNorm", "PreShiftTokens", "Chunk", "FeedForward", "ProjectInOut", "FoldAxially", "SelfAttention"),
            *("AbsolutePositionalEmbedding", "FixedPositionalEmbedding"),
        ),
        OPERATOR: ("linear_attn", "causal_linear_attn"),
    },
    "linear_attention_transformer.autopadder": {HELPER: ("find_module", "pad_to_multiple")},
    "linformer.linformer": {
        HELPER: ("default", "init_", "GELU_"),
        PART: ("Residual", "PreNorm", "FeedForward"),
    },
    **{
        f"{package}.reversible": {
            HELPER: ("route_args", "Deterministic"),
            STACK: ("ReversibleBlock", "SequentialSequence", "ReversibleSequence"),
        }
        for package in PACKAGES
    },
}
for package in ("linear_attention_transformer", "linformer"):
    LEFT_OUT[f"{package}.reversible"]["nothing in the package asks for the dropout of layers"] = ("layer_drop",)

MODULES = [name for package, parts in PACKAGES.items() for name in (package, *(f"{package}.{part}" for part in parts))]


def original(name: str) -> ModuleType:
    with warnings.catch_warnings():
        # distutils, at performer-pytorch's import
        warnings.simplefilter("ignore", DeprecationWarning)
        return pytest.importorskip(name)


def public(module: ModuleType) -> set[str]:
    """Classes and functions that the module defines itself; of a package, all that it imports from its own modules."""
    inside = module.__name__ if "." in module.__name__ else f"{module.__name__}."
    return {
        name
        for name, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__.startswith(inside)
        and not name.startswith("_")
    }


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_here_or_in_the_table(name):
    names = public(original(name))
    assert names
    left_out = {each for reason in LEFT_OUT.get(name, {}).values() for each in reason}
    assert left_out <= names, "the table has names that the original does not have"
    wanted = names - left_out
    if not wanted:
        return
    ours = importlib.import_module(f"linattn.compat.{name}")
    missing = {each for each in wanted if not hasattr(ours, each)}
    assert not missing
    for each in wanted:
        assert getattr(ours, each).__module__.startswith("linattn.")
    assert wanted <= set(getattr(ours, "__all__", wanted))
    assert not left_out & public(ours), "the table leaves out what is here"


def test_the_documents_say_what_stands_in_the_place_of_each_part():
    page = (Path(__file__).parents[2] / "docs/compat.md").read_text("utf-8")
    table = page.split("## Parts of the originals")[1].split("\n## ")[0]
    parts = {
        name for reasons in LEFT_OUT.values() for reason in (PART, OPERATOR, STACK) for name in reasons.get(reason, ())
    }
    assert {name for name in parts if f"`{name}" not in table} == set()
    for name in re.findall(
        r"`(\w+)\(", "".join(line.split("|")[2] for line in table.splitlines() if line.count("|") == 3)
    ):
        assert hasattr(linattn, name), name
