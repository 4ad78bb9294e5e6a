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
# the most choices per prompt, as there
MOST_CHOICES = 128
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
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None
    temperature: float | None
    top_p: Annotated[float, Field(gt=0, le=1)] | None
    seed: int | None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None
    stream: bool | None
    stream_options: StreamOptions | None

    user: str | None
    frequency_penalty: Zero | None
    presence_penalty: Zero | None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None


@with_config(extra="forbid")
class CompletionBody(Body, total=False):
    prompt: Required[str | list[Token] | list[str] | list[list[Token]]]
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


class Choice:
    """The text for one `request` of the batch as it grows."""

    def __init__(self, request: Request, text: TextStream) -> None:
        self.request, self.text, self.num_tokens = request, text, 0
        self.reason: Literal["stop", "length"] | None = None
        """The reason why the text is complete, None before."""

    def extend(self, token: int, last: bool) -> str:
        """Return the text that a new token completes."""
        self.num_tokens += 1
        text = self.text.extend(token)
        if self.text.stopped or token in self.request.stop_tokens:
            return text + self.finish("stop")
        return text + self.finish("length") if last else text

    def finish(self, reason: Literal["stop", "length"]) -> str:
        """End the text, and return the rest of it."""
        self.reason = reason
        return self.text.finish()


class Call:
    """A request of a client: its `body`, and the `choices` of its answer, so many for `each` prompt in turn."""

    def __init__(self, body: Any, choices: list[Choice], each: int) -> None:
        self.choices, self.num_prompt_tokens = choices, sum(len(choice.request.prompt) for choice in choices[::each])
        self.streams = bool(body.get("stream"))
        self.counts_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self.is_chat = "messages" in body
        name = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        kind = "text_completion" if not self.is_chat else "chat.completion" + ".chunk" * self.streams
        self.facts = {"id": name, "object": kind, "created": int(time.time()), "model": body["model"]}

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    def complete(self, texts: list[str]) -> dict[str, Any]:
        choices = [self._choice(index, text, "message") for index, text in enumerate(texts)]
        return self.facts | {"choices": choices, "usage": self._usage()}

    def piece(self, index: int, text: str) -> dict[str, Any]:
        usage = {"usage": None} if self.counts_usage else {}
        return self.facts | {"choices": [self._choice(index, text, "delta")]} | usage

    def last_piece(self) -> dict[str, Any]:
        """Return the end of a stream for a client that wants to know the numbers of tokens."""
        return self.facts | {"choices": [], "usage": self._usage()}

    def _choice(self, index: int, text: str, name: str) -> dict[str, Any]:
        content = {name: {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        return {"index": index, "logprobs": None, "finish_reason": self.choices[index].reason} | content

    def _usage(self) -> dict[str, int]:
        prompt, new = self.num_prompt_tokens, self.num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


class Interface(NamedTuple):
    """Reads requests for the model of this `name`, for at most `max_tokens` new tokens each. The `vocabulary` has the
    `stop_tokens` after which texts end, the function `prompt` from a text to its tokens, and a `decoder`. The function
    `chat` turns messages into a prompt, as text or as tokens; it is None if there is no chat template."""

    name: str
    model: TokenModel
    vocabulary: Any
    max_tokens: int
    chat: Callable[[list[Any]], str | list[int]] | None = None

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
        # the most likely token is in every nucleus
        greedy, top_p = body.get("temperature") == 0, body.get("top_p")
        sampling = Sampling(
            temperature=_number(body, "temperature", 1.0), top_p=None if greedy or top_p == 1 else top_p
        )
        stops = [stop] if isinstance(stop := body.get("stop"), str) else stop or []
        ends, each, seed = self.vocabulary.stop_tokens, _number(body, "n", 1), body.get("seed")
        choices = list[Choice]()
        for tokens in self._prompts(body):
            count = self._max_new_tokens(body, len(tokens))
            for i in range(each):
                # the first of several choices is the one that would be alone
                own = None if seed is None else seed + i
                request = Request(tokens, max_new_tokens=count, sampling=sampling, stop_tokens=ends, seed=own)
                choices.append(Choice(request, TextStream(self.vocabulary.decoder(), tokens, stops=stops)))
        return Call(body, choices, each)

    def _prompts(self, body: Any) -> list[list[int]]:
        """Return the tokens of each prompt. Tokens in the body stay as they are."""
        prompts: Any = body["prompt"] if "prompt" in body else self._chat_prompt(body["messages"])
        if isinstance(prompts, str) or not prompts or isinstance(prompts[0], int):
            prompts = [prompts]
        rows = [self.vocabulary.prompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        if (last := max(max(row, default=0) for row in rows)) >= self.model.vocab_size:
            raise ApiError(400, f"tokens must be below {self.model.vocab_size}, but one is {last}", param="prompt")
        return rows

    def _chat_prompt(self, messages: list[Message]) -> str | list[int]:
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
