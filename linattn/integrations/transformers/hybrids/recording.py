"""Caches of hybrid models whose last tokens can be taken back. Of each call since the last `crop`, a layer keeps the
states before it; to take back a part of a call, the scan reads the tokens again that stay."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from linattn.integrations.transformers.history import REACH, History

CALLS = 64
"""The number of calls since the last `crop` whose tokens can be taken back."""
_HISTORY = "linattn_history"
States = dict[int, Tensor | None]


class RecordedCall(NamedTuple):
    """A call of `length` tokens: the states of a layer before it, and the histories of its scans."""

    length: int
    conv_states: States
    recurrent_states: States
    histories: dict[int, History | None]


class RecordingLayer(LinearAttentionLayer):
    """A layer of a cache with recurrent states, whose `crop` is exact. `_recording_kind` combines this class with each
    of transformers' classes of such layers."""

    calls: deque[RecordedCall]

    @property
    def is_croppable(self) -> bool:
        return True

    def begin(self, length: int) -> None:
        """Keep the states before a call of so many tokens."""
        conv, recurrent = (
            {i: x if x is None else x.clone() for i, x in each.items()}
            for each in (self.conv_states, self.recurrent_states)
        )
        self.calls.append(RecordedCall(length, conv, recurrent, {}))

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **options: Any) -> Tensor:
        if self.calls:
            self.calls[-1].histories[state_idx] = vars(recurrent_states).pop(_HISTORY, None)
        return super().update_recurrent_state(recurrent_states, state_idx, **options)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back as many of the last tokens as the negative number says. Raises ValueError if more are to go than
        are recorded."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens, but tokens_to_remove is {tokens_to_remove}")
        count, calls = -tokens_to_remove, [*self.calls]
        conv, recurrent = self.conv_states, self.recurrent_states
        while calls and count >= calls[-1].length:
            length, conv, recurrent, _ = calls.pop()
            count -= length
        if count:
            if not calls or None in calls[-1].histories.values():
                raise ValueError(
                    f"{-tokens_to_remove} tokens cannot be taken back: call cache.activate_past_recording() before "
                    f"they are read, and crop no more than {CALLS} calls or {REACH} tokens of one"
                )
            for i, history in calls[-1].histories.items():
                assert history is not None
                history.crop(count)
                recurrent = recurrent | {i: history.state}
        if isinstance(self, DynamicLayer):
            # its keys and values; the first class would crop the states
            super(LinearAttentionCacheLayerMixin, self).crop(tokens_to_remove)  # pyright: ignore
        widths: Any = self.conv_kernel_size
        self.conv_states = {i: x if x is None else _end(x, count, widths[i]) for i, x in conv.items()}
        self.recurrent_states = recurrent
        self.is_conv_states_initialized = {i: x is not None for i, x in conv.items()}
        self.is_recurrent_states_initialized = {i: x is not None for i, x in recurrent.items()}
        self.has_previous_state = dict(self.is_conv_states_initialized)
        self.calls.clear()

    def reorder_cache(self, beam_idx: Any) -> None:
        super().reorder_cache(beam_idx)

        def reorder(x: Tensor) -> Tensor:
            return x.index_select(0, beam_idx.to(x.device))

        for _, conv, recurrent, histories in self.calls:
            for states in (conv, recurrent):
                states.update({i: reorder(x) for i, x in states.items() if x is not None})
            for history in histories.values():
                if history is not None:
                    history.map(reorder)

    def reset(self) -> None:
        self.calls.clear()
        super().reset()


def _end(x: Tensor, count: int, width: int) -> Tensor:
    """Return the last columns before the last `count`, with zeros in front if there are fewer than `width`."""
    x = x[..., : x.shape[-1] - count]
    return F.pad(x, (max(width - x.shape[-1], 0), 0))[..., -width:]


def begin_call(past: Any, length: int) -> bool:
    """Return whether a cache records its past. Its layers then do so for a call of so many tokens."""
    layers: list[Any] = past.layers if isinstance(past, Cache) else []
    recording = [i for i, x in enumerate(layers) if isinstance(x, LinearAttentionLayer) and x.record_past]
    for i in recording:
        if not isinstance(layers[i], RecordingLayer):
            layer = object.__new__(_recording_kind(type(layers[i])))
            vars(layer).update(vars(layers[i]), calls=deque(maxlen=CALLS))
            layers[i] = layer
        layers[i].begin(length)
    for layer in layers:
        if isinstance(layer, RecordingLayer) and not layer.record_past:
            layer.calls.clear()
    return bool(recording)


@cache
def _recording_kind(kind: type) -> type:
    return type(f"Recording{kind.__name__}", (RecordingLayer, kind), {})


def recorded(
    scan: Callable[..., Any], tokens: Sequence[str], state: str, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Call a scan. The state that it returns carries its history to the cache. `tokens` are the names of the arguments
    (b n …), and `state` is that of the state before them."""
    arguments = signature(scan).bind(*args, **options).arguments
    arguments |= arguments.pop("kwargs", {})
    history, before = History(1), arguments.get(state)
    # transformers writes to the state
    history.recording, history.state = True, before if before is None else before.clone()

    def read(inputs: Any, before: Any) -> Any:
        return scan(**arguments | dict(zip(tokens, inputs, strict=True)) | {state: before})

    y = history.extend(read, tuple(arguments[name] for name in tokens))
    vars(history.state)[_HISTORY] = history
    return y, history.state
