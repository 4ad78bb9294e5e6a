"""The thread that runs the model: a continuous batch, which the requests of an event loop join and leave."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
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


class Job:
    """A `request` in the batch, with its `number` there. Each new token comes into the queue `events`, after the
    `index` of the request and with whether it is the last. An error ends a request: ValueError if the batch does not
    take it, ApiError if the model fails or the engine is closed."""

    def __init__(self, request: Request, index: int, events: "Events") -> None:
        self.request, self.index, self.events = request, index, events
        self.number: int | None = None


Events = asyncio.Queue[tuple[int, Event]]


class Engine:
    """Runs the model in a thread for at most `size` rows, and takes as many requests and `queue` more, which wait.

    The methods that begin with `_run` belong to the thread, all others to the event loop."""

    def __init__(self, model: TokenModel, *, size: int, queue: int, cache: PrefixCache | None) -> None:
        self.batch = ContinuousBatch(model, size=size, cache=cache)
        self.limit, self.open = size + queue, set[Job]()
        self._jobs = dict[int, Job]()
        self._commands = SimpleQueue[tuple[Callable[[Job], None], Job] | None]()
        self.thread = threading.Thread(target=self._run, name="linattn engine", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.thread.start()

    @contextmanager
    def generate(self, requests: Sequence[Request]) -> Iterator[list[Job]]:
        """Generate while the block runs; at its end the rows are free. All requests have one queue of events. Raise
        ApiError if there are too many of them."""
        if not self.thread.is_alive():
            raise ApiError(503, "the server is shutting down")
        if len(requests) > self.limit:
            raise ApiError(400, f"one request has at most {self.limit} choices, but there are {len(requests)}")
        if len(self.open) + len(requests) > self.limit:
            raise ApiError(429, "the queue is full: try again later")
        events = Events()
        jobs = [Job(request, index, events) for index, request in enumerate(requests)]
        for job in jobs:
            self.open.add(job)
            self._commands.put((self._run_add, job))
        try:
            yield jobs
        finally:
            for job in jobs:
                self.cancel(job)

    def cancel(self, job: Job) -> None:
        self.open.discard(job)
        self._commands.put((self._run_cancel, job))

    async def close(self) -> None:
        """End the thread after its step, and the requests that are left with an ApiError."""
        self._commands.put(None)
        await asyncio.to_thread(self.thread.join, PATIENCE)
        self._deliver([(job, ApiError(503, "the server is shutting down")) for job in self.open])

    def _deliver(self, events: list[tuple[Job, Event]]) -> None:
        for job, event in events:
            job.events.put_nowait((job.index, event))
            if isinstance(event, Exception) or event[1]:
                self.open.discard(job)

    def _run(self) -> None:
        while True:
            while not self.batch or not self._commands.empty():
                if (command := self._commands.get()) is None:
                    return
                act, job = command
                act(job)
            self._run_step()

    def _run_add(self, job: Job) -> None:
        try:
            job.number = self.batch.add(job.request)
        except Exception as error:
            self._run_deliver([(job, error if isinstance(error, ValueError) else _failure(error))])
        else:
            self._jobs[job.number] = job

    def _run_cancel(self, job: Job) -> None:
        # numbers of requests that ended with the whole batch may be those of others now
        if job.number is not None and self._jobs.get(job.number) is job:
            del self._jobs[job.number]
            self.batch.cancel(job.number)

    def _run_step(self) -> None:
        try:
            new = self.batch.step()
        except LogitsError as error:
            for number in error.requests:
                self.batch.cancel(number)
            self._run_deliver([(self._jobs.pop(number), _failure(error)) for number in error.requests])
        except Exception as error:
            # such as a full memory: later requests find an empty batch
            failed, self._jobs = list(self._jobs.values()), {}
            self.batch = ContinuousBatch(self.batch.model, size=self.batch.size, cache=self.batch.cache)
            self._run_deliver([(job, _failure(error)) for job in failed])
        else:
            self._run_deliver([(self._jobs[number], (token, last)) for number, token, last in new])
            for number in (number for number, _, last in new if last):
                del self._jobs[number]

    def _run_deliver(self, events: list[tuple[Job, Event]]) -> None:
        # the loop is closed if the process ends
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver, events)


def _failure(error: Exception) -> ApiError:
    logging.getLogger(__name__).error("a request has failed", exc_info=error)
    return ApiError(500, f"the model has failed: {error}")
