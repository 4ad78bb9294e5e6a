"""The thread that runs the model: a continuous batch, which the requests of an event loop join and leave."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue

from linattn.generation import ContinuousBatch
from linattn.generation.batches import LogitsError
from linattn.models.token_model import TokenModel
from linattn.serving.protocol import ApiError, Choice
from linattn.states import PrefixCache

Event = tuple[int, bool] | Exception
"""The next token of a choice and whether it is the last; or an error that ends it, a ValueError if the batch does not
take its request."""
Events = asyncio.Queue[tuple[Choice, Event]]
# the seconds in which a step of the model must end at the end of the process, which then ends without it
PATIENCE = 5.0


class Engine:
    """Runs the model in a thread for at most `size` rows, and takes as many requests and `queue` more, which wait.

    The methods that begin with `_run` belong to the thread, all others to the event loop."""

    def __init__(self, model: TokenModel, *, size: int, queue: int, cache: PrefixCache | None) -> None:
        self.batch = ContinuousBatch(model, size=size, cache=cache)
        self.limit, self.open, self.ends = size + queue, dict[Choice, Events](), False
        self._choices = dict[int, Choice]()
        self._commands = SimpleQueue[tuple[Callable[[Choice], None], Choice] | None]()
        self.thread = threading.Thread(target=self._run, name="linattn engine", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.thread.start()

    @contextmanager
    def generate(self, choices: Sequence[Choice]) -> Iterator[Events]:
        """Generate while the block runs; at its end the rows are free. Raise ApiError if there are too many choices."""
        if self.ends or not self.thread.is_alive():
            raise ApiError(503, "the server is shutting down")
        if len(self.open) + len(choices) > self.limit:
            raise ApiError(429, "the queue is full: try again later")
        events = Events()
        self.open |= dict.fromkeys(choices, events)
        for choice in choices:
            self._commands.put((self._run_add, choice))
        try:
            yield events
        finally:
            for choice in choices:
                self.cancel(choice)

    def cancel(self, choice: Choice) -> None:
        self.open.pop(choice, None)
        self._commands.put((self._run_cancel, choice))

    async def close(self) -> None:
        """End the thread after its step, and the requests that are left with an ApiError."""
        self._commands.put(None)
        await asyncio.to_thread(self.thread.join, PATIENCE)
        self._deliver([(choice, ApiError(503, "the server is shutting down")) for choice in self.open])

    def _deliver(self, events: list[tuple[Choice, Event]]) -> None:
        for choice, event in events:
            if (queue := self.open.get(choice)) is not None:
                queue.put_nowait((choice, event))
            if isinstance(event, Exception) or event[1]:
                self.open.pop(choice, None)

    def _run(self) -> None:
        while True:
            while not self.batch or not self._commands.empty():
                if (command := self._commands.get()) is None:
                    return
                act, choice = command
                act(choice)
            self._run_step()

    def _run_add(self, choice: Choice) -> None:
        try:
            choice.number = self.batch.add(choice.request)
            self._choices[choice.number] = choice
        except Exception as error:
            self._run_deliver([(choice, error)])

    def _run_cancel(self, choice: Choice) -> None:
        if choice.number is not None:
            self._choices.pop(choice.number, None)
            self.batch.cancel(choice.number)

    def _run_step(self) -> None:
        try:
            new = self.batch.step()
        except Exception as error:
            # an error that is of no request, such as a full memory, ends all of them
            failed = error.requests if isinstance(error, LogitsError) else [*self._choices]
            for number in failed:
                self.batch.cancel(number)
            logging.getLogger(__name__).error("the model has failed", exc_info=error)
            explained = ApiError(500, f"the model has failed: {error}")
            self._run_deliver([(self._choices.pop(number), explained) for number in failed])
        else:
            self._run_deliver([(self._choices.pop(i) if last else self._choices[i], (x, last)) for i, x, last in new])

    def _run_deliver(self, events: list[tuple[Choice, Event]]) -> None:
        # the loop is closed if the process ends
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver, events)
