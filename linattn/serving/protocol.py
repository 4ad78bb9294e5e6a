"""Requests of OpenAI's clients as our own, and their answers. https://platform.openai.com/docs/api-reference"""

import time
import uuid
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, Required

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, with_config
from pydantic_core import from_json
from typing_extensions import TypedDict

from linattn.generation import Request, Sampling
from linattn.generation.texts import TextStream, is_text
from linattn.models.token_model import TokenModel, TokenModelState

# as in OpenAI's interface, the most tokens of a completion whose request names no number
SHORT = 16
Reason = Literal["stop", "length"]
Count = Annotated[int, Field(ge=1)]
Stop = Annotated[str, Field(min_length=1)]
Token = Annotated[int, Field(ge=0, lt=2**32)]
Zero = Annotated[float, Field(ge=0, le=0)]


class ApiError(Exception):
    """An answer that is an error: its HTTP status, its message, and the field of the request that it is about."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": None}}


class Body(TypedDict, total=False):
    """The fields that both endpoints have. Those of the last block are accepted where they have no effect."""

    model: Required[str]
    max_tokens: Count
    n: Annotated[int, Field(ge=1, le=128)]
    temperature: float
    top_p: Annotated[float, Field(gt=0, le=1)]
    seed: int
    stop: Stop | Annotated[list[Stop], Field(max_length=4)]
    stream: bool
    stream_options: dict[Literal["include_usage"], bool | None]

    user: str
    frequency_penalty: Zero
    presence_penalty: Zero
    logit_bias: Annotated[dict[str, float], Field(max_length=0)]


@with_config(extra="forbid")
class CompletionBody(Body, total=False):
    prompt: Required[str | list[Token] | list[str] | list[list[Token]]]
    best_of: Literal[1]
    echo: Literal[False]
    suffix: Annotated[str, Field(max_length=0)]


def _joined(content: Any) -> Any:
    """Return the text of a message, whose content may be a list of parts."""
    if not isinstance(content, list):
        return content
    texts = list[str]()
    for part in content:
        match part:
            case {"type": "text", "text": str(text), **others} if not others:
                texts.append(text)
            case _:
                raise ValueError(f'parts must be {{"type": "text", "text": "…"}}, but one is {part!r:.60}')
    return "".join(texts)


@with_config(extra="forbid")
class Message(TypedDict):
    role: str
    content: Annotated[str, BeforeValidator(_joined)]


@with_config(extra="forbid")
class Format(TypedDict):
    type: Literal["text"]


@with_config(extra="forbid")
class ChatBody(Body, total=False):
    messages: Required[Annotated[list[Message], Field(min_length=1)]]
    max_completion_tokens: Count

    logprobs: Literal[False]
    response_format: Format
    store: Literal[False]
    tools: Annotated[list[Any], Field(max_length=0)]
    tool_choice: Literal["none", "auto"]
    parallel_tool_calls: bool


COMPLETIONS, CHAT = TypeAdapter[Any](CompletionBody), TypeAdapter[Any](ChatBody)


class Choice:
    """The text for one `request` as it grows, with its `index` in the answer and the `number` of the request in the
    batch. `reason` says why the text is complete, and is None before."""

    def __init__(self, index: int, request: Request, text: TextStream) -> None:
        self.index, self.request, self.text, self.num_tokens = index, request, text, 0
        self.number: int | None = None
        self.reason: Reason | None = None

    def extend(self, token: int, last: bool) -> str:
        """Return the text that a new token completes."""
        self.num_tokens += 1
        text = self.text.extend(token)
        stops = self.text.stopped or token in self.request.stop_tokens
        return text + self.finish("stop" if stops else "length") if stops or last else text

    def finish(self, reason: Reason) -> str:
        """End the text, and return the rest of it. If that has a stop text, this is the reason."""
        rest = self.text.finish()
        self.reason = "stop" if self.text.stopped else reason
        return rest


class Call:
    """A request of a client: its `body`, and the `choices` of its answer, so many for `each` prompt in turn."""

    def __init__(self, body: Any, choices: list[Choice], each: int) -> None:
        self.choices, self.num_prompt_tokens = choices, sum(len(choice.request.prompt) for choice in choices[::each])
        self.streams, self.is_chat = body.get("stream", False), "messages" in body
        self.counts_usage = bool(body.get("stream_options", {}).get("include_usage"))
        name = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        kind = "text_completion" if not self.is_chat else "chat.completion" + ".chunk" * self.streams
        self.facts = {"id": name, "object": kind, "created": int(time.time()), "model": body["model"]}

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    def complete(self, texts: dict[Choice, str]) -> dict[str, Any]:
        """Return the answer with the texts of some choices, all of them or, at the end of a stream, none."""
        prompt, new = self.num_prompt_tokens, self.num_tokens
        usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        return self.facts | {"choices": [self._choice(*each, "message") for each in texts.items()], "usage": usage}

    def piece(self, choice: Choice, text: str) -> dict[str, Any]:
        usage = {"usage": None} if self.counts_usage else {}
        return self.facts | {"choices": [self._choice(choice, text, "delta")]} | usage

    def _choice(self, choice: Choice, text: str, name: str) -> dict[str, Any]:
        content = {name: {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        return {"index": choice.index, "logprobs": None, "finish_reason": choice.reason} | content


def _checked(endpoint: Any, content: bytes) -> dict[str, Any]:
    """Return the fields that are not null, which is the default everywhere. Raise ApiError for what is no such body."""
    try:
        fields = from_json(content)
        if isinstance(fields, dict):
            fields = {name: value for name, value in fields.items() if value is not None}
        return endpoint.validate_python(fields, strict=True)
    except ValidationError as error:
        errors = error.errors()
        place = errors[0]["loc"]
        param, in_list = str(place[0]) if place else None, place[1:] and isinstance(place[1], int)
        # a field of several types has an error for each of them
        same = errors[:1] if in_list else [each for each in errors if each["loc"][:1] == place[:1]]
        name = ".".join(map(str, place)) if in_list else param or "the body"
        message = " or ".join(dict.fromkeys(each["msg"] for each in same))
        raise ApiError(400, f"{name}: {message}", param=param) from None
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None


class Interface(NamedTuple):
    """Reads requests for the model of this `name`, for at most `max_tokens` new tokens each. The `vocabulary` has the
    `stop_tokens` after which texts end; `prompt`, which returns the tokens of a text that begins a document; `encode`,
    which returns those of a text that goes on from the `state`; and `decoder`. `chat` writes messages as a prompt, a
    text or its tokens; it is None if there is no template for them."""

    name: str
    model: TokenModel
    vocabulary: Any
    max_tokens: int
    chat: Callable[[list[Any]], str | list[int]] | None = None
    state: TokenModelState | None = None

    def read(self, endpoint: Any, content: bytes, limit: int) -> Call:
        """Return the call. Raise ApiError or ValueError for one that is not understood, or is too large: it has at most
        `limit` choices."""
        body = _checked(endpoint, content)
        if body["model"] != self.name:
            raise ApiError(404, f"there is no model {body['model']!r}: the model is {self.name!r}", param="model")
        if body.get("stream_options") and not body.get("stream"):
            raise ApiError(400, "stream_options is for a stream, but stream is not true", param="stream_options")
        # the most likely token is in every nucleus
        temperature, top_p = body.get("temperature", 1.0), body.get("top_p", 1)
        sampling = Sampling(temperature=temperature, top_p=None if temperature == 0 or top_p == 1 else top_p)
        stops = [stop] if isinstance(stop := body.get("stop", []), str) else stop
        prompts, each, choices = self._prompts(body), body.get("n", 1), list[Choice]()
        # a prompt of tokens may end within a character, which the new ones complete
        end = (None,) if is_text(body.get("prompt", "")) else ()
        if (total := len(prompts) * each) > limit:
            raise ApiError(400, f"one request has at most {limit} choices, but there are {total}")
        for tokens in prompts:
            count = self._max_new_tokens(body, len(tokens))
            for i in range(each):
                # the first of several choices is the one that would be alone
                seed = body["seed"] + i if "seed" in body else None
                options = {"sampling": sampling, "stop_tokens": self.vocabulary.stop_tokens, "seed": seed}
                request = Request(tokens, max_new_tokens=count, state=self.state, **options)
                text = TextStream(self.vocabulary.decoder(), (*tokens, *end), stops=stops)
                choices.append(Choice(len(choices), request, text))
        return Call(body, choices, each)

    def _prompts(self, body: dict[str, Any]) -> list[list[int]]:
        """Return the tokens of each prompt. Tokens in the body stay as they are."""
        prompts: Any = body["prompt"] if "prompt" in body else self._chat_prompt(body["messages"])
        if isinstance(prompts, str) or not prompts or isinstance(prompts[0], int):
            prompts = [prompts]
        encode = (
            self.vocabulary.prompt if self.state is None else lambda text: list(self.vocabulary.encode(text.encode()))
        )
        rows = [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
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

    def _max_new_tokens(self, body: dict[str, Any], length: int) -> int:
        if {"max_tokens", "max_completion_tokens"} <= body.keys():
            raise ApiError(400, "max_tokens and max_completion_tokens are the same: give one", param="max_tokens")
        default = min(SHORT if "prompt" in body else self.max_tokens, self.max_tokens)
        if self.model.max_length is not None:
            past = 0 if self.state is None or self.state.position is None else int(self.state.position)
            default = min(default, max(1, self.model.max_length - past - length + 1))
        count = body.get("max_tokens", body.get("max_completion_tokens", default))
        if count > self.max_tokens:
            raise ApiError(400, f"max_tokens must be at most {self.max_tokens}, but is {count}", param="max_tokens")
        return count
