"""Stock hybrid models with our scans: the same numbers as transformers' own, and documents in a row kept apart."""

import copy
import importlib
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.testing import assert_close

from linattn.integrations.transformers import SpeedUp, speed_up
from linattn.integrations.transformers.hybrids import places as places_module
from linattn.integrations.transformers.hybrids.places import CONVOLUTION, SCANS, kernel_preference, places_in
from tests.integrations.transformers.hybrids.families import FAMILIES, SELECTIVE, VOCABULARY, make

LEAKING = ("qwen4_exp", "glm5_next")
CLOSE = {"rtol": 0.0, "atol": 1e-5}
LENGTHS = (1, 9, 3, 20, 4)
STARTS = torch.tensor([0, 1, 10, 13, 33, 37])

every_family = pytest.mark.parametrize("family", FAMILIES)
every_packing_family = pytest.mark.parametrize("family", [name for name in FAMILIES if name not in LEAKING + SELECTIVE])
SCANNING = ("qwen3_next", "kimi_linear", "mamba2", "minimax", "mamba")
every_scan = pytest.mark.parametrize("family", SCANNING)

_records: list[SpeedUp] = []


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    """Leave transformers as it was."""
    yield
    while _records:
        _records.pop().undo()


def sped_up(model: Any) -> Any:
    _records.append(speed_up(model))
    return model


def pair(family: str, **changes: Any) -> tuple[Any, Any]:
    """Return a model as it comes, and one with the same weights that was sped up."""
    return make(family, **changes), sped_up(make(family, **changes))


def tokens(b: int = 2, n: int = 37) -> Tensor:
    return torch.randint(3, VOCABULARY, (b, n))


def outputs(model: Any, *args: Any, **options: Any) -> Tensor:
    found = model(*args, **options)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def gradients(model: nn.Module, y: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(y, list(model.parameters()), upstream, allow_unused=True, materialize_grads=True)
    return {name: gradient for (name, _), gradient in zip(model.named_parameters(), found, strict=True)}


def assert_same_gradients(ours: dict[str, Tensor], stock: dict[str, Tensor]) -> None:
    """Compare each gradient, and all together. Those of decays are differences of larger sums."""
    apart = {name: (ours[name] - x).norm() for name, x in stock.items()}
    total = torch.stack([x.norm() for x in stock.values()]).norm()
    assert torch.stack(list(apart.values())).norm() <= 1e-5 * total
    wrong = {name: x for name, x in apart.items() if x > 5e-5 * stock[name].norm() + 1e-9 * total}
    assert not wrong


def test_every_model_of_transformers_with_a_scan_is_tested():
    names = "|".join(re.escape(name.partition(".")[0]) for name in SCANS if name != CONVOLUTION)
    folder = Path(transformers.__file__).parent / "models"
    found = [
        file.parent.name
        for file in folder.glob("*/modeling_*.py")
        if re.search(rf"^(def|class) ({names})\b", file.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert sorted(found) == sorted(FAMILIES)


@every_family
def test_logits_and_gradients_are_those_of_transformers(family):
    stock, ours = pair(family)
    x = tokens()
    expected, found = (outputs(model, x, use_cache=False) for model in (stock, ours))
    assert_close(found, expected, **CLOSE)
    upstream = torch.randn_like(expected)
    assert_same_gradients(gradients(ours, found, upstream), gradients(stock, expected, upstream))


@every_scan
def test_training_with_checkpointed_layers_gives_the_same_gradients(family):
    stock, ours = (model.train() for model in pair(family))
    ours.activation_checkpointing_enable()
    x = tokens(1, 20)
    expected, found = (outputs(model, x, use_cache=False) for model in (stock, ours))
    upstream = torch.randn_like(expected)
    assert_same_gradients(gradients(ours, found, upstream), gradients(stock, expected, upstream))


@every_family
@torch.no_grad()
def test_a_cache_continues_by_many_tokens_and_by_one(family):
    stock, ours = pair(family)
    caches: list[Any] = [None, None]
    for n in (20, 14, 1, 1):
        piece, found = tokens(2, n), []
        for i, model in enumerate((stock, ours)):
            output = model(piece, cache=caches[i], use_cache=True)
            caches[i] = output.cache
            found.append(output.logits if hasattr(output, "logits") else output.last_hidden_state)
        assert_close(found[1], found[0], **CLOSE)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "glm5_next"])
def test_greedy_generation_of_left_padded_prompts_is_that_of_transformers(family):
    stock, ours = pair(family)
    x, mask = tokens(2, 21), torch.ones(2, 21, dtype=torch.long)
    mask[0, :6] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    # generate reads in chunks only where it makes the cache itself; Mamba-1's layers forget the past at a chunk's start
    chunks = {} if family in ("mamba2", "minimax", *SELECTIVE) else {"prefill_chunk_size": 8}
    expected = stock.generate(x, attention_mask=mask, **options)
    assert torch.equal(ours.generate(x, attention_mask=mask, **options, **chunks), expected)


@torch.no_grad()
def test_left_padding_without_a_head_gives_the_numbers_of_transformers():
    stock, ours = pair("glm5_next")
    x, mask = tokens(2, 21), torch.ones(2, 21, dtype=torch.long)
    mask[0, :6] = 0
    assert_close(outputs(ours, x, attention_mask=mask), outputs(stock, x, attention_mask=mask), **CLOSE)


def positions() -> Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)


def numbers() -> Tensor:
    return torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).unsqueeze(0)


PACKED = {
    "positions": lambda: {"position_ids": positions()},
    "starts": lambda: {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS},
    "numbers": lambda: {"seq_idx": numbers().int()},
    "all": lambda: {"position_ids": positions(), "seq_idx": numbers(), "cu_seq_lens_q": STARTS},
    "mask": lambda: {"position_ids": positions(), "attention_mask": torch.ones(1, 37)},
    "starts beside plain positions": lambda: {"cu_seq_lens_q": STARTS, "position_ids": torch.arange(37).unsqueeze(0)},
}


def separately(stock: Any, x: Tensor, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.cat([outputs(stock, part, use_cache=False) for part in x.split(lengths, dim=1)], dim=1)


@every_packing_family
@torch.no_grad()
def test_packed_is_separate(family):
    (stock, ours), x = pair(family), tokens(1)
    separate = separately(stock, x)
    assert_close(outputs(ours, x, position_ids=positions()), separate, **CLOSE)
    # documents that see one another give other numbers
    assert not torch.allclose(outputs(ours, x), separate, atol=0.01)


@pytest.mark.parametrize("told", PACKED)
@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "granitemoehybrid"])
@torch.no_grad()
def test_documents_are_told_in_any_way(family, told):
    (stock, ours), x = pair(family), tokens(1)
    assert_close(outputs(ours, x, **PACKED[told]()), separately(stock, x), **CLOSE)


@pytest.mark.parametrize("family", [name for name in SCANNING if name not in SELECTIVE])
def test_gradients_of_packed_rows_are_those_of_separate_ones(family):
    (stock, ours), x = pair(family), tokens(1)
    separate, packed = separately(stock, x), outputs(ours.train(), x, position_ids=positions())
    upstream = torch.randn_like(packed)
    assert_same_gradients(gradients(ours, packed, upstream), gradients(stock, separate, upstream))


@torch.no_grad()
def test_rows_of_a_batch_hold_documents_of_their_own():
    stock, ours = pair("qwen3_next")
    x, cuts = tokens(2), (LENGTHS, (30, 7))
    place = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in cuts])
    rows = [separately(stock, row, cut) for row, cut in zip(x.split(1), cuts, strict=True)]
    assert_close(outputs(ours, x, position_ids=place), torch.cat(rows), **CLOSE)


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
@torch.no_grad()
def test_the_collator_of_transformers_tells_documents(family):
    (stock, ours), texts = pair(family), [list(range(3, 3 + length)) for length in (5, 9, 2)]
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collate([{"input_ids": text} for text in texts])
    separate = torch.cat([outputs(stock, torch.tensor([text]), use_cache=False) for text in texts], dim=1)
    assert_close(ours(**batch).logits, separate, **CLOSE)


@torch.no_grad()
def test_our_attention_between_our_scans_keeps_documents_apart_too():
    stock, ours, x = make("qwen3_next"), make("qwen3_next"), tokens(1)
    for model in (stock, ours):
        model.set_attn_implementation("linattn:elu")
    assert_close(outputs(sped_up(ours), x, position_ids=positions()), separately(stock, x), **CLOSE)


@torch.no_grad()
def test_positions_of_text_and_images_tell_documents_by_those_of_text():
    _, ours = pair("qwen3_5")
    x, place = tokens(1), positions().expand(4, 1, -1)
    assert_close(outputs(ours, x, position_ids=place), outputs(ours, x, position_ids=positions()), rtol=0, atol=0)


@pytest.mark.parametrize("family", LEAKING + SELECTIVE)
def test_models_that_mix_documents_elsewhere_refuse_packed_rows(family, capsys):
    _, ours = pair(family)
    assert "rows of several documents" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"cannot keep the documents of a row apart: .* documents"):
        ours(tokens(1), position_ids=positions())


@torch.no_grad()
def test_without_these_parts_they_keep_documents_apart():
    for family, changes in (
        ("qwen4_exp", {"ple_layer_ids": []}),
        ("glm5_next", {"layer_types": ["linear_attention"] * 3}),
    ):
        stock, ours = pair(family, **changes)
        x = tokens(1)
        assert_close(outputs(ours, x, position_ids=positions()), separately(stock, x), **CLOSE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_ids": positions(), "use_cache": True}, "give use_cache=False"),
        ({"position_ids": positions(), "attention_mask": torch.tensor([[0, 0] + [1] * 35])}, "give no attention_mask"),
        ({"seq_idx": numbers(), "position_ids": positions().flip(-1)}, "position_ids restart at other tokens"),
    ],
)
def test_what_packed_rows_do_not_go_with_is_refused(options, message):
    _, ours = pair("bamba")
    with pytest.raises(ValueError, match=message):
        ours(tokens(1), **options)


def test_starts_of_documents_belong_to_one_row():
    _, ours = pair("mamba2")
    with pytest.raises(ValueError, match="cu_seq_lens_q must go with one row of tokens, but there are 2"):
        ours(tokens(2), cu_seq_lens_q=STARTS)


def test_a_cache_has_no_documents():
    _, ours = pair("qwen3_next")
    past = ours(tokens(1, 5), use_cache=True).cache
    with pytest.raises(ValueError, match="have no cache to continue"):
        ours(tokens(1), cache=past, position_ids=positions())


def test_positions_of_images_alone_do_not_tell_documents():
    _, ours = pair("qwen3_5")
    place = torch.arange(37).expand(3, 1, -1)
    with pytest.raises(ValueError, match=r"need position_ids of text, but they are \(3, 1, 37\)"):
        ours(tokens(1), position_ids=place, cu_seq_lens_q=STARTS)


@torch.no_grad()
def test_one_document_is_a_row_like_any_other():
    stock, ours = pair("qwen3_next")
    x = tokens(1, 9)
    found = ours(x, cu_seq_lens_q=torch.tensor([0, 9]), use_cache=True)
    assert_close(found.logits, outputs(stock, x), **CLOSE)
    assert found.cache is not None
    with pytest.raises(ValueError, match="You must specify exactly one of input_ids or inputs_embeds"):
        ours()


@every_scan
@torch.no_grad()
def test_other_models_of_the_class_keep_their_numbers(family):
    stock, x = make(family), tokens(1)
    before = outputs(stock, x)
    ours = outputs(sped_up(make(family)), x)
    assert torch.equal(outputs(stock, x), before)
    assert not torch.equal(ours, before)


@torch.no_grad()
def test_other_models_of_the_class_keep_their_errors():
    stock, x = make("qwen3_next"), tokens(1)
    sped_up(make("qwen3_next"))
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        stock(x, cu_seq_lens_q=STARTS)


@every_scan
@torch.no_grad()
def test_undo_restores_every_object_and_every_bit(family):
    model, x = make(family), tokens()
    places = set().union(*(places_in(layer) for layer in model.modules()))
    functions, before = {place: place.read() for place in places}, outputs(model, x, use_cache=False)
    first, second = speed_up(model), speed_up(make(family))
    assert all(place.read() is not function for place, function in functions.items())
    second.undo()
    assert_close(outputs(model, x, use_cache=False), before, **CLOSE)
    first.undo()
    first.undo()
    assert all(place.read() is function for place, function in functions.items())
    assert not any(layer._forward_pre_hooks for layer in model.modules())
    assert torch.equal(outputs(model, x, use_cache=False), before)


def test_the_report_names_what_was_replaced_and_what_was_not(capsys):
    record = speed_up(make("qwen3_next"))
    assert capsys.readouterr().out == f"{record}\n"
    by = "torch_chunk_gated_delta_rule by causal_delta_attention"
    assert record.replaced == {f"model.layers.{i}.linear_attn": by for i in (0, 2)}
    assert record.kept.keys() == {"Qwen3NextAttention", "torch_recurrent_gated_delta_rule"}
    assert f"replaced in 2 layers: {by}" in str(record)
    assert "kept: Qwen3NextAttention (softmax attention" in str(record)


def test_models_without_a_scan_are_refused():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 9}
    llama = transformers.LlamaConfig(**sizes, num_attention_heads=2, intermediate_size=16)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no scan .* LlamaAttention: softmax"):
        speed_up(transformers.LlamaForCausalLM(llama))
    with pytest.raises(ValueError, match=r"model must be an nn\.Module, but is a str"):
        speed_up("state-spaces/mamba2-130m")
    with pytest.raises(ValueError, match="Mamba2Block is no model of transformers, nor does it hold one"):
        speed_up(make("mamba2").backbone.layers[0])
    model = sped_up(make("mamba2"))
    with pytest.raises(ValueError, match="sped up already"):
        speed_up(model)


def with_other_arguments(query: Tensor, another: Tensor, chunk_size: int = 32, **kwargs: Any) -> None: ...


@every_scan
def test_functions_with_other_arguments_are_refused_and_stay(family, monkeypatch):
    model = make(family)
    places = {place for layer in model.modules() for place in places_in(layer)}
    place = next(place for place in places if place.name != CONVOLUTION)
    functions = {place: place.read() for place in places}
    owner, name = importlib.import_module(place.module), place.name
    if family == "minimax":
        owner, name = owner.MiniMaxLightningAttention, "forward"
        # the layer is known by its name
        monkeypatch.setattr(with_other_arguments, "__qualname__", place.name)
        monkeypatch.setattr(with_other_arguments, "__module__", place.module)
    monkeypatch.setattr(owner, name, with_other_arguments)
    message = f"{place.name} of transformers .* is (query: .*another: .*, but linattn replaces (.*, as in 5.24"
    with pytest.raises(ImportError, match=message.replace("(", r"\(")):
        speed_up(model)
    assert place.read() is with_other_arguments
    assert all(other.read() is function for other, function in functions.items() if other != place)


def test_a_cache_by_another_name_is_refused(monkeypatch):
    """It would not be found among the arguments, and states be read wrongly."""
    model = make("qwen3_next")
    functions = {place: place.read() for layer in model.modules() for place in places_in(layer)}

    def forward(input_ids: Any = None, states: Any = None, **kwargs: Any) -> None: ...

    monkeypatch.setattr(model.model, "forward", forward)
    with pytest.raises(ImportError, match=r"Qwen3NextModel of transformers .* takes no argument `cache`, but linattn"):
        speed_up(model)
    assert all(place.read() is function for place, function in functions.items())


def test_kernels_of_a_package_come_first(monkeypatch):
    layer = make("qwen3_next").model.layers[0].linear_attn
    monkeypatch.setattr(places_module, "find_spec", lambda package: package == "fla" or None)
    places = places_in(layer)
    assert not kernel_preference(layer, places)

    def on_a_gpu() -> Iterator[Any]:
        yield SimpleNamespace(device=torch.device("cuda"))

    monkeypatch.setattr(layer, "parameters", on_a_gpu)
    assert kernel_preference(layer, places) == "fla is installed and has kernels for cuda"
    monkeypatch.undo()
    monkeypatch.setattr(layer, "parameters", on_a_gpu)
    assert not kernel_preference(layer, places)


@torch.no_grad()
def test_a_model_inside_of_another_module_is_sped_up_alone():
    inner, x = make("mamba2").backbone, tokens(1)
    expected = torch.cat([outputs(inner, part, use_cache=False) for part in x.split(LENGTHS, dim=1)], dim=1)
    sped_up(nn.ModuleDict({"one": inner, "two": nn.Linear(2, 2)}))
    assert_close(outputs(inner, x, position_ids=positions()), expected, **CLOSE)


@torch.no_grad()
def test_copies_and_pickles_stay_sped_up():
    model, x = sped_up(make("mamba2")), tokens(1)
    packed = outputs(model, x, position_ids=positions())
    others = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    _records.pop().undo()
    for other in others:
        assert_close(outputs(other, x, position_ids=positions()), packed, rtol=0, atol=0)
        # it has put our functions back, which its own end would not
        sped_up(make("mamba2"))
        _records.pop().undo()


@torch.no_grad()
def test_layers_without_the_mark_of_their_model_stay_sped_up_in_copies_and_after_errors():
    model, x = sped_up(make("mamba")), tokens(1)
    found = outputs(model, x)
    with pytest.raises(RuntimeError):
        model.backbone.layers[0].mixer(torch.zeros(1, 5, 3))
    _records.pop().undo()
    stock = make("mamba")
    for other in copy.deepcopy(model), pickle.loads(pickle.dumps(model)):
        assert_close(outputs(other, x), outputs(stock, x), **CLOSE)
    assert torch.equal(outputs(model, x), outputs(stock, x))
    assert not torch.equal(found, outputs(stock, x))


@every_scan
@torch.no_grad()
def test_half_precision_is_as_close_to_float32_as_that_of_transformers(family):
    (stock, ours), x = pair(family), tokens()
    exact = outputs(stock, x, use_cache=False)
    found = [outputs(model.bfloat16(), x, use_cache=False) for model in (stock, ours)]
    assert found[1].dtype == found[0].dtype
    assert (found[1].float() - exact).norm() <= 1.2 * (found[0].float() - exact).norm()


@torch.no_grad()
def test_every_function_is_found_in_some_family():
    found = {place.name for family in SCANNING for layer in make(family).modules() for place in places_in(layer)}
    assert found == SCANS.keys()
