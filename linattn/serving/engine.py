"""The thread that runs the model: a continuous batch, which the requests of an event loop join and leave."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue

from linattn.generation import ContinuousBatch, Request
from linattn.generation.batches import LogitsError
from linattn.models.token_model import TokenModel
from linattn.serving.errors import ApiError
from linattn.states import PrefixCache

Event = tuple[int, bool] | Exception
# the seconds in which a step of the model must end at the end of the process, which then ends without it
PATIENCE = 5.0


class TokenQueue(asyncio.Queue[Event]):
    """The new tokens of a `request`, each with whether it is the last. An error ends them: ValueError if the batch does
    not take the request, ApiError if the model fails or the engine is closed. `number` is that in the batch."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.request = request
        self.number: int | None = None


class Engine:
    """Runs the model in a thread for at most `size` rows, and takes as many requests and `queue` more, which wait.

    The methods that begin with `_run` belong to the thread, all others to the event loop."""

    def __init__(self, model: TokenModel, *, size: int, queue: int, cache: PrefixCache | None) -> None:
        self.batch = ContinuousBatch(model, size=size, cache=cache)
        self.limit, self.open = size + queue, set[TokenQueue]()
        self._queues = dict[int, TokenQueue]()
        self._commands = SimpleQueue[tuple[Callable[[TokenQueue], None], TokenQueue] | None]()
        self.thread = threading.Thread(target=self._run, name="linattn engine", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.thread.start()

    @contextmanager
    def generate(self, request: Request) -> Iterator[TokenQueue]:
        """Generate while the block runs; at its end the row is free. Raise ApiError if there are too many requests."""
        if not self.thread.is_alive():
            raise ApiError(503, "the server is shutting down")
        if len(self.open) >= self.limit:
            raise ApiError(429, "the queue is full: try again later")
        tokens = TokenQueue(request)
        self.open.add(tokens)
        self._commands.put((self._run_add, tokens))
        try:
            yield tokens
        finally:
            self.open.discard(tokens)
            self._commands.put((self._run_cancel, tokens))

    async def close(self) -> None:
        """End the thread after its step, and the requests that are left with an ApiError."""
        self._commands.put(None)
        await asyncio.to_thread(self.thread.join, PATIENCE)
        self._deliver([(tokens, ApiError(503, "the server is shutting down")) for tokens in self.open])

    def _deliver(self, events: list[tuple[TokenQueue, Event]]) -> None:
        for tokens, event in events:
            tokens.put_nowait(event)
            if isinstance(event, Exception) or event[1]:
                self.open.discard(tokens)

    def _run(self) -> None:
        while True:
            while not self.batch or not self._commands.empty():
                if (command := self._commands.get()) is None:
                    return
                act, tokens = command
                act(tokens)
            self._run_step()

    def _run_add(self, tokens: TokenQueue) -> None:
        try:
            tokens.number = self.batch.add(tokens.request)
        except Exception as error:
            self._run_deliver([(tokens, error if isinstance(error, ValueError) else _failure(error))])
        else:
            self._queues[tokens.number] = tokens

    def _run_cancel(self, tokens: TokenQueue) -> None:
        # numbers of requests that ended with the whole batch may be those of others now
        if tokens.number is not None and self._queues.get(tokens.number) is tokens:
            del self._queues[tokens.number]
            self.batch.cancel(tokens.number)

    def _run_step(self) -> None:
        try:
            new = self.batch.step()
        except LogitsError as error:
            for number in error.requests:
                self.batch.cancel(number)
            self._run_deliver([(self._queues.pop(number), _failure(error)) for number in error.requests])
        except Exception as error:
            # such as a full memory: later requests find an empty batch
            failed, self._queues = list(self._queues.values()), {}
            self.batch = ContinuousBatch(self.batch.model, size=self.batch.size, cache=self.batch.cache)
            self._run_deliver([(tokens, _failure(error)) for tokens in failed])
        else:
            self._run_deliver([(self._queues[number], (token, last)) for number, token, last in new])
            for number in (number for number, _, last in new if last):
                del self._queues[number]

    def _run_deliver(self, events: list[tuple[TokenQueue, Event]]) -> None:
        # the loop is closed if the process ends
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver, events)


def _failure(error: Exception) -> ApiError:
    logging.getLogger(__name__).error("a request has failed", exc_info=error)
    return ApiError(500, f"the model has failed: {error}")
