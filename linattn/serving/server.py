"""The HTTP server: limits, errors, streams, metrics, and an end that waits for running requests, but not for ever."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.aiohttp import make_aiohttp_handler

from linattn.serving.engine import Engine, Events
from linattn.serving.protocol import CHAT, COMPLETIONS, ApiError, Call, Choice, Interface

# the bytes of a request, and the seconds that running requests have to end
BODY, GRACE = 2**20, 5.0
# the status of a client that has left, as in nginx's logs
LEFT = 499
Piece = tuple[Choice, str]


class Metrics:
    """The numbers for Prometheus, each server with its own."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        options: Any = {"namespace": "linattn", "registry": self.registry}
        self.requests = Counter("requests", "answers, by HTTP status", ["status"], **options)
        self.prompt_tokens = Counter("prompt_tokens", "tokens of prompts", **options)
        self.new_tokens = Counter("new_tokens", "tokens that were generated", **options)
        self.first_token = Histogram("first_token_seconds", "time to the first token", **options)
        for name, help, read in (
            ("rows", "requests that have a row", lambda: engine.batch.num_rows),
            ("waiting", "requests that wait for a row", lambda: engine.batch.num_waiting),
            ("cache_bytes", "bytes of kept states", lambda: getattr(engine.batch.cache, "num_bytes", 0)),
        ):
            Gauge(name, help, **options).set_function(read)


class Server:
    """Serves the model of an `interface` with an `engine`. A request gets `timeout` seconds."""

    def __init__(self, engine: Engine, interface: Interface, *, timeout: float) -> None:
        self.engine, self.interface, self.timeout = engine, interface, timeout
        self.metrics = Metrics(engine)
        app = web.Application(client_max_size=BODY, middlewares=[self._count_and_explain])
        app.router.add_post("/v1/completions", partial(self._generate, COMPLETIONS))
        app.router.add_post("/v1/chat/completions", partial(self._generate, CHAT))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", make_aiohttp_handler(self.metrics.registry))
        # a handler whose client has left is cancelled, which frees the row
        self.runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)

    async def start(self, host: str, port: int) -> str:
        """Listen, and return the address. Raise OSError if that is impossible."""
        await self.runner.setup()
        await web.TCPSite(self.runner, host, port).start()
        self.engine.start()
        name, port, *_ = self.runner.addresses[0]
        return f"http://{f'[{name}]' if ':' in name else name}:{port}/v1"

    async def stop(self, grace: float = GRACE) -> None:
        """Refuse new requests, let the running ones end for `grace` seconds, and end the others."""
        self.engine.ends, loop = True, asyncio.get_running_loop()
        until = loop.time() + grace
        while self.engine.open and loop.time() < until:
            await asyncio.sleep(0.02)
        await self.engine.close()
        await self.runner.cleanup()

    async def _generate(self, endpoint: Any, request: web.Request) -> web.StreamResponse:
        started = asyncio.get_running_loop().time()
        try:
            content = await asyncio.wait_for(request.read(), self.timeout)
        except TimeoutError:
            raise ApiError(408, f"the body has not come within {self.timeout:g} seconds") from None
        call = await asyncio.to_thread(self.interface.read, endpoint, content, self.engine.limit)
        with self.engine.generate(call.choices) as events:
            async with aclosing(self._pieces(call, events, started)) as pieces:
                if call.streams:
                    return await _stream(request, call, pieces)
                texts = dict.fromkeys(call.choices, "")
                async for choice, piece in pieces:
                    texts[choice] += piece
                return web.json_response(call.complete(texts))

    async def _pieces(self, call: Call, events: Events, started: float) -> AsyncGenerator[Piece]:
        """Yield the pieces of the choices' texts. When the time is over, unfinished texts end."""
        unfinished = dict.fromkeys(call.choices)
        while unfinished:
            try:
                async with asyncio.timeout_at(started + self.timeout):
                    choice, event = await events.get()
            except TimeoutError:
                if not call.num_tokens:
                    raise ApiError(504, f"there is no token after {self.timeout:g} seconds") from None
                for choice in unfinished:
                    yield choice, choice.finish("length")
                return
            if choice not in unfinished:
                # a token after a stop text
                continue
            if isinstance(event, Exception):
                raise event
            if not call.num_tokens:
                self.metrics.prompt_tokens.inc(call.num_prompt_tokens)
                self.metrics.first_token.observe(asyncio.get_running_loop().time() - started)
            self.metrics.new_tokens.inc()
            text = choice.extend(*event)
            if choice.reason:
                del unfinished[choice]
                self.engine.cancel(choice)
            yield choice, text

    @web.middleware
    async def _count_and_explain(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            response = await handler(request)
        except asyncio.CancelledError:
            self.metrics.requests.labels(LEFT).inc()
            raise
        except ConnectionResetError:
            # while its body was read; nobody gets this answer
            response = web.Response(status=LEFT)
        except Exception as error:
            explained = _explained(error)
            headers = {"Retry-After": "1"} if explained.status in (429, 503) else {}
            response = web.json_response(explained.body(), status=explained.status, headers=headers)
        self.metrics.requests.labels(response.status).inc()
        return response

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self.interface.name, "object": "model", "created": 0, "owned_by": "linattn"}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, _: web.Request) -> web.Response:
        well = self.engine.thread.is_alive() and not self.engine.ends
        return web.json_response({"status": "ok" if well else "ends"}, status=200 if well else 503)


async def _stream(request: web.Request, call: Call, pieces: AsyncIterator[Piece]) -> web.StreamResponse:
    # an error before the first token has a status of its own
    piece: Piece | None = await anext(pieces)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)

    async def send(event: object) -> None:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())

    try:
        while piece is not None:
            if piece[1] or piece[0].reason:
                await send(call.piece(*piece))
            piece = await anext(pieces, None)
        if call.counts_usage:
            await send(call.complete({}))
        await response.write(b"data: [DONE]\n\n")
    except ConnectionResetError:
        # the client has left
        pass
    except Exception as error:
        await send(_explained(error).body())
    return response


def _explained(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case web.HTTPRequestEntityTooLarge():
            return ApiError(413, f"a request has at most {BODY:,} bytes")
        case web.HTTPException():
            return ApiError(error.status, error.reason)
        case web.RequestPayloadError():
            return ApiError(400, "the body is not encoded as the headers say")
        case ValueError():
            return ApiError(400, str(error))
    logging.getLogger(__name__).error("a request has failed", exc_info=error)
    return ApiError(500, "the server has failed on this request")
