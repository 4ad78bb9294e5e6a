"""Requests of OpenAI's clients, turned into our own, and the answers that they expect.

https://platform.openai.com/docs/api-reference"""

import time
import uuid
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, Required

from pydantic import Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from linattn.generation import Request, Sampling
from linattn.generation.texts import TextStream
from linattn.models.token_model import TokenModel
from linattn.serving.errors import ApiError

# the most tokens of a completion whose request names no number, as in OpenAI's interface
SHORT = 16
Count = Annotated[int, Field(ge=1)]
Stop = Annotated[str, Field(min_length=1)]
Token = Annotated[int, Field(ge=0, lt=2**32)]
Zero = Annotated[float, Field(ge=0, le=0)]


@with_config(extra="forbid")
class StreamOptions(TypedDict, total=False):
    include_usage: bool | None


class Body(TypedDict, total=False):
    """The fields that both endpoints have. Those of the last block are accepted where they have no effect."""

    model: Required[str]
    max_tokens: Count | None
    temperature: float | None
    top_p: Annotated[float, Field(gt=0, le=1)] | None
    seed: int | None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None
    stream: bool | None
    stream_options: StreamOptions | None

    user: str | None
    n: Literal[1] | None
    frequency_penalty: Zero | None
    presence_penalty: Zero | None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None


@with_config(extra="forbid")
class CompletionBody(Body, total=False):
    prompt: Required[str | list[Token]]
    best_of: Literal[1] | None
    echo: Literal[False] | None
    logprobs: None
    suffix: None


@with_config(extra="forbid")
class Message(TypedDict):
    role: str
    content: str


@with_config(extra="forbid")
class ChatBody(Body, total=False):
    messages: Required[Annotated[list[Message], Field(min_length=1)]]
    max_completion_tokens: Count | None
    logprobs: Literal[False] | None
    tools: None


COMPLETIONS, CHAT = TypeAdapter[Any](CompletionBody), TypeAdapter[Any](ChatBody)


class Call:
    """A request of a client: its `body`, the `request` for the batch, and the answer as it grows."""

    def __init__(self, body: Any, request: Request, text: TextStream) -> None:
        self.request, self.text, self.num_tokens = request, text, 0
        self.streams = bool(body.get("stream"))
        self.counts_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self.is_chat = "messages" in body
        name = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        kind = "text_completion" if not self.is_chat else "chat.completion" + ".chunk" * self.streams
        self.facts = {"id": name, "object": kind, "created": int(time.time()), "model": body["model"]}
        self.reason: Literal["stop", "length"] | None = None
        """The reason why the answer is complete, None before."""

    def extend(self, token: int, last: bool) -> str:
        """Return the text that a new token completes."""
        self.num_tokens += 1
        text = self.text.extend(token)
        if self.text.stopped or token in self.request.stop_tokens:
            return text + self.finish("stop")
        return text + self.finish("length") if last else text

    def finish(self, reason: Literal["stop", "length"]) -> str:
        """End the answer, and return the rest of its text."""
        self.reason = reason
        return self.text.finish()

    def complete(self, text: str) -> dict[str, Any]:
        return self.facts | {"choices": [self._choice(text, "message")], "usage": self._usage()}

    def piece(self, text: str) -> dict[str, Any]:
        usage = {"usage": None} if self.counts_usage else {}
        return self.facts | {"choices": [self._choice(text, "delta")]} | usage

    def last_piece(self) -> dict[str, Any]:
        """Return the end of a stream for a client that wants to know the numbers of tokens."""
        return self.facts | {"choices": [], "usage": self._usage()}

    def _choice(self, text: str, name: str) -> dict[str, Any]:
        content = {name: {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        return {"index": 0, "logprobs": None, "finish_reason": self.reason} | content

    def _usage(self) -> dict[str, int]:
        prompt, new = len(self.request.prompt), self.num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


class Interface(NamedTuple):
    """Reads requests for the model of this `name`, for at most `max_tokens` new tokens each. The `vocabulary` has a
    `separator`, `encode` and `decoder`, as the command line's do. `chat` writes messages as the text of a prompt; it is
    None if there is no template for them."""

    name: str
    model: TokenModel
    vocabulary: Any
    max_tokens: int
    chat: Callable[[list[Message]], str] | None = None

    def read(self, endpoint: Any, content: bytes) -> Call:
        """Return the call. Raise ApiError or ValueError for one that is not understood, or is too large."""
        try:
            body = endpoint.validate_json(content, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            param = str(first["loc"][0]) if first["loc"] else None
            raise ApiError(400, f"{param or 'the body'}: {first['msg']}", param=param) from None
        if body["model"] != self.name:
            raise ApiError(404, f"there is no model {body['model']!r}: the model is {self.name!r}", param="model")
        if body.get("stream_options") and not body.get("stream"):
            raise ApiError(400, "stream_options is for a stream, but stream is not true", param="stream_options")
        tokens, end = self._tokens(body), self.vocabulary.separator
        # the most likely token is in every nucleus
        greedy, top_p = body.get("temperature") == 0, body.get("top_p")
        sampling = Sampling(
            temperature=_number(body, "temperature", 1.0), top_p=None if greedy or top_p == 1 else top_p
        )
        count, seed = self._max_new_tokens(body, len(tokens)), body.get("seed")
        request = Request(tokens, max_new_tokens=count, sampling=sampling, stop_tokens=(end,), seed=seed)
        stops = [stop] if isinstance(stop := body.get("stop"), str) else stop or []
        return Call(body, request, TextStream(self.vocabulary.decoder(), tokens, stops=stops))

    def _tokens(self, body: Any) -> list[int]:
        """Return the prompt's tokens. Before a text comes the token that begins documents; tokens stay as they are."""
        text, first = (
            body["prompt"] if "prompt" in body else self._chat_text(body["messages"]),
            self.vocabulary.separator,
        )
        if not isinstance(text, str):
            if text and (last := max(text)) >= self.model.vocab_size:
                raise ApiError(400, f"tokens must be below {self.model.vocab_size}, but one is {last}", param="prompt")
            return text
        tokens = list(self.vocabulary.encode(text.encode()))
        return tokens if tokens[:1] == [first] else [first, *tokens]

    def _chat_text(self, messages: list[Message]) -> str:
        try:
            if self.chat is None:
                raise ValueError("the model's tokenizer has no chat template: use /v1/completions")
            return self.chat(messages)
        except Exception as error:
            # a template is a program, and may raise anything for messages that it does not expect
            raise ApiError(400, f"the messages cannot be a prompt: {error}", param="messages") from None

    def _max_new_tokens(self, body: Any, length: int) -> int:
        if None not in (body.get("max_tokens"), body.get("max_completion_tokens")):
            raise ApiError(400, "max_tokens and max_completion_tokens are the same: give one", param="max_tokens")
        positions, most = self.model.max_length, SHORT if "prompt" in body else self.max_tokens
        default = min(most, self.max_tokens, most if positions is None else max(1, positions - length + 1))
        count = _number(body, "max_tokens", _number(body, "max_completion_tokens", default))
        if count > self.max_tokens:
            raise ApiError(400, f"max_tokens must be at most {self.max_tokens}, but is {count}", param="max_tokens")
        return count


def _number(body: Any, name: str, default: Any) -> Any:
    return default if body.get(name) is None else body[name]
