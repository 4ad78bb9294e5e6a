"""The HTTP server: limits, errors, streams, metrics, and an end that waits for running requests, but not for ever."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from linattn.serving.engine import Engine, Job
from linattn.serving.errors import ApiError
from linattn.serving.protocol import CHAT, COMPLETIONS, Call, Interface

# the bytes of a request, the seconds after which a client may try again, and those that running requests have to end
BODY, RETRY, GRACE = 2**20, 1, 5.0
# the status of a client that has left, as in nginx's logs
LEFT = 499
# the index of a choice, and more of its text
Piece = tuple[int, str]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Metrics:
    """The numbers for Prometheus, each server with its own."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        options: Any = {"registry": self.registry}
        self.requests = Counter("linattn_requests", "answers, by HTTP status", ["status"], **options)
        self.prompt_tokens = Counter("linattn_prompt_tokens", "tokens of prompts", **options)
        self.new_tokens = Counter("linattn_new_tokens", "tokens that were generated", **options)
        self.first_token = Histogram("linattn_first_token_seconds", "time to the first token", **options)
        add = partial(Gauge, **options)
        add("linattn_rows", "requests that have a row").set_function(lambda: engine.batch.num_rows)
        add("linattn_waiting", "requests that wait for a row").set_function(lambda: engine.batch.num_waiting)
        size = add("linattn_cache_bytes", "bytes of kept states")
        size.set_function(lambda: getattr(engine.batch.cache, "num_bytes", 0))


class Server:
    """Serves the model of an `interface` with an `engine`. A request gets `timeout` seconds."""

    def __init__(self, engine: Engine, interface: Interface, *, timeout: float) -> None:
        self.engine, self.interface, self.timeout, self.ends = engine, interface, timeout, False
        self.metrics = Metrics(engine)
        app = web.Application(client_max_size=BODY, middlewares=[self._count_and_explain])
        app.router.add_post("/v1/completions", partial(self._generate, COMPLETIONS))
        app.router.add_post("/v1/chat/completions", partial(self._generate, CHAT))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        # a handler whose client has left is cancelled, which frees the row
        self.runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)

    async def start(self, host: str, port: int) -> str:
        """Listen, and return the address. Raise OSError if that is impossible."""
        await self.runner.setup()
        try:
            await web.TCPSite(self.runner, host, port).start()
        except OSError:
            await self.runner.cleanup()
            raise
        self.engine.start()
        name, port, *_ = self.runner.addresses[0]
        return f"http://{f'[{name}]' if ':' in name else name}:{port}/v1"

    async def stop(self, grace: float = GRACE) -> None:
        """Refuse new requests, let the running ones end for `grace` seconds, and end the others."""
        self.ends, loop = True, asyncio.get_running_loop()
        until = loop.time() + grace
        while self.engine.open and loop.time() < until:
            await asyncio.sleep(0.02)
        await self.engine.close()
        await self.runner.cleanup()

    async def _generate(self, endpoint: Any, request: web.Request) -> web.StreamResponse:
        if self.ends:
            raise ApiError(503, "the server is shutting down")
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self.timeout):
                content = await request.read()
        except TimeoutError:
            raise ApiError(408, f"the body has not come within {self.timeout:g} seconds") from None
        call = await asyncio.to_thread(self.interface.read, endpoint, content)
        with self.engine.generate([choice.request for choice in call.choices]) as jobs:
            async with aclosing(self._pieces(call, jobs, started)) as pieces:
                if call.streams:
                    return await _stream(request, call, pieces)
                texts = [""] * len(call.choices)
                async for index, piece in pieces:
                    texts[index] += piece
                return web.json_response(call.complete(texts))

    async def _pieces(self, call: Call, jobs: list[Job], started: float) -> AsyncGenerator[Piece]:
        """Yield the pieces of the choices' texts. When the time is over, unfinished texts end."""
        open_choices = dict(enumerate(call.choices))
        while open_choices:
            try:
                async with asyncio.timeout_at(started + self.timeout):
                    index, event = await jobs[0].events.get()
            except TimeoutError:
                if not call.num_tokens:
                    raise ApiError(504, f"there is no token after {self.timeout:g} seconds") from None
                for index, choice in open_choices.items():
                    yield index, choice.finish("length")
                return
            if isinstance(event, Exception):
                raise event
            if (choice := open_choices.get(index)) is None:
                # a token that came after a stop text
                continue
            if not call.num_tokens:
                self.metrics.prompt_tokens.inc(call.num_prompt_tokens)
                self.metrics.first_token.observe(asyncio.get_running_loop().time() - started)
            self.metrics.new_tokens.inc()
            text = choice.extend(*event)
            if choice.reason:
                del open_choices[index]
                self.engine.cancel(jobs[index])
            yield index, text

    @web.middleware
    async def _count_and_explain(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except asyncio.CancelledError:
            self.metrics.requests.labels(LEFT).inc()
            raise
        except Exception as error:
            explained = _explained(error)
            headers = {"Retry-After": str(RETRY)} if explained.status in (429, 503) else {}
            response = web.json_response(explained.body(), status=explained.status, headers=headers)
        self.metrics.requests.labels(response.status).inc()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self.interface.name, "object": "model", "created": 0, "owned_by": "linattn"}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, request: web.Request) -> web.Response:
        well = self.engine.thread.is_alive() and not self.ends
        return web.json_response({"status": "ok" if well else "ends"}, status=200 if well else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _stream(request: web.Request, call: Call, pieces: AsyncIterator[Piece]) -> web.StreamResponse:
    # an error before the first token has a status of its own
    first = await anext(pieces)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    try:
        await _send_piece(response, call, *first)
        async for piece in pieces:
            await _send_piece(response, call, *piece)
        if call.counts_usage:
            await _send(response, call.last_piece())
        await response.write(b"data: [DONE]\n\n")
    except ConnectionResetError:
        # the client has left
        pass
    except Exception as error:
        await _send(response, _explained(error).body())
    return response


async def _send_piece(response: web.StreamResponse, call: Call, index: int, text: str) -> None:
    if text or call.choices[index].reason:
        await _send(response, call.piece(index, text))


async def _send(response: web.StreamResponse, event: object) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())


def _explained(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case web.HTTPRequestEntityTooLarge():
            return ApiError(413, f"a request has at most {BODY:,} bytes")
        case web.HTTPException():
            return ApiError(error.status, error.reason)
        case ValueError():
            return ApiError(400, str(error))
    logging.getLogger(__name__).error("a request has failed", exc_info=error)
    return ApiError(500, "the server has failed on this request")
