"""A state whose last tokens can be taken back. An earlier state is kept, too, with the inputs of all tokens since then:
to take tokens back, those before them are read again."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.ops.nested import map_state

Read = Callable[[Any, Any], tuple[Any, Any]]
"""Returns the outputs and the new state of a layer or model, from the inputs of the new tokens and the state before."""
REACH = 256
"""The number of tokens at the end of a long call that can be taken back."""


class Span(NamedTuple):
    """A run of tokens: the state before them, their inputs, and the function that reads them."""

    before: Any
    inputs: Any
    read: Read


class History:
    """The `state` of a layer or model. With `recording`, the tokens since the last `crop` can be taken back, or the
    last `REACH` of them if there are more, but none before a token that was not recorded. For this the inputs of at
    most 2 · `REACH` tokens are kept, and one or two earlier states. Inputs have their tokens in the dimension `axis`.
    No state is ever written to."""

    def __init__(self, axis: int):
        self.axis, self.recording = axis, False
        self.reset()

    def reset(self) -> None:
        self.state: Any = None
        self.spans: list[Span] = []
        self.continues = False

    def extend(self, read: Read, inputs: Any) -> Any:
        """Return the outputs of read(inputs, state), and keep the state that it returns. All tensors of the inputs and
        outputs have the tokens in the dimension `axis`."""
        if not self.recording:
            outputs, self.state = read(inputs, self.state)
            self.spans, self.continues = [], False
            return outputs
        head = self._length(inputs) - REACH
        if head <= 0:
            return self._record(read, inputs)
        # only the end is recorded, so that the memory does not grow with the text
        first, self.state = read(self._part(inputs, 0, head), self.state)
        self.spans, self.continues = [], False
        last = self._record(read, self._part(inputs, head, REACH))
        return _joined(first, last, self.axis)

    def crop(self, count: int) -> None:
        """Take the last `count` tokens back. Raises ValueError if that many are not recorded."""
        spans, self.continues = [*self.spans], False
        recorded = sum(self._length(span.inputs) for span in spans)
        if count > recorded:
            raise ValueError(
                f"the last {count} tokens cannot be taken back out of the state, which sums them up: "
                f"{recorded} are recorded. Call cache.activate_past_recording() before they are read, and crop no more "
                f"than {REACH}; to go back further, keep a copy of the cache"
            )
        state = self.state
        while count:
            span = spans.pop()
            left, state = self._length(span.inputs) - count, span.before
            count = max(-left, 0)
            if left > 0:
                spans.append(span._replace(inputs=self._part(span.inputs, 0, left)))
                state = span.read(spans[-1].inputs, span.before)[1]
        self.state, self.spans = state, spans

    def begin(self) -> Any:
        """Return the state before the first token of the text, None without a state. No recorded token is read."""
        if self.state is None:
            return None
        first = self.spans[0]
        return first.read(self._part(first.inputs, 0, 0), None)[1]

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to the rows of all tensors."""
        self.state = map_state(function, self.state)
        self.spans = [
            span._replace(before=map_state(function, span.before), inputs=map_state(function, span.inputs))
            for span in self.spans
        ]

    def _record(self, read: Read, inputs: Any) -> Any:
        before, last = self.state, self.spans[-1] if self.continues else None
        outputs, self.state = read(inputs, before)
        if last is not None and self._fits(last.inputs, inputs):
            self.spans[-1] = last._replace(inputs=_joined(last.inputs, inputs, self.axis))
        else:
            self.spans = [*self.spans[-1:], Span(before, inputs, read)]
        self.continues = True
        return outputs

    def _fits(self, first: Any, second: Any) -> bool:
        """Return whether two spans can be joined: not if they are too long together, or if only one has a mask."""
        short = self._length(first) + self._length(second) <= REACH
        forms = [map_state(lambda x: (*x.shape[: self.axis], *x.shape[self.axis + 1 :]), x) for x in (first, second)]
        return short and forms[0] == forms[1]

    def _length(self, inputs: Any) -> int:
        return _tensors(inputs)[0].shape[self.axis]

    def _part(self, inputs: Any, start: int, length: int) -> Any:
        return map_state(lambda x: x.narrow(self.axis, start, length), inputs)


def _tensors(nested: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_state(found.append, nested)
    return found


def _joined(first: Any, second: Any, axis: int) -> Any:
    following = iter(_tensors(second))
    return map_state(lambda x: torch.cat([x, next(following)], axis), first)
