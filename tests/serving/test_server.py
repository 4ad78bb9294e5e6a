"""OpenAI's client gets from the server what `generate` writes alone, and no client disturbs another."""

import asyncio
import codecs
import json
import socket
import time
import urllib.error
import urllib.request
from contextlib import suppress

import openai
import pytest
import torch
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from tokenizers import Tokenizer, decoders, models

from linattn.cli import vocabulary
from linattn.generation import Request, Sampling, generate
from linattn.generation.texts import TextStream
from linattn.serving import protocol
from linattn.serving import server as serving
from tests.serving.conftest import running, tiny_model, wait_until

CASES = [
    {"prompt": "the cat", "temperature": 0, "max_tokens": 16},
    {"prompt": "", "temperature": 1.2, "seed": 3, "max_tokens": 17},
    {"prompt": "över", "temperature": 1.0, "top_p": 0.9, "seed": 4, "max_tokens": 24},
    {"prompt": "a longer prompt, " * 9, "temperature": 0, "top_p": 0.5, "max_tokens": 1},
    {"prompt": [1, 2, 200], "seed": 5},
]


def alone(model, case):
    """Return the text, and the number of new tokens."""
    prompt = case["prompt"] if isinstance(case["prompt"], list) else [256, *case["prompt"].encode()]
    temperature = case.get("temperature", 1.0)
    sampling = Sampling(temperature=temperature, top_p=case.get("top_p") if temperature else None)
    options = {"max_new_tokens": case.get("max_tokens", 16), "sampling": sampling, "seed": case.get("seed")}
    tokens = generate(model, prompt, stop_tokens=(256,), **options)
    # a prompt of tokens may end within a character
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(bytes(prompt[prompt[0] == 256 :]))
    return decoder.decode(bytes(token for token in tokens if token != 256), final=True), len(tokens)


def complete(server, **case):
    return server.client.completions.create(model="tiny", **case)


def pieces(server, **case):
    return list(complete(server, stream=True, **case))


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_texts_are_those_of_generate_alone(server, model, case):
    text, count = alone(model, case)
    answer = complete(server, **case)
    length = len(case["prompt"]) if isinstance(case["prompt"], list) else 1 + len(case["prompt"].encode())
    assert answer.choices[0].text == text
    assert answer.choices[0].finish_reason == ("length" if count == case.get("max_tokens", 16) else "stop")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (length, count, length + count)
    *parts, last = pieces(server, **case, stream_options={"include_usage": True})
    assert "".join(part.choices[0].text for part in parts) == text
    assert [part.choices[0].finish_reason for part in parts][-1] == answer.choices[0].finish_reason
    assert last.usage == usage and not last.choices and len({part.id for part in parts}) == 1
    assert all(part.choices[0].finish_reason is None for part in parts[:-1])
    assert len(pieces(server, **case)) == len(parts)


def test_several_prompts_and_choices_are_those_of_single_ones(server, model):
    """The choices of one prompt follow one another; the first is the one that would be alone."""
    case = {"temperature": 1.0, "seed": 3, "max_tokens": 9}
    for prompts in (["the cat", "", "a longer prompt"], [[1, 2, 200], [3]]):
        single = [complete(server, prompt=prompt, **case) for prompt in prompts]
        answer = complete(server, prompt=prompts, **case)
        assert [choice.text for choice in answer.choices] == [each.choices[0].text for each in single]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert getattr(answer.usage, name) == sum(getattr(each.usage, name) for each in single)
        both = complete(server, prompt=prompts, n=2, **case)
        assert [choice.index for choice in both.choices] == list(range(2 * len(prompts)))
        assert [choice.text for choice in both.choices[::2]] == [choice.text for choice in answer.choices]
        next_seed = [complete(server, prompt=prompt, **case | {"seed": 4}) for prompt in prompts]
        assert [choice.text for choice in both.choices[1::2]] == [each.choices[0].text for each in next_seed]
        assert both.usage.prompt_tokens == answer.usage.prompt_tokens
        *parts, last = pieces(server, prompt=prompts, n=2, stream_options={"include_usage": True}, **case)
        texts = [""] * len(both.choices)
        for part in parts:
            texts[part.choices[0].index] += part.choices[0].text
        assert texts == [choice.text for choice in both.choices] and last.usage == both.usage
        ends = [part.choices[0].index for part in parts if part.choices[0].finish_reason]
        assert sorted(ends) == list(range(2 * len(prompts)))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer with a token per byte, and a word: characters that are not in it are bytes, as in Llama 2's."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"b": 256, "<unk>": 257}
    backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(path))
    return path


@pytest.mark.parametrize(("prompt", "token", "text"), [("b�", 256, "bbb"), ("b", 0xC3, "���")])
def test_texts_with_a_tokenizer_begin_and_end_where_their_tokens_do(tokenizer, prompt, token, text):
    """The end of a prompt of text that looks like half a character comes with no answer; that of an answer does."""
    model, chosen = tiny_model(vocab_size=259), torch.nn.functional.one_hot(torch.tensor(token), 259).float()
    model.logits = lambda x: chosen.expand(*x.shape[:-1], -1)
    model.tokenizer_file = tokenizer
    assert generate(model, prompt, max_new_tokens=3) == text

    def chat(messages):
        return messages[0]["content"]

    with running(model, vocabulary.Tokenizer(tokenizer), chat=chat) as server:
        case = {"temperature": 0, "max_tokens": 3}
        messages = [{"role": "user", "content": prompt}]
        assert complete(server, prompt=prompt, **case).choices[0].text == text
        assert "".join(part.choices[0].text for part in pieces(server, prompt=prompt, **case)) == text
        chats = server.client.chat.completions
        assert chats.create(model="tiny", messages=messages, **case).choices[0].message.content == text
        stream = chats.create(model="tiny", messages=messages, stream=True, **case)
        assert "".join(part.choices[0].delta.content for part in stream) == text


def test_a_choice_that_ends_leaves_its_row_to_others(server, model):
    case = {"temperature": 0, "max_tokens": 30}
    (first, _), (second, _) = (alone(model, {"prompt": prompt, **case}) for prompt in ("b", "the cat"))
    stop = next(first[i : i + 3] for i in range(3, 27) if first[i : i + 3] not in second)
    answer = complete(server, prompt=["b", "the cat"], stop=stop, **case)
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]
    assert [choice.text for choice in answer.choices] == [first[: first.index(stop)], second]
    wait_until(lambda: not server.engine.batch and not server.engine.open)


def test_a_text_ends_before_the_first_stop_text(server, model):
    case = {"prompt": "b", "temperature": 0, "max_tokens": 30}
    text, _ = alone(model, case)
    stop = text[10:13]
    for stops in (stop, ["never", stop + "no", stop, text[12:15]]):
        answer = complete(server, **case, stop=stops).choices[0]
        assert (answer.text, answer.finish_reason) == (text[: text.index(stop)], "stop")
        parts = pieces(server, **case, stop=stops)
        assert "".join(part.choices[0].text for part in parts) == answer.text
    # the beginning of a stop text is held back, and comes at the end
    parts = pieces(server, **case, stop=text[-3:] + "no")
    assert "".join(part.choices[0].text for part in parts) == text
    wait_until(lambda: not server.engine.batch)


@pytest.mark.parametrize("last", [1, 2])
def test_a_stop_text_in_the_rest_is_the_reason(last):
    """The tokens are at their limit, or the time is over, while the decoder holds text back."""
    request = Request([0], max_new_tokens=last)
    choice = protocol.Choice(0, request, TextStream({1: "one E", None: "ND two"}.get, stops=["END"]))
    text = choice.extend(1, last == 1)
    if last == 2:
        text += choice.finish("length")
    assert (text, choice.reason) == ("one ", "stop")


def test_chat_needs_a_template(server, model):
    messages = [{"role": "user", "content": "the cat"}]
    with pytest.raises(openai.BadRequestError, match="no chat template") as error:
        server.client.chat.completions.create(model="tiny", messages=messages)
    assert error.value.param == "messages"

    def chat(messages):
        if messages[0]["role"] == "odd":
            raise RuntimeError("roles must alternate")
        return "".join(message["content"] for message in messages)

    with running(model, chat=chat, max_tokens=20) as other:
        create = other.client.chat.completions.create
        text, count = alone(model, CASES[0])
        answer = create(model="tiny", messages=messages, temperature=0, max_completion_tokens=16)
        assert answer.choices[0].message.content == text and answer.usage.completion_tokens == count
        parts = list(create(model="tiny", messages=messages, temperature=0, max_tokens=16, stream=True))
        assert "".join(part.choices[0].delta.content for part in parts) == text
        # without a number, as many as there may be
        assert create(model="tiny", messages=messages, temperature=0).usage.completion_tokens == 20
        # text may come in parts, which are joined as templates of transformers do
        inside = [{"type": "text", "text": each} for each in ("the", " ", "cat")]
        answer = create(model="tiny", messages=[{"role": "user", "content": inside}], temperature=0, max_tokens=16)
        assert answer.choices[0].message.content == text
        # null is the default of each field that OpenAI's clients know, and what has no effect is accepted
        neutral = dict.fromkeys(chat_create_params.CompletionCreateParamsBase.__annotations__) | {
            "response_format": {"type": "text"},
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": True,
            "store": False,
        }
        body = neutral | {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 16}
        _, same = post(other, json.dumps(body).encode(), "/v1/chat/completions")
        assert same["choices"][0]["message"]["content"] == text
        with pytest.raises(openai.BadRequestError, match="roles must alternate"):
            create(model="tiny", messages=[{"role": "odd", "content": ""}])


def test_a_hundred_clients_at_once(model):
    """Every fourth of them leaves in the middle of its text."""
    cases = [CASES[i % 3] | {"prompt": f"number {i}", "max_tokens": 3, "seed": i} for i in range(75)]

    async def leave(client):
        stream = await client.completions.create(model="tiny", prompt="x", max_tokens=5000, stream=True)
        await anext(stream)
        await stream.close()

    async def everyone(address):
        async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
            texts = [client.completions.create(model="tiny", **case) for case in cases]
            return (await asyncio.gather(*texts, *(leave(client) for _ in range(25))))[: len(cases)]

    with running(model, batch=32) as server:
        answers = asyncio.run(everyone(server.address))
        wait_until(lambda: not server.engine.batch and not server.engine.open)
    assert [answer.choices[0].text for answer in answers] == [alone(model, case)[0] for case in cases]


def test_a_client_that_leaves_frees_its_row(server):
    before = server.metric("linattn_new_tokens_total")
    stream = complete(server, prompt="x", max_tokens=5000, stream=True)
    next(stream)
    assert server.engine.batch.num_rows == 1
    stream.close()
    wait_until(lambda: not server.engine.batch and not server.engine.open)
    with pytest.raises(openai.APITimeoutError):
        server.client.with_options(timeout=0.2).completions.create(model="tiny", prompt="x", max_tokens=5000)
    wait_until(lambda: not server.engine.batch and not server.engine.open)
    assert server.metric("linattn_new_tokens_total") < before + 5000
    assert server.metric('linattn_requests_total{status="499"}') >= 1


def test_a_full_queue_refuses_and_loses_nothing(model):
    case = {"model": "tiny", "prompt": "x", "temperature": 0, "max_tokens": 60}

    async def three(server):
        async with openai.AsyncOpenAI(base_url=server.address, api_key="none", max_retries=0) as client:
            both = [asyncio.create_task(client.completions.create(**case)) for _ in range(2)]
            while len(server.engine.open) < 2:
                await asyncio.sleep(0.001)
            with pytest.raises(openai.RateLimitError, match="queue is full") as error:
                await client.completions.create(**case)
            assert error.value.response.headers["Retry-After"] == "1"
            return [(await each).choices[0].text for each in both]

    with running(model, batch=1, queue=1) as server:
        assert asyncio.run(three(server)) == 2 * [alone(model, case)[0]]
        assert complete(server, prompt="x", temperature=0, max_tokens=3).usage.completion_tokens == 3


def post(server, content, path="/v1/completions"):
    """Return the status and the error of a request with this body."""
    request = urllib.request.Request(server.address.removesuffix("/v1") + path, content)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


def test_too_many_choices_cost_nothing(server, monkeypatch):
    """A small body may name millions of them, so none is made before they are counted."""
    monkeypatch.setattr(protocol, "Choice", None)
    status, error = post(server, json.dumps({"model": "tiny", "prompt": ["x"] * 99, "n": 128}).encode())
    assert (status, error["message"]) == (400, "one request has at most 104 choices, but there are 12672")


GOOD = {"model": "tiny", "prompt": "x", "max_tokens": 2}
WRONG = [
    *({name: value} for name in GOOD for value in (None, 3.5, True, {}) if (name, value) != ("max_tokens", None)),
    *({"prompt": value} for value in ([], [257], [-1], [1.5], [2**70], ["x", 1], ["x", []], [[]], [[1], []], [[257]])),
    *({"max_tokens": value} for value in (0, -1, 5001, "3")),
    *({"temperature": value} for value in (-1, 1e-40, float("nan"), float("inf"), "hot")),
    *({"top_p": value} for value in (0, 1.5, "x")),
    *({"stop": value} for value in ("", 3, ["a", ""], list("abcde"))),
    *(
        {"n": 0},
        {"n": 129},
        {"n": 2.5},
        {"best_of": 2},
        {"echo": True},
        {"logprobs": 0},
        {"suffix": "x"},
        {"logit_bias": {"3": 1}},
    ),
    *({"presence_penalty": 0.5}, {"frequency_penalty": -1}, {"seed": 2**70}, {"seed": "x"}, {"stream": 1}),
    *({"stream_options": {"include_usage": True}}, {"max_completion_tokens": 3}, {"unknown": 1}),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_wrong_fields_are_refused_by_name(server, wrong):
    status, error = post(server, json.dumps(GOOD | wrong).encode())
    (name,) = wrong
    assert status == 400 and set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and (error["param"] == name or name in error["message"])


def test_fields_without_an_effect_are_accepted(server):
    neutral = {"n": 1, "best_of": 1, "echo": False, "logprobs": None, "presence_penalty": 0, "frequency_penalty": 0.0}
    more = {"logit_bias": {}, "user": "me", "suffix": None, "stream": False, "stop": None, "seed": None, "top_p": None}
    assert post(server, json.dumps(GOOD | neutral | more).encode())[0] == 200
    # null is the default of each field that OpenAI's clients know
    empty = dict.fromkeys(completion_create_params.CompletionCreateParamsBase.__annotations__)
    assert post(server, json.dumps(empty | GOOD).encode())[0] == 200


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}


def test_an_error_has_the_place_and_all_that_the_field_may_be(server):
    for wrong, message in (
        ({"stop": list("abcde")}, "stop: Input should be a valid string or List should have at most 4 items"),
        ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages.0.name: Extra inputs"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content: Input should be a valid string"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content: Value error, parts must be"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content: Value error, parts must be"),
        (
            {"messages": [{"role": "user", "content": [IMAGE | {"type": "text", "text": ""}]}]},
            "messages.0.content: Value",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages.0.content: Value error"),
    ):
        path = "/v1/chat/completions" if "messages" in wrong else "/v1/completions"
        body = {name: value for name, value in GOOD.items() if name != "prompt" or "messages" not in wrong}
        status, error = post(server, json.dumps(body | wrong).encode(), path)
        assert status == 400 and error["message"].startswith(message) and error["param"] == next(iter(wrong))


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"null", b"3", b'"x"', b"\xff\xfe", b'{"model": "tiny"}', b"{}", b"[" * 100_000),
        *(b'{"model": "tiny", "prompt": "\\ud800"}', b"\0" * 100, json.dumps(GOOD).encode()[:-1]),
    ],
    ids=lambda content: str(content[:20]),
)
def test_malformed_bodies_are_refused(server, content):
    assert post(server, content)[0] == 400
    assert post(server, json.dumps(GOOD).encode())[0] == 200


def test_a_body_that_cannot_be_decompressed_is_the_clients_error(server, capfd):
    headers = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 9\r\n\r\n"
    with socket.create_connection(server.address[7:-3].split(":")) as connection:
        connection.sendall(headers + b"not gzip!")
        answer = connection.recv(1000)
    assert b"400 Bad Request" in answer and b"the body is not encoded as the headers say" in answer
    assert "a request has failed" not in capfd.readouterr().err


def test_a_client_that_leaves_before_its_body_is_there_is_no_error_of_the_server(server, capfd):
    def count(status):
        with suppress(AssertionError):
            return server.metric(f'linattn_requests_total{{status="{status}"}}')
        return 0

    left, failed = count(499), count(500)
    with socket.create_connection(server.address[7:-3].split(":")) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        time.sleep(0.1)
    wait_until(lambda: count(499) + count(500) > left + failed)
    assert (count(499), count(500)) == (left + 1, failed)
    assert "Connection lost" not in capfd.readouterr().err


def test_other_errors_have_the_same_form(server):
    assert post(server, json.dumps(GOOD | {"prompt": "x" * serving.BODY}).encode())[0] == 413
    for path, content, status in (("/v1/nothing", b"{}", 404), ("/v1/models", b"{}", 405), ("/health", b"", 405)):
        assert post(server, content, path)[0] == status
    with pytest.raises(openai.NotFoundError, match="there is no model 'other': the model is 'tiny'"):
        server.client.completions.create(model="other", prompt="x")
    with socket.create_connection(server.address[7:-3].split(":")) as connection:
        connection.sendall(b"no HTTP at all\r\n\r\n")
        assert b"400" in connection.recv(1000)
    assert post(server, json.dumps(GOOD).encode())[0] == 200


def test_logits_of_nan_end_their_request_alone():
    model = tiny_model(tie_embeddings=False)
    with torch.no_grad():
        model.embedding.weight[250] = torch.nan
    with running(model) as server:

        async def three():
            async with openai.AsyncOpenAI(base_url=server.address, api_key="none", max_retries=0) as client:
                prompts = ([1, 2], [250, 1], [3, 1, 5])
                create = client.completions.create
                calls = (create(model="tiny", prompt=each, max_tokens=9, temperature=0) for each in prompts)
                return await asyncio.gather(*calls, return_exceptions=True)

        good, bad, other = asyncio.run(three())
        assert isinstance(bad, openai.InternalServerError) and "NaN" in str(bad)
        for answer, prompt in ((good, [1, 2]), (other, [3, 1, 5])):
            text, count = alone(model, {"prompt": prompt, "max_tokens": 9, "temperature": 0})
            assert (answer.choices[0].text, answer.usage.completion_tokens) == (text, count)


def test_an_error_of_a_step_ends_what_runs_and_the_server_lives_on(model, monkeypatch):
    with running(model) as server:
        with monkeypatch.context() as patch:
            patch.setattr(type(server.engine.batch), "step", lambda self: 1 / 0)
            with pytest.raises(openai.InternalServerError, match="division by zero"):
                complete(server, prompt="x")
        assert complete(server, prompt="x", max_tokens=2).usage.completion_tokens == 2


def test_time_is_limited(model, monkeypatch):
    with running(model, timeout=0.3) as server:
        answer = complete(server, prompt="x", max_tokens=5000, temperature=0)
        assert answer.choices[0].finish_reason == "length" and 0 < answer.usage.completion_tokens < 5000
        monkeypatch.setattr(type(server.engine.batch), "step", lambda self: [])
        with pytest.raises(openai.InternalServerError) as error:
            complete(server, prompt="x")
        assert error.value.status_code == 504
        # a body that does not come
        with socket.create_connection(server.address[7:-3].split(":")) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            assert b"408" in connection.recv(1000)


def test_health_models_and_metrics(model):
    with running(model) as server:
        root = server.address.removesuffix("/v1")
        assert json.load(urllib.request.urlopen(f"{root}/health")) == {"status": "ok"}
        assert [each.id for each in server.client.models.list()] == ["tiny"]
        count = complete(server, prompt="abcd", max_tokens=7).usage.completion_tokens
        with pytest.raises(openai.BadRequestError):
            complete(server, prompt="abcd", n=0)
        assert server.metric("linattn_prompt_tokens_total") == 5
        assert server.metric("linattn_new_tokens_total") == count
        assert server.metric('linattn_requests_total{status="400"}') == 1
        assert server.metric("linattn_first_token_seconds_count") == 1
        assert server.metric("linattn_rows") == server.metric("linattn_waiting") == 0
        assert server.metric("linattn_cache_bytes") == server.engine.batch.cache.num_bytes > 0


def test_the_end_waits_for_streams(model):
    with running(model) as server:
        stream = complete(server, prompt="x", max_tokens=80, temperature=0, stream=True)
        next(stream)
        end = asyncio.run_coroutine_threadsafe(server.server.stop(), server.loop)
        wait_until(lambda: server.engine.ends)
        with pytest.raises(openai.InternalServerError, match="shutting down") as error:
            complete(server, prompt="x")
        assert error.value.status_code == 503
        assert list(stream)[-1].choices[0].finish_reason == "length"
        end.result(10)


def test_the_end_does_not_wait_for_ever(model):
    with running(model, batch=1) as server:
        streams = [complete(server, prompt="x", max_tokens=5000, stream=True)]
        next(streams[0])
        server.call(server.server.stop(grace=0.05))
        with pytest.raises(openai.APIError, match="shutting down"):
            list(streams[0])
        assert not server.engine.thread.is_alive()


def test_texts_go_on_from_a_state():
    """The server has read the beginning of the text before, and a prompt is the rest."""
    model = tiny_model()
    with torch.no_grad():
        for weight in model.blocks.parameters():
            # with initial weights the past hardly shows in the text
            weight.mul_(20)
    before, prompt = "the cat sat on ", "a"
    _, state = model.extend(torch.tensor([[256, *before.encode()]]))
    text, _ = alone(model, {"prompt": before + prompt, "temperature": 0, "max_tokens": 9})
    assert text != alone(model, {"prompt": [*prompt.encode()], "temperature": 0, "max_tokens": 9})[0]
    with running(model, state=state) as server:
        for _ in range(2):
            answer = complete(server, prompt=prompt, temperature=0, max_tokens=9)
            assert answer.choices[0].text == text and answer.usage.prompt_tokens == len(prompt)
        with pytest.raises(openai.BadRequestError, match="at least one token"):
            complete(server, prompt="")
