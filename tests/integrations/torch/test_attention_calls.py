"""`replace_attention` on models that call `F.scaled_dot_product_attention`: small ones here, and those of diffusers,
timm and torchvision with random weights. `make test TORCH=newest` has the last two, which need torchvision: there is
none for the torch of the lock."""

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from linattn import replace_attention
from linattn.attention import ATTENTIONS, traits

SIZES = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 6}


class Attention(nn.Module):
    """Attention as many models write it, causal or with a mask. Without a dimension of `heads`, there is one head."""

    def __init__(self, *, heads: bool = True, **options: Any) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads, self.options = nn.Linear(16, 48), nn.Linear(16, 16), heads, options

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        if not self.heads:
            q, k, v = (each.transpose(1, 2).flatten(2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, mask, **self.options)
        return self.proj(y.transpose(1, 2).flatten(2) if self.heads else y)


class Layers(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(**options), Attention(**options)])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, mask)
        return x


@dataclass(frozen=True)
class Case:
    """A model of a `package`, its inputs, and the end of the names of the modules to replace."""

    package: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    modules: str = ""
    refusal: str = ""
    """Why `elu` cannot replace all of its attention."""
    output: Callable[[Any], Tensor] = field(default=lambda y: y if isinstance(y, Tensor) else y[0])

    def build(self) -> tuple[nn.Module, dict[str, Any]]:
        pytest.importorskip(self.package, exc_type=(ImportError, RuntimeError), reason=f"needs {self.package}")
        model = self.make().double().eval()
        with torch.no_grad():
            # attention shows, and so do the parts that begin as zero
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight), alpha=0.2)
        inputs = self.inputs()
        return model, {k: x.double() if torch.is_floating_point(x) else x for k, x in inputs.items()}

    def replace(self, model: nn.Module, method: str) -> dict[str, nn.Module]:
        return replace_attention(model, method, where=lambda name, _: name.endswith(self.modules))


def diffusers(name: str, **options: Any) -> nn.Module:
    import diffusers

    return getattr(diffusers, name)(**SIZES, **options)


def timm(name: str, **options: Any) -> nn.Module:
    import timm

    sizes = {"img_size": 32, "num_classes": 5, **options}
    return timm.create_model(name, **sizes)


def torchvision(name: str, **options: Any) -> nn.Module:
    import torchvision

    return getattr(torchvision.models, name)(num_classes=5, **options)


def latents(channels: int, **others: Tensor) -> dict[str, Tensor]:
    return {"hidden_states": torch.randn(2, channels, 6, 6), "timestep": torch.tensor([3, 500]), **others}


def texts(channels: int) -> dict[str, Tensor]:
    """Return the states of texts, of which the second is shorter."""
    present = torch.arange(7) < torch.tensor([[7], [4]])
    return {"encoder_hidden_states": torch.randn(2, 7, channels), "encoder_attention_mask": present.long()}


def tokens(**others: Tensor) -> dict[str, Tensor]:
    return {"x": torch.randn(2, 9, 16), **others}


PRESENT = torch.arange(9) < torch.tensor([[9], [5]])
IMAGES = {"x": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))}
SMALL = {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
VIT = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 16}
SWINS = {"patch_size": [2, 2], "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": [4, 4]}
SWIN = {"patch_size": 2, "embed_dim": 8, "depths": (2, 1), "num_heads": (2, 2), "window_size": 4}
CASES = {
    "causal": Case("torch", lambda: Layers(is_causal=True), tokens),
    "scaled": Case("torch", lambda: Layers(scale=0.5), tokens),
    "padded": Case("torch", Layers, lambda: tokens(mask=PRESENT[:, None, None])),
    "padded by floats": Case("torch", Layers, lambda: tokens(mask=-1e9 * ~PRESENT[:, None, None])),
    "causal and padded": Case("torch", lambda: Layers(is_causal=True), lambda: tokens(mask=PRESENT[:, None, None])),
    "the same keys for all": Case("torch", Layers, lambda: tokens(mask=PRESENT[1:])),
    "other keys for each head": Case("torch", Layers, lambda: tokens(mask=PRESENT[:, None])),
    "one head": Case("torch", lambda: Layers(heads=False), tokens),
    "one head, padded": Case("torch", lambda: Layers(heads=False), lambda: tokens(mask=PRESENT[:, None])),
    "one head, the same keys for all": Case("torch", lambda: Layers(heads=False), lambda: tokens(mask=PRESENT[1:])),
    "causal by its mask": Case("torch", Layers, lambda: tokens(mask=torch.ones(9, 9).tril().bool())),
    "a bias": Case("torch", Layers, lambda: tokens(mask=torch.randn(9, 9)), refusal="adds to the scores"),
    "a window": Case(
        "torch", Layers, lambda: tokens(mask=torch.ones(9, 9).tril().triu(-2).bool()), refusal="hide the same keys"
    ),
    "DiT": Case(
        "diffusers",
        lambda: diffusers("DiTTransformer2DModel", num_embeds_ada_norm=1000),
        lambda: latents(4, class_labels=torch.tensor([1, 2])),
    ),
    "PixArt": Case(
        "diffusers",
        lambda: diffusers("PixArtTransformer2DModel", cross_attention_dim=16, caption_channels=12),
        lambda: latents(4, **texts(12)),
    ),
    "SANA": Case(
        "diffusers",
        lambda: diffusers(
            "SanaTransformer2DModel",
            in_channels=4,
            num_cross_attention_heads=2,
            cross_attention_head_dim=8,
            cross_attention_dim=16,
            caption_channels=12,
        ),
        lambda: latents(4, **texts(12)),
        modules="attn2",
        refusal=r"attn1 \(.*\) does not attend by F.scaled_dot_product_attention",
    ),
    "timm's ViT": Case("timm", lambda: timm("vit_tiny_patch16_224", **SMALL), lambda: IMAGES),
    "timm's EVA": Case("timm", lambda: timm("eva02_tiny_patch14_224", **SMALL), lambda: IMAGES),
    "timm's Swin": Case(
        "timm",
        lambda: timm("swin_tiny_patch4_window7_224", **SWIN),
        lambda: IMAGES,
        # by default it computes the scores itself, to add its relative positions
        refusal="does not attend by F.scaled_dot_product_attention",
    ),
    "torchvision's ViT": Case(
        "torchvision",
        lambda: torchvision("VisionTransformer", **VIT),
        lambda: IMAGES,
    ),
    "torchvision's Swin": Case(
        "torchvision",
        lambda: torchvision("SwinTransformer", **SWINS),
        lambda: IMAGES,
        refusal="does not attend by F.scaled_dot_product_attention",
    ),
}


def where(chosen: Callable[[Case], bool]) -> Any:
    names = [name for name, case in CASES.items() if chosen(case)]
    return pytest.mark.parametrize("case", [CASES[name] for name in names], ids=names)


def results(model: nn.Module, case: Case, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Return the output, and the gradient of each parameter."""
    y = case.output(model(*inputs.values()) if case.package in ("timm", "torchvision") else model(**inputs))
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=y.dtype)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad((y * weights).sum(), parameters, materialize_grads=True)
    return {"output": y, **dict(zip(names, gradients, strict=True))}


def elu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """The definition, with the arguments of `F.scaled_dot_product_attention`."""
    q, k = (F.elu(x) + 1 for x in (q if scale is None else q * scale * q.shape[-1] ** 0.5, k))
    weights = q @ k.mT
    if attn_mask is not None:
        weights = weights * (attn_mask if attn_mask.dtype == torch.bool else attn_mask == 0)
    weights = weights.tril() if is_causal else weights
    return weights @ v / weights.sum(-1, keepdim=True)


def takes_both() -> bool:
    """Tell whether torch's function takes a mask beside is_causal, as it does until 2.13."""
    x = torch.zeros(1, 1, 2, 2)
    try:
        F.scaled_dot_product_attention(x, x, x, torch.ones(2, 2).bool(), is_causal=True)
    except RuntimeError as error:
        assert "is_causal" in str(error)
        return False
    return True


@where(lambda case: not case.refusal or bool(case.modules))
def test_softmax_changes_nothing_and_elu_is_its_definition(case, monkeypatch):
    model, inputs = case.build()
    if case is CASES["causal and padded"] and not takes_both():
        pytest.skip("this torch refuses a mask beside is_causal, so no model calls it with both")
    stock, weights = results(model, case, inputs), dict(model.named_parameters())
    softmax = case.replace(model, "softmax")
    assert softmax and all(name.endswith(case.modules) for name in softmax)
    assert_close(results(model, case, inputs), stock, rtol=1e-9, atol=1e-12)
    case.replace(model, "elu")
    assert dict(model.named_parameters()) == weights
    found = results(model, case, inputs)
    for name, module in softmax.items():
        model.set_submodule(name, module)
    assert_close(results(model, case, inputs), stock, rtol=0, atol=0)
    monkeypatch.setattr(F, "scaled_dot_product_attention", elu)
    if case.package == "torchvision":
        # torch's module calls it in C++, where it cannot be replaced by the definition
        assert all(x.isfinite().all() for x in found.values())
    else:
        assert_close(found, results(model, case, inputs), rtol=1e-9, atol=1e-12)
    assert (found["output"] - stock["output"]).abs().max() > 1e-3 * stock["output"].abs().max()


@where(lambda case: bool(case.refusal))
def test_attention_that_elu_cannot_replace_is_refused_by_name(case):
    model, inputs = case.build()
    name = next(iter(replace_attention(model, "elu")))
    with pytest.raises(ValueError, match=case.refusal) as error:
        results(model, case, inputs)
    assert name in str(error.value)


@pytest.mark.parametrize("shape", [(9, 8), (8, 9), (2, 1, 1, 8), (9,)])
def test_a_mask_of_another_size_is_refused(shape):
    model = Layers()
    replace_attention(model, "elu")
    with pytest.raises(ValueError, match=rf"layers.0 .*attn_mask must be \(…, 9, 9\).* but is {re.escape(str(shape))}"):
        model(torch.randn(2, 9, 16), torch.ones(shape, dtype=torch.bool))


@pytest.mark.usefixtures("unchecked")
def test_a_mask_of_whole_numbers_is_refused():
    """As torch refuses it: zeros would hide nothing, as those of floats."""
    model = Layers()
    replace_attention(model, "elu")
    with pytest.raises(ValueError, match=r"attn_mask must be bool, True where it shows, or float, but is torch.int64"):
        model(torch.randn(2, 9, 16), torch.zeros(9, 9, dtype=torch.long))


@pytest.mark.parametrize("heads", [True, False])
def test_rows_of_a_batch_do_not_meet(heads):
    for method in ATTENTIONS:
        facts = traits(method)
        if facts.causal and not facts.learned and not facts.gated:
            model = Layers(heads=heads, is_causal=True).double().eval()
            replace_attention(model, method)
            x = torch.randn(4, 9, 16).double()
            assert_close(model(x), torch.cat([model(row) for row in x.split(1)]))


def test_a_copy_of_the_model_has_attention_of_its_own():
    case = CASES["causal"]
    model, inputs = case.build()
    case.replace(model, "elu")
    expected = results(model, case, inputs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_close(results(other, case, inputs), expected, rtol=0, atol=0)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(1)
            assert_close(other(**inputs), expected["output"], rtol=0, atol=0)
            for weight in model.parameters():
                weight.sub_(1)


def test_dropout_drops_keys_in_training():
    model = nn.Sequential(Attention(dropout_p=0.5)).double()
    model[0].proj = nn.Identity()
    replace_attention(model, "elu")
    x = torch.randn(400, 1, 16).double()
    # with a single key, the output of a head is its value, times 2 or 0
    factors = (model(x) / model[0].qkv(x)[..., 32:]).unflatten(-1, (2, 8))
    assert_close(factors, 2 * factors.mean(-1, keepdim=True).gt(1).double().expand_as(factors))
    assert 0.8 < factors.mean() < 1.2


@pytest.mark.parametrize(
    ("attention", "options", "message"),
    [
        ("elo", {}, "'elo'"),
        ("hedgehog", {}, "weights to learn"),
        ("gated_delta", {}, "weights to learn"),
        (lambda module: None, {}, "takes a name"),
        ("elu", {"max_length": 9}, "max_length"),
        ("elu", {"where": lambda name, module: False}, "chose no Attention of this Layers"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(attention, options, message):
    model = Layers()
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=message):
        replace_attention(model, attention, **options)
    assert dict(model.named_modules()) == before


class CheckpointingAttention(Attention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return checkpoint(super().forward, x, mask, use_reentrant=True)


def test_a_checkpoint_goes_around_attention_and_not_inside():
    """Inside, the backward pass would compute the gradients of softmax."""
    model, x = nn.Sequential(CheckpointingAttention()).double(), tokens()["x"].double().requires_grad_()
    replace_attention(model, "elu")
    with pytest.raises(ValueError, match=r"0 .*checkpoint .*: checkpoint the module as a whole"):
        model(x)
    model = nn.Sequential(Attention()).double()
    replace_attention(model, "elu")
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    checkpoint(model, x, use_reentrant=True).sum().backward()
    assert_close(x.grad, expected)


def test_a_forward_that_something_else_has_set_is_not_left_out():
    model = Layers()
    model.layers[1].forward = model.layers[1].forward
    with pytest.raises(ValueError, match=r"layers\.1 has a forward that something else has set"):
        replace_attention(model, "elu")
