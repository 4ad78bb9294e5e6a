"""transformers' models over several processes, each with a part of every sequence: what `shard_sequence` does with
models after `speed_up`, and with those that attend by our methods."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from linattn.distributed.layers import foreign_layers
from linattn.distributed.sequence import SequenceSharding
from linattn.integrations.transformers.hybrids.packed_rows import cache_in, packing_obstacle
from linattn.integrations.transformers.hybrids.places import CONVOLUTION, SCANS, Place, Scan, places_in
from linattn.integrations.transformers.hybrids.scans import convolution, delta_rule
from linattn.integrations.transformers.hybrids.speed_up import Marker
from linattn.integrations.transformers.own_model.model import LinattnPreTrainedModel
from linattn.integrations.transformers.stock_attention.attention import HANDOVER, attention_of
from linattn.integrations.transformers.stock_attention.hooks import is_ours


def register() -> None:
    """Register transformers' models with `linattn.distributed`."""
    foreign_layers.register(PreTrainedModel, _stock_layers)
    foreign_layers.register(LinattnPreTrainedModel, lambda model: None)


def _stock_layers(model: PreTrainedModel) -> "StockLayers":
    return StockLayers(model)


class StockLayers:
    """The `layers` with states of a model of transformers, by name. Raises ValueError for a layer without a rule."""

    def __init__(self, model: PreTrainedModel):
        self.model, self.layers, mixers = model, dict[str, nn.Module](), list[str]()
        hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
        self.markers = [hook for hook in hooks if isinstance(hook, Marker)]
        if why := packing_obstacle(model):
            raise ValueError(f"{type(model).__name__} cannot be shared by ranks: {why}")
        for name, layer in model.named_modules():
            places, where = places_in(layer), f"{name}, a {type(layer).__name__},"
            if not places and not hasattr(layer, "is_causal"):
                continue
            mixers.append(name)
            if places:
                self._check_scan(where, layer, places)
            elif attention_of(layer) is None:
                _check_attention(where, layer)
            if places or attention_of(layer) is None:
                self.layers[name] = layer
        self.bases = _models_around(model, mixers)
        for base in self.bases:
            _check_positions(base)
        if any(hook.handover is not None for hook in self.markers) or any(HANDOVER in vars(x) for x in model.modules()):
            raise ValueError(f"this {type(model).__name__} is sharded already: call undo() of what that returned")

    def install(self, sharding: SequenceSharding) -> None:
        """Let the layers begin with the states that the ranks before leave."""
        scans = _ScanHandover(sharding)
        for marker in self.markers:
            sharding.replace(marker, "handover", scans)
        for name, layer in self.layers.items():
            if not places_in(layer):
                sharding.replace(layer, HANDOVER, _attention_handover(sharding, name))
        for base in self.bases:
            handle = base.register_forward_pre_hook(_BaseCall(base, sharding), with_kwargs=True, prepend=True)
            sharding.undo_by(handle.remove)
        for module in self.model.modules():
            if isinstance(module, PreTrainedModel) and "labels" in signature(module.forward).parameters:
                sharding.undo_by(module.register_forward_pre_hook(_refuse_labels, with_kwargs=True).remove)

    def _check_scan(self, where: str, layer: nn.Module, places: set[Place]) -> None:
        names = {place.name for place in places}
        if not self.markers:
            raise ValueError(f"{where} has a scan of transformers: call speed_up(model) first")
        for name in names - {CONVOLUTION}:
            if not SCANS[name].state:
                raise ValueError(f"{where} has a scan that takes no state, {name}, so it cannot be shared by ranks")
        if CONVOLUTION not in names and any(isinstance(part, nn.Conv1d) for part in layer.modules()):
            raise ValueError(f"{where} has a convolution of its own, whose last inputs are not handed on between ranks")


def _models_around(model: PreTrainedModel, layers: list[str]) -> list[PreTrainedModel]:
    """Return the innermost models around the layers, which make positions and caches."""
    models = {name: each for name, each in model.named_modules() if isinstance(each, PreTrainedModel)}
    around = {
        max((each for each in models if f"{layer}.".startswith(each and f"{each}.")), key=len) for layer in layers
    }
    return [models[name] for name in sorted(around)]


def _check_attention(where: str, layer: Any) -> None:
    implementation = getattr(getattr(layer, "config", None), "_attn_implementation", None)
    if not is_ours(implementation):
        raise ValueError(
            f"{where} attends by {implementation!r}, whose keys and values are not handed on between ranks: "
            "model.set_attn_implementation('linattn:softmax') computes the same, and hands them on"
        )
    if not layer.is_causal:
        raise ValueError(f"{where} is not causal: its tokens see those of later ranks")
    if getattr(layer, "sliding_window", None) and implementation not in ("linattn:softmax", "linattn:local"):
        raise ValueError(f"{where} has a sliding window, which {implementation} cannot keep to over several ranks")


def _check_positions(base: PreTrainedModel) -> None:
    names = [type(part).__name__ for part in base.modules()]
    found = next((name for name in names if "rotary" in name.lower() or "position" in name.lower()), None)
    if found is not None and "position_ids" not in signature(base.forward).parameters:
        raise ValueError(
            f"{type(base).__name__} has positions, {found}, but takes no position_ids, so those of later ranks would "
            "begin at 0"
        )


class _BaseCall:
    """A hook before the calls of a model that makes positions: they begin after the tokens of the ranks before. There
    is no cache, which would have the states of one rank only."""

    def __init__(self, base: PreTrainedModel, sharding: SequenceSharding):
        self.names, self.line = tuple(signature(base.forward).parameters), sharding.line

    def __call__(self, base: PreTrainedModel, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        arguments = dict(zip(self.names, args, strict=False)) | options
        if cache_in(arguments) is not None or arguments.get("use_cache"):
            raise ValueError("a model whose sequences are sharded takes no cache: give use_cache=False, and no cache")
        tokens = arguments.get("input_ids")
        tokens = arguments["inputs_embeds"] if tokens is None else tokens
        mask, n = arguments.get("attention_mask"), tokens.shape[1]
        if arguments.get("position_ids") is None and "position_ids" in self.names:
            padded = isinstance(mask, Tensor) and not bool(mask.all())
            counts = torch.stack(self.line.gather(torch.tensor([n, padded], device=self.line.device)))
            if counts[:, 1].any():
                raise ValueError("a model whose sequences are sharded and padded needs position_ids")
            positions = torch.arange(n, device=tokens.device) + int(counts[: self.line.rank, 0].sum())
            arguments["position_ids"] = positions.expand(len(tokens), -1)
        return (), {**arguments, "use_cache": False}


def _refuse_labels(model: PreTrainedModel, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    if (
        dict(zip(signature(model.forward).parameters, args, strict=False)).get("labels", options.get("labels"))
        is not None
    ):
        raise ValueError(
            "labels of a model whose sequences are sharded are moved before the sequence is cut: split_sequence "
            "moves them, and sequence_loss compares the logits with them"
        )


def _attention_handover(sharding: SequenceSharding, name: str) -> Callable[..., Tensor]:
    def attend(inner: Any, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        def extend(q: Tensor, past: Any) -> tuple[Tensor, Any]:
            return inner.extend(q, k, v, past, key_mask=key_mask)

        return sharding.exchange(extend, q, None, None, name)[0]

    return attend


class _ScanHandover:
    """Calls a scan with the state that the rank before leaves. It is the mark of calls of a sharded model, in the place
    of the numbers of documents."""

    def __init__(self, sharding: SequenceSharding):
        self.sharding = sharding

    def __call__(self, scan: Scan, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        function = scan.function
        arguments = signature(function).bind(*args, **options).arguments
        arguments |= arguments.pop("kwargs", {})
        if function is convolution:
            return self._convolve(arguments)
        flag = next(name for name in signature(function).parameters if "final_state" in name)
        first, wanted = scan.tokens[0], arguments.get(flag, False)

        def extend(x: Tensor, past: Any) -> tuple[Tensor, Any]:
            return function(**arguments | {first: x, scan.state: past, flag: True})

        y, after = self.sharding.exchange(extend, arguments[first], None, None, function.__name__)
        if function is delta_rule:
            return y, after if wanted else None
        return (y, after) if wanted else y

    def _convolve(self, arguments: dict[str, Any]) -> Tensor:
        width = arguments["weight"].shape[1] - 1

        def extend(x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
            past = x.new_zeros(*x.shape[:2], width) if past is None else past
            inputs = torch.cat([past, x], -1)
            extended: dict[str, Any] = {**arguments, "hidden_states": inputs}
            y = convolution(**extended).as_subclass(Tensor)
            return y[..., width:], inputs[..., x.shape[-1] :]

        return self.sharding.exchange(extend, arguments["hidden_states"], None, None, "convolution")[0]
