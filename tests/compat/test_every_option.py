"""Every parameter of every constructor, in every setting, changes what the model does, or is named in a warning, or is
refused.

The constructors' signatures are walked, so a parameter without a row here fails. Weights are set by their names and
random features by one seed: an option that only moved the random generator would change nothing."""

import importlib
import inspect
import pkgutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from linattn import compat
from linattn.attention.linformer import LearnedProjection
from linattn.compat import fast_transformers, linear_attention_transformer, linformer, performer_pytorch
from linattn.compat.linear_attention_transformer import (
    Autopadder,
    ImageLinearAttention,
    LinearAttentionTransformer,
    LinearAttentionTransformerLM,
    LinformerContextSettings,
    LinformerSettings,
)
from linattn.compat.linear_multihead_attention import LinearMultiheadAttention
from linattn.compat.performer_pytorch import (
    Attention,
    CrossAttention,
    FastAttention,
    Performer,
    PerformerEncDec,
    PerformerLM,
    ProjectionUpdater,
    SelfAttention,
)
from linattn.feature_maps import HyperbolicFavorFeatureMap, redraw_features_

N, DIM, VOCABULARY = 24, 16, 19
Options = Mapping[str, Any]


class Case(NamedTuple):
    """`required` is given always, `values` are what each parameter is changed to, in each of `settings`; `observe`
    gives all that a model does. `needed` are parameters that must be given, but have no effect in some settings,
    `refused` those that can never be anything but their default."""

    constructor: type
    required: Options
    values: Options
    settings: Mapping[str, Options]
    observe: Callable[[Any], Iterator[Any]]
    needed: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


def vectors(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def tokens(n: int = N) -> Tensor:
    return torch.randint(VOCABULARY, (2, n), generator=torch.Generator().manual_seed(1))


def context(model: nn.Module) -> dict[str, Tensor]:
    takes = getattr(model, "receives_context", False) or getattr(getattr(model, "performer", model), "cross_attend", 0)
    return {"context": vectors(2, 9, DIM)} if takes else {}


def of_vectors(model: Any) -> Iterator[Any]:
    yield model(vectors(2, N, DIM), **context(model))
    yield model(vectors(2, N, DIM), **context(model))


def of_tokens(model: Any) -> Iterator[Any]:
    yield model(tokens(), **context(model))
    yield model(tokens(), **context(model))


def of_cross_attention(model: CrossAttention) -> Iterator[Any]:
    yield model(vectors(2, N, DIM), vectors(2, 9, DIM))
    yield model(vectors(2, N, DIM), vectors(2, 9, DIM))


def of_heads(model: FastAttention) -> Iterator[Any]:
    yield model(*vectors(3, 2, 4, N, model.dim_heads))


def of_memory(model: Any) -> Iterator[Any]:
    yield model(vectors(2, N, DIM), vectors(2, 9, DIM))


def of_image(model: ImageLinearAttention) -> Iterator[Any]:
    yield model(vectors(2, DIM, 6, 5))


def of_torch(model: LinearMultiheadAttention) -> Iterator[Any]:
    x = vectors(2, N, DIM)
    yield from model(x, x, x)


def of_pair(model: PerformerEncDec) -> Iterator[Any]:
    yield model(tokens(), tokens())
    yield model(tokens(), tokens())
    # logits, if the encoder has a head
    yield model.enc(tokens()) if model.enc.gives_logits else None
    yield from of_generation(model.dec, context=model.enc(tokens()[:1], return_encodings=True).expand(8, -1, -1))


def of_wrapper(model: Any) -> Iterator[Any]:
    yield model(tokens(), return_loss=True)
    yield from of_generation(model)


def of_generation(model: Any, **given: Tensor) -> Iterator[Any]:
    """Some rows end at once and are filled up."""
    starts, eos = torch.zeros(8, 4, dtype=torch.long), None
    for count in (1, 5):
        torch.manual_seed(0)
        y = model.generate(starts, count, eos_token=eos, temperature=9.0, filter_thres=0.0, **given)
        eos = int(y[0, 0])
        yield y


def of_updater(model: ProjectionUpdater) -> Iterator[Any]:
    for _ in range(3):
        model.redraw_projections()
        yield from (tensor.clone() for tensor in model.instance.state_dict().values())


@torch.no_grad()
def normalised(model: nn.Module) -> nn.Module:
    """Weights that depend on their names alone, and features that depend on their shapes alone."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    redraw_features_(model, torch.Generator().manual_seed(0))
    for part in model.modules():
        if isinstance(part, ProjectionUpdater):
            part.seed.fill_(7)
    return model


def watched(case: Case, model: nn.Module) -> list[Any]:
    """All that it does in training: outputs or the refusal, what its layers get, what it counts and what it saves."""
    seen: list[Any] = []
    for part in model.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            part.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape)))
    torch.manual_seed(0)
    try:
        seen.extend(case.observe(model.train()))
    except (ValueError, RuntimeError) as error:
        # on the meta device, and where another width is needed
        seen.append(str(error))
    seen.extend((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in model.state_dict().items())
    return [*seen, *(buffer.clone() for buffer in model.buffers())]


def same(one: list[Any], other: list[Any]) -> bool:
    if len(one) != len(other):
        return False
    return all(
        type(a) is type(b)
        and (a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b))
        if isinstance(a, Tensor)
        else a == b
        for a, b in zip(one, other, strict=True)
    )


PERFORMER = {
    "dim": 32,
    "depth": 1,
    "heads": 2,
    "dim_head": 6,
    "causal": True,
    "ff_mult": 2,
    "nb_features": 7,
    "feature_redraw_interval": 1,
    "reversible": True,
    "ff_chunks": 3,
    "generalized_attention": True,
    "kernel_fn": torch.sigmoid,
    "use_scalenorm": True,
    "use_rezero": True,
    "ff_glu": True,
    "ff_dropout": 0.5,
    "attn_dropout": 0.5,
    "cross_attend": True,
    "no_projection": True,
    "auto_check_redraw": False,
    "qkv_bias": False,
    "attn_out_bias": False,
    "shift_tokens": True,
    "local_attn_heads": (1, 2),
    "local_window_size": 5,
    "ortho_scaling": 1,
    "rotary_position_emb": True,
    "softmax_epsilon": 0.1,
    "kernel_epsilon": 0.1,
}
ATTENTION = {name: PERFORMER[name] for name in PERFORMER if name in inspect.signature(SelfAttention).parameters} | {
    "local_heads": 1,
    "dropout": 0.5,
    "qkv_bias": True,
}
LANGUAGE_MODEL = PERFORMER | {
    "num_tokens": 23,
    "max_seq_len": 20,
    "emb_dropout": 0.5,
    "tie_embed": True,
    "rotary_position_emb": False,
    "axial_position_emb": True,
    "axial_position_shape": (8, 8),
    "qkv_bias": True,
    "attn_out_bias": True,
}
KINDS = {
    "plain": {},
    "generalised": {"generalized_attention": True},
    "no projection": {"no_projection": True},
    "causal": {"causal": True},
    "never redrawn": {"feature_redraw_interval": None},
}
STACKS = KINDS | {
    "local": {"local_attn_heads": 2},
    "all local": {"local_attn_heads": 4},
    "all local, of a context": {"local_attn_heads": 4, "cross_attend": True},
    "scale norm": {"use_scalenorm": True},
}
POSITIONS = {
    "learned": {"rotary_position_emb": False},
    "axial": {"rotary_position_emb": False, "axial_position_emb": True},
}
LAYERS = {"dim": DIM, "depth": 2, "heads": 4, "dim_head": 4}
TRANSFORMER = {
    "dim": 32,
    "depth": 1,
    "max_seq_len": 30,
    "heads": 2,
    "dim_head": 6,
    "causal": True,
    "ff_chunks": 3,
    "ff_glu": True,
    "ff_dropout": 0.5,
    "attn_layer_dropout": 0.5,
    "attn_dropout": 0.5,
    "reversible": True,
    "blindspot_size": 4,
    "n_local_attn_heads": (2, 1),
    "local_attn_window_size": 4,
    "receives_context": True,
    "attend_axially": True,
    "linformer_settings": LinformerSettings(k=5),
    "context_linformer_settings": LinformerContextSettings(seq_len=9, k=5),
    "shift_tokens": True,
}
TRANSFORMERS = {
    "plain": {},
    "causal": {"causal": True},
    "local": {"n_local_attn_heads": 2, "local_attn_window_size": 8, "causal": True},
    "all local": {"n_local_attn_heads": 4, "local_attn_window_size": 8, "causal": True},
    "axial": {"attend_axially": True, "local_attn_window_size": 6},
    "of a context": {"receives_context": True},
    "Linformer": {"linformer_settings": LinformerSettings(k=8)},
}
EPFL = {
    "n_layers": 1,
    "n_heads": 2,
    "query_dimensions": 6,
    "value_dimensions": 6,
    "feed_forward_dimensions": 20,
    "model_dimensions": 20,
    "dropout": 0.5,
    "activation": "gelu",
    "final_normalization": False,
    "feature_map": HyperbolicFavorFeatureMap,
}
EPFL_SIZES = {"n_layers": 2, "n_heads": 4, "query_dimensions": 4, "value_dimensions": 4, "feed_forward_dimensions": 32}
LINFORMER = {
    "dim": 32,
    "seq_len": 30,
    "k": 5,
    "heads": 2,
    "dim_head": 6,
    "one_kv_head": True,
    "share_kv": True,
    "dropout": 0.5,
}
LINFORMERS = {"plain": {}, "one head of keys": {"one_kv_head": True}, "values are keys": {"share_kv": True}}
SIZES = {"num_tokens": VOCABULARY, "max_seq_len": 64}


def causal_performer() -> nn.Module:
    return normalised(PerformerLM(**SIZES, **LAYERS, causal=True, feature_redraw_interval=None))


def causal_transformer(**options: Any) -> Any:
    return normalised(LinearAttentionTransformerLM(**SIZES, **LAYERS, causal=True, **options))


def blocks() -> dict[str, Any]:
    """With something to pad to."""
    return {"n_local_attn_heads": 2, "local_attn_window_size": 32}


CASES = [
    Case(
        FastAttention,
        {"dim_heads": 4},
        {"dim_heads": 6}
        | {name: PERFORMER[name] for name in PERFORMER if name in inspect.signature(FastAttention).parameters},
        {name: options for name, options in KINDS.items() if name != "never redrawn"},
        of_heads,
    ),
    *(
        Case(
            kind,
            {"dim": DIM, "heads": 4, "dim_head": 4},
            ATTENTION,
            settings | {"local": {"local_heads": 2}},
            of_vectors,
        )
        # they have one constructor
        for kind, settings in (
            (Attention, {name: KINDS[name] for name in ("plain", "generalised")}),
            (SelfAttention, KINDS | {"all local": {"local_heads": 4}}),
        )
    ),
    Case(
        CrossAttention,
        {"dim": DIM, "heads": 4, "dim_head": 4},
        ATTENTION,
        {name: options for name, options in KINDS.items() if name != "causal"},
        of_cross_attention,
        refused=("causal", "local_heads", "local_window_size", "rotary_position_emb"),
    ),
    Case(Performer, LAYERS, PERFORMER, STACKS, of_vectors),
    # its stack is the Performer's, of the same options; what it adds is positions
    Case(
        PerformerLM,
        LAYERS | SIZES,
        LANGUAGE_MODEL,
        {name: STACKS[name] for name in ("plain", "generalised", "causal", "local", "all local")} | POSITIONS,
        of_tokens,
    ),
    Case(
        performer_pytorch.AutoregressiveWrapper,
        {"net": causal_performer},
        {"net": lambda: causal_performer().double(), "ignore_index": int(tokens()[0, 3]), "pad_value": 9},
        {"plain": {}},
        of_wrapper,
    ),
    Case(
        PerformerEncDec,
        {"dim": DIM}
        | {
            f"{part}_{name}": value
            for part in ("enc", "dec")
            for name, value in (LAYERS | SIZES).items()
            if name != "dim"
        },
        {
            "dim": 32,
            "ignore_index": int(tokens()[0, 3]),
            "pad_value": 9,
            "tie_token_embeds": True,
            "tie_token_embed": True,
            "no_projection": True,
        }
        | {
            f"{part}_{name}": value
            for part in ("enc", "dec")
            for name, value in (LANGUAGE_MODEL | {"cross_attend": part == "enc", "causal": part == "enc"}).items()
            if name != "dim"
        },
        {"plain": {}},
        of_pair,
    ),
    Case(
        ProjectionUpdater,
        {"instance": lambda: normalised(FastAttention(4)), "feature_redraw_interval": None},
        {"instance": lambda: normalised(FastAttention(4, 7)), "feature_redraw_interval": 1},
        {"plain": {}, "redrawn": {"feature_redraw_interval": 2}},
        of_updater,
    ),
    Case(
        LinearAttentionTransformer,
        {"dim": DIM, "depth": 2, "heads": 4, "max_seq_len": 64},
        TRANSFORMER | {"rotary": True},
        TRANSFORMERS,
        of_vectors,
        # only Linformer projects a sequence of that length; any other stack takes any length
        needed=("max_seq_len",),
    ),
    Case(
        LinearAttentionTransformerLM,
        LAYERS | SIZES,
        TRANSFORMER
        | {
            "num_tokens": 23,
            "max_seq_len": 20,
            "emb_dim": 6,
            "return_embeddings": True,
            "use_axial_pos_emb": False,
            "use_rotary_emb": True,
        },
        {name: options for name, options in TRANSFORMERS.items() if name not in ("axial", "Linformer")}
        | {
            "rotary": {"use_rotary_emb": True},
            "rotary, local": {"use_rotary_emb": True, "n_local_attn_heads": 2},
            "learned positions": {"use_axial_pos_emb": False},
            "learned positions, local": {"use_axial_pos_emb": False, "n_local_attn_heads": 2},
        },
        of_tokens,
        needed=("max_seq_len",),
    ),
    Case(
        linear_attention_transformer.AutoregressiveWrapper,
        {"net": causal_transformer},
        {"net": lambda: causal_transformer().double(), "ignore_index": int(tokens()[0, 3]), "pad_value": 9},
        {"plain": {}},
        of_wrapper,
    ),
    Case(
        Autopadder,
        {"net": lambda: causal_transformer(**blocks())},
        {"net": lambda: causal_transformer(**blocks()).double(), "pad_left": True},
        {"windows": {}, "no windows": {"net": causal_transformer}},
        lambda model: iter(
            [
                model.net.register_forward_pre_hook(lambda _, x: seen_by(model).append(x[0])) and None,
                model(tokens()),
                *seen_by(model),
            ]
        ),
    ),
    Case(
        ImageLinearAttention,
        {"chan": DIM},
        {
            "chan": 8,
            "chan_out": 5,
            "kernel_size": 3,
            "padding": 1,
            "stride": 2,
            "key_dim": 5,
            "value_dim": 6,
            "heads": 2,
            "norm_queries": False,
        },
        {"plain": {}, "kernels": {"kernel_size": 3}, "plain queries": {"norm_queries": False}},
        of_image,
    ),
    Case(
        LinearMultiheadAttention,
        {"embed_dim": DIM, "num_heads": 4},
        {
            "embed_dim": 8,
            "num_heads": 2,
            "dropout": 0.5,
            "bias": False,
            "add_bias_kv": True,
            "add_zero_attn": True,
            "kdim": 5,
            "vdim": 6,
            "seq_len": 30,
            "proj_k": 7,
            "param_sharing": "headwise",
            "batch_first": True,
            "device": "meta",
            "dtype": torch.float64,
            "return_weights": False,
            "projection": lambda: normalised(LearnedProjection(28, 7)),
        },
        {
            "plain": {},
            "headwise": {"param_sharing": "headwise"},
            "key-value": {"param_sharing": "key-value"},
            "layerwise": {"param_sharing": "layerwise"},
            "shared": {"param_sharing": "layerwise", "projection": lambda: normalised(LearnedProjection(32, 8))},
        },
        of_torch,
    ),
    Case(linformer.LinformerSelfAttention, {"dim": DIM, "seq_len": 32, "k": 8}, LINFORMER, LINFORMERS, of_vectors),
    Case(
        linformer.Linformer,
        {"dim": DIM, "seq_len": 32, "depth": 2, "k": 8},
        LINFORMER | {"depth": 1, "reversible": True},
        LINFORMERS,
        of_vectors,
    ),
    Case(
        linformer.LinformerLM,
        {"num_tokens": VOCABULARY, "dim": DIM, "seq_len": 32, "depth": 2, "k": 8},
        LINFORMER | {"depth": 1, "reversible": True, "num_tokens": 23},
        LINFORMERS,
        of_tokens,
    ),
    Case(
        fast_transformers.TransformerEncoder,
        EPFL_SIZES,
        EPFL | {"attention_type": "causal-linear"},
        {kind: {"attention_type": kind} for kind in ("full", "causal-full", "linear")},
        of_vectors,
    ),
    Case(
        fast_transformers.TransformerDecoder,
        EPFL_SIZES,
        EPFL
        | {
            "self_attention_type": "causal-full",
            "cross_attention_type": "linear",
            "cross_n_heads": 2,
            "cross_query_dimensions": 6,
            "cross_value_dimensions": 6,
            "cross_model_dimensions": 6,
        },
        {
            "full": {},
            "linear": {"self_attention_type": "causal-linear"},
            "asks linearly": {"self_attention_type": "linear", "cross_attention_type": "full"},
        },
        of_memory,
    ),
]


def seen_by(model: Autopadder) -> list[Tensor]:
    return model.__dict__.setdefault("seen", [])


def built(case: Case, options: Options) -> nn.Module:
    """A function stands for a module, which each model has to itself."""
    made = {
        name: value() if inspect.isfunction(value) and name in ("net", "instance", "projection") else value
        for name, value in (case.required | options).items()
    }
    return normalised(case.constructor(**made))


def public_constructors() -> dict[type, str]:
    """Return the modules that the packages of the folder list, each with its package."""
    names = [f"linattn.compat.{module.name}" for module in pkgutil.iter_modules(compat.__path__)]
    packages = {name: importlib.import_module(name) for name in names}
    listed = [
        (getattr(package, each), name) for name, package in packages.items() for each in getattr(package, "__all__", ())
    ]
    return {value: name for value, name in listed if inspect.isclass(value) and issubclass(value, nn.Module)}


def test_every_constructor_has_a_case():
    assert {ImageLinearAttention, LinearMultiheadAttention, PerformerLM} <= public_constructors().keys()
    cases = {case.constructor for case in CASES}
    without = [f"{name}.{kind.__name__}" for kind, name in public_constructors().items() if kind not in cases]
    assert not without, "constructors without a case"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.constructor.__name__)
@pytest.mark.usefixtures("unchecked")
def test_a_misspelt_required_argument_is_named(case):
    """Also where its absence alone would be an error that names another."""
    if not hasattr(case.constructor.__init__, "__signature__"):
        return
    for name in case.required:
        misspelt = {key if key != name else key + "s": value for key, value in case.required.items()}
        with pytest.raises(TypeError, match=f"takes no argument '{name}s' .did you mean '{name}'"):
            case.constructor(**misspelt)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.constructor.__module__ + "." + case.constructor.__name__)
def test_every_parameter_has_a_value(case):
    parameters = {
        name
        for name, parameter in inspect.signature(case.constructor).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    if case.constructor is PerformerEncDec:
        own = inspect.signature(PerformerLM).parameters.keys() - {"dim"}
        parameters |= {f"{part}_{name}" for part in ("enc", "dec") for name in own}
    assert parameters == case.values.keys()


class Outcome(NamedTuple):
    """What becomes of an option: whether the model does the same without it, and whether a warning names it."""

    idle: bool
    named: bool


def outcomes_of(case: Case, setting: Options) -> dict[str, Outcome]:
    """Change each parameter in this setting; one that is refused has no outcome."""
    before, found = watched(case, built(case, setting)), {}
    assert same(before, watched(case, built(case, setting))), "the same model must be seen to do the same"
    for name, value in case.values.items():
        if setting.get(name) is value or setting.get(name) == value:
            continue
        with suppress(ValueError), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            idle = same(before, watched(case, built(case, setting | {name: value})))
            found[name] = Outcome(idle, any(f" {name}=" in str(each.message) for each in caught))
    return found


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.constructor.__module__ + "." + case.constructor.__name__)
def test_every_option_has_an_effect_or_is_named_in_a_warning(case):
    """A warning names every option without effect in a setting, and no other. In some setting, each has an effect."""
    # those of a PerformerEncDec's parts have their settings in the case of PerformerLM
    of_parts = {name for name in case.values if case.constructor is PerformerEncDec and name[:4] in ("enc_", "dec_")}
    idle, wrong = case.values.keys() - of_parts, {}
    for label, setting in case.settings.items():
        outcomes = outcomes_of(case, setting)
        idle -= {name for name, outcome in outcomes.items() if not outcome.idle}
        wrong[label] = {name for name, outcome in outcomes.items() if outcome.idle != outcome.named} - {*case.needed}
    assert not any(wrong.values()), wrong
    assert idle == set(case.refused)
