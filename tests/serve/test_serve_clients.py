"""The official Python clients of OpenAI and Anthropic against a running server."""

import json
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from refusals import refusal
from serve.running import CODE, Running, assert_refused, wait_for

pytestmark = pytest.mark.once("a process of its own, which speculates")
HELLO: Any = [{"role": "user", "content": "def add("}]
GREEDY: Any = {"temperature": 0, "max_tokens": 24}


# ----------------------------------------------------------------------------------------------------------- OpenAI


def test_models(client: Any) -> None:
    import openai

    assert [model.id for model in client.models.list()] == ["shipped"]
    assert client.models.retrieve("shipped").id == "shipped"
    assert "it must be 'shipped'" in refusal(openai.NotFoundError, client.models.retrieve, "gpt-4o")


def test_what_is_served_is_what_the_engine_says(client: Any, plain: LLM) -> None:
    """Whole and in pieces, greedy and with a seed, with and without speculation: the text is that of LLM."""
    for fields, more in (({"temperature": 0}, {}), ({"temperature": 0.8, "seed": 11}, {"min_p": 0.05})):
        want = plain.generate(CODE, SamplingParams(max_tokens=24, **fields, **more))[0]
        given: Any = {"model": "shipped", "prompt": CODE, "max_tokens": 24, **fields, "extra_body": more}
        whole = client.completions.create(**given)
        assert whole.choices[0].text == want.text
        assert whole.choices[0].finish_reason == want.finish_reason
        stream = client.completions.create(stream=True, **given)
        assert "".join(chunk.choices[0].text for chunk in stream) == want.text


def test_a_prompt_is_repeated_with_its_log_probabilities(client: Any, plain: LLM) -> None:
    """As harnesses that score texts ask for them: with an answer of one token, or of none."""
    ids = plain.tokenizer.encode(CODE)
    want = plain.generate([ids], SamplingParams(max_tokens=1, temperature=0, logprobs=2, prompt_logprobs=2))[0]
    scores = [None, *(place.logprob for place in (want.prompt_logprobs or [])[1:] if place is not None)]
    for prompt in (CODE, ids):
        for num in (1, 0):
            given = {"prompt": prompt, "max_tokens": num, "temperature": 0, "echo": True}
            whole = client.completions.create(model="shipped", logprobs=2, **given)
            own = (want.logprobs or [])[:num]
            assert whole.choices[0].text == CODE + want.text * num
            logprobs = whole.choices[0].logprobs
            assert logprobs.token_logprobs == [*scores, *(place.logprob for place in own)]
            assert "".join(logprobs.tokens or []) == CODE + want.text * num
            assert (logprobs.top_logprobs or [0])[0] is None
            assert all(len(top) in (2, 3) for top in (logprobs.top_logprobs or [])[1:])
            tokens, offsets = logprobs.tokens or [], logprobs.text_offset or []
            assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]
            stream = client.completions.create(model="shipped", stream=True, **given)
            assert "".join(chunk.choices[0].text for chunk in stream) == CODE + want.text * num


def test_a_chat_whole_and_in_pieces(client: Any, plain: LLM) -> None:
    want = plain.chat(HELLO, SamplingParams(**GREEDY))[0]
    whole = client.chat.completions.create(model="shipped", messages=HELLO, **GREEDY)
    assert whole.choices[0].message.content == want.text
    counts = (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert counts == (len(want.prompt_ids), len(want.token_ids))
    asked: Any = {"model": "shipped", "messages": HELLO, "stream_options": {"include_usage": True}, **GREEDY}
    chunks = list(client.chat.completions.create(stream=True, **asked))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == want.text
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == [want.finish_reason]
    last = chunks[-1]
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == counts
    cached = last.usage.prompt_tokens_details.cached_tokens
    assert cached == (counts[0] - 1) // 16 * 16, "the same prompt again is found in the cache"


def test_usage_so_far_with_each_chunk(client: Any) -> None:
    """As load tools ask for it: two choices, whose tokens are counted together."""
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    given: Any = {"prompt": CODE, "n": 2, "max_tokens": 8, "seed": 3, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(model="shipped", stream=True, stream_options=options, **given)
    usages = [chunk.usage for chunk in stream]
    counts = [usage.completion_tokens for usage in usages if usage is not None]
    assert len(counts) == len(usages) > 4
    assert counts == sorted(counts)
    assert (0 < counts[0] < 16, counts[-1]) == (True, 16)
    assert len({usage.prompt_tokens for usage in usages if usage is not None}) == 1
    assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in usages if usage)


@pytest.mark.parametrize("seed", range(4))
def test_log_probabilities_of_a_chat_spell_its_content(client: Any, seed: int) -> None:
    """The end is none of them, nor is the text that stops the answer."""
    ended = set()
    for more in ({"max_tokens": 40}, {"stop": ["\n", "(x"]}, {"logit_bias": {"0": 8}}):
        asked: Any = {"model": "shipped", "messages": HELLO, "seed": seed, "max_tokens": 20, "logprobs": True} | more
        (whole,) = client.chat.completions.create(**asked).choices
        assert whole.message.content == "".join(one.token for one in whole.logprobs.content or [])
        pieces = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **asked)]
        told = [one for piece in pieces if piece.logprobs for one in piece.logprobs.content or []]
        assert [one.logprob for one in told] == [one.logprob for one in whole.logprobs.content or []]
        ended.add(whole.finish_reason)
    assert "stop" in ended


def test_ids_of_prompts_and_answers(server: Running, plain: LLM) -> None:
    """As those ask for them who train on answers: whole, and put together of a stream's events."""
    params = SamplingParams(**GREEDY)
    chat, text = plain.chat(HELLO, params)[0], plain.generate(CODE, params, raw=True)[0]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": HELLO, **GREEDY, "return_token_ids": True},
        "/v1/completions": {"prompt": CODE, **GREEDY, "return_token_ids": True},
    }
    for (url, body), want in zip(bodies.items(), (chat, text), strict=True):
        whole = server.http.post(url, json=body).json()
        (choice,) = whole["choices"]
        told = whole if url.startswith("/v1/chat") else choice
        assert (told["prompt_token_ids"], choice["token_ids"]) == (want.prompt_ids, want.token_ids)
        lines = server.http.post(url, json={**body, "stream": True}).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        choices = [choice for one in events for choice in one["choices"]]
        assert [token for choice in choices for token in choice.get("token_ids", [])] == want.token_ids
        prompts = [one["prompt_token_ids"] for one in (*events, *choices) if "prompt_token_ids" in one]
        assert prompts == [want.prompt_ids]
        if url == "/v1/completions":  # the prompt alone
            answer = server.http.post(url, json={**body, "echo": True, "max_tokens": 0}).json()
            (echo,) = answer["choices"]
            assert answer["usage"]["completion_tokens"] == 0
            assert (echo["text"], echo["token_ids"], echo["prompt_token_ids"]) == (CODE, [], want.prompt_ids)
        assert "token_ids" not in server.http.post(url, json={**body, "return_token_ids": False}).json()["choices"][0]


def test_several_prompts_and_choices_with_log_probabilities(client: Any) -> None:
    given: Any = {"prompt": [CODE, "class A:"], "n": 2, "seed": 5, "logprobs": 2, "max_tokens": 12}
    whole = client.completions.create(model="shipped", **given)
    texts = [""] * 4
    tokens = [list[str]() for _ in range(4)]
    offsets = [list[int]() for _ in range(4)]
    for chunk in client.completions.create(model="shipped", stream=True, **given):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                tokens[choice.index] += choice.logprobs.tokens or []
                offsets[choice.index] += choice.logprobs.text_offset or []
    assert texts == [choice.text for choice in whole.choices]
    for i, choice in enumerate(whole.choices):
        assert (tokens[i], offsets[i]) == (choice.logprobs.tokens, choice.logprobs.text_offset)
    chat: Any = {"messages": HELLO, "n": 2, "seed": 5, "logprobs": True, "top_logprobs": 3, "max_tokens": 8}
    answers = client.chat.completions.create(model="shipped", **chat)
    pieces: list[list[Any]] = [[], []]
    for part in client.chat.completions.create(model="shipped", stream=True, **chat):
        for delta in part.choices:
            pieces[delta.index] += (delta.logprobs.content or []) if delta.logprobs else []
    for answer, got in zip(answers.choices, pieces, strict=True):
        want = answer.logprobs.content or []
        assert [(t.token, t.logprob) for t in got] == [(t.token, t.logprob) for t in want]
        assert len(want) == 8
        assert len(want[0].top_logprobs) == 3


def test_stop_texts_end_a_stream_before_they_show(client: Any) -> None:
    whole = client.completions.create(model="shipped", prompt=CODE, **GREEDY).choices[0].text
    stop = whole[7:10]
    chunks = list(client.completions.create(model="shipped", prompt=CODE, stop=[stop], stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_penalties_and_biases_are_honoured(client: Any, plain: LLM) -> None:
    fields: Any = {"logit_bias": {"5": -100}, "presence_penalty": 1.5, "frequency_penalty": 0.5, **GREEDY}
    more: Any = {"repetition_penalty": 1.3, "top_k": 20}
    got = client.completions.create(model="shipped", prompt=CODE, extra_body=more, **fields)
    want = plain.generate(CODE, SamplingParams(**{**fields, **more, "logit_bias": {5: -100}}))[0]
    assert got.choices[0].text == want.text


def test_a_beam_search_answers_with_its_best_texts(client: Any, plain: LLM) -> None:
    body = {"num_beams": 4, "draft_beams": 6, "speculation": {"report": True}}
    got = client.completions.create(model="shipped", prompt=CODE, n=2, extra_body=body, **GREEDY)
    expected = plain.generate(CODE, SamplingParams(num_beams=4, n=2, **GREEDY))
    assert [choice.text for choice in got.choices] == [output.text for output in expected]
    report = (got.model_extra or {})["forerun"]
    assert (report["acceptance"], report["num_emitted"]) == ("beam", expected[0].report.num_emitted)
    assert report["scores"] == [output.score for output in expected]


def test_a_prediction_is_counted(client: Any) -> None:
    asked: Any = {"model": "shipped", "messages": HELLO, "temperature": 0, "max_tokens": 40}
    text = client.chat.completions.create(**asked).choices[0].message.content or ""
    fixed = {"speculation": {"report": True, "spec_length": 5}}  # however busy the machine is
    again = client.chat.completions.create(**asked, prediction={"type": "content", "content": text}, extra_body=fixed)
    assert again.choices[0].message.content == text
    details = again.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 10
    report: Any = again.model_extra["forerun"] if again.model_extra else None
    assert details.accepted_prediction_tokens == report["num_accepted"]
    assert details.rejected_prediction_tokens == report["num_drafted"] - report["num_accepted"]


METRICS = {  # of speculation, and the fields of a report that say the same
    "num_draft_tokens": "num_drafted",
    "num_tested_tokens": "num_tested",
    "num_accepted_tokens": "num_accepted",
    "num_accepted_tokens_per_pos": "num_accepted",
}


def test_speculation_of_one_request(client: Any, server: Running) -> None:
    """It chooses its drafter and length, and hears how it went; with the last chunk of a stream, too. So do metrics."""
    import openai

    def counted() -> dict[str, float]:
        return {name: server.metric(f"forerun:spec_decode_{name}_total") for name in METRICS}

    asked = {"speculation": {"draft": "none", "report": True}}
    plain = client.completions.create(model="shipped", prompt=CODE, extra_body=asked, **GREEDY)
    report: Any = plain.model_extra["forerun"] if plain.model_extra else None
    assert (report["draft"], report["num_drafted"], report["mean_accepted_length"]) == ("none", 0, 1.0)
    before = counted()
    asked = {"speculation": {"spec_length": 3, "report": True}}
    chunks = list(client.completions.create(model="shipped", prompt=CODE, stream=True, extra_body=asked, **GREEDY))
    report = (chunks[-1].model_extra or {})["forerun"]
    assert report["draft"] == "model"
    assert 0 < report["num_accepted"] <= report["num_drafted"]
    wait_for(server.is_idle)
    told = {name: report[found] for name, found in METRICS.items()}
    assert {name: num - before[name] for name, num in counted().items()} == told
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == plain.choices[0].text
    assert "forerun" not in (client.completions.create(model="shipped", prompt=CODE, **GREEDY).model_extra or {})
    for wrong, sentence in (
        ({"draft": "nothing"}, "there is no drafter in this engine .nothing."),
        ({"drat": "none"}, "did you mean 'draft'"),
        ({"report": 1}, "must be true or false"),
    ):
        with pytest.raises(openai.BadRequestError, match=sentence):
            client.completions.create(model="shipped", prompt=CODE, extra_body={"speculation": wrong})


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"model": "gpt-4o"}, 404, "it must be 'shipped'"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "template does not know tools"),
        ({"extra_body": {"reasoning_effort": "much"}}, 400, "it must be one of none, minimal, low"),
        ({"extra_body": {"n": 128, "priority": 1.5}}, 400, "priority=1.5"),
    ],
)
def test_errors_name_the_field(client: Any, body: Any, status: int, sentence: str) -> None:
    import openai

    with pytest.raises(openai.APIStatusError, match=sentence) as error:
        client.chat.completions.create(**{"model": "shipped", "messages": HELLO, **body})
    assert error.value.status_code == status
    assert error.value.request_id


def test_more_tokens_than_the_context_has_are_as_many_as_it_has(client: Any) -> None:
    """As agents ask for them. Effort of a model that does not think is no more than a hint."""
    asked: Any = {"max_tokens": 10**6, "temperature": 0, "stop": ["\n"], "reasoning_effort": "low"}
    got = client.chat.completions.with_raw_response.create(model="shipped", messages=HELLO, **asked)
    assert got.headers["x-forerun-ignored"] == "reasoning_effort, max_tokens"
    assert got.parse().choices[0].finish_reason == "stop"


def test_harmless_fields_are_accepted(client: Any) -> None:
    harmless: Any = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    harmless |= {"safety_identifier": "x", "prompt_cache_key": "y", "parallel_tool_calls": True, "tools": []}
    harmless |= {"tool_choice": "none", "response_format": {"type": "text"}}
    client.chat.completions.create(model="shipped", messages=HELLO, max_completion_tokens=1, **harmless)


def test_responses_whole_and_in_pieces(client: Any, plain: LLM) -> None:
    import openai

    given: Any = {"instructions": "# Python", "input": "def add(", "temperature": 0, "max_output_tokens": 16}
    conversation: Any = [{"role": "system", "content": "# Python"}, *HELLO]
    want = plain.chat(conversation, SamplingParams(temperature=0, max_tokens=16))[0]
    whole = client.responses.create(model="shipped", **given)
    assert whole.output_text == want.text
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (len(want.prompt_ids), 16)
    events = list(client.responses.create(model="shipped", stream=True, **given))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    begun = ["created", "in_progress", "output_item.added", "content_part.added"]
    ended = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds == [*begun, *["output_text.delta"] * deltas, *ended]
    assert [event.sequence_number for event in events] == list(range(len(events)))  # type: ignore[union-attr]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == want.text
    with client.responses.stream(model="shipped", input="def f", extra_body={"stop": ["\n"]}) as stream:
        assert stream.get_final_response().status == "completed"
    for needed in ("completed_at", "presence_penalty", "frequency_penalty", "max_tool_calls", "store", "tools"):
        assert needed in whole.model_dump(), "clients that check the whole object want all of it"
    with pytest.raises(openai.BadRequestError, match="send the whole conversation as input"):
        client.responses.create(model="shipped", input="x", previous_response_id="resp_1")


def test_a_response_goes_on_from_one_that_is_kept(client: Any, plain: LLM) -> None:
    import openai

    given: Any = {"model": "shipped", "temperature": 0, "max_output_tokens": 8}
    for stream in (False, True):
        answer: Any = client.responses.create(input="def add(", instructions="# Python", stream=stream, **given)
        first = list(answer)[-1].response if stream else answer
        second = client.responses.create(input="def sub(", previous_response_id=first.id, **given)
        said = [*HELLO, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "def sub("}]
        assert second.output_text == plain.chat(said, SamplingParams(temperature=0, max_tokens=8))[0].text
        assert (second.previous_response_id, client.responses.retrieve(second.id).id) == (first.id, second.id)
        client.responses.delete(first.id)
        third = client.responses.create(input="def mul(", previous_response_id=second.id, **given)
        assert third.usage.input_tokens > second.usage.input_tokens
        assert "is not kept here" in refusal(openai.NotFoundError, client.responses.retrieve, first.id)
        foreign = client.with_options(api_key="another")
        with pytest.raises(openai.BadRequestError, match="is not kept here"):
            foreign.responses.create(input="def sub(", previous_response_id=second.id, **given)
    unkept = client.responses.create(input="def add(", store=False, **given)
    assert unkept.store is False
    with pytest.raises(openai.BadRequestError, match="unless store is false"):
        client.responses.create(input="x", previous_response_id=unkept.id, **given)


# -------------------------------------------------------------------------------------------------------- Anthropic


def test_messages_whole_and_in_pieces(claude: Any, plain: LLM) -> None:
    long = "# Python " * 20  # more than a block, which the second request finds in the cache
    conversation: Any = [{"role": "system", "content": f"{long}\n# 3"}, *HELLO]
    want = plain.chat(conversation, SamplingParams(temperature=0, max_tokens=16))[0]
    given: Any = {
        "model": "shipped",
        "max_tokens": 16,
        "extra_body": {"temperature": 0},  # which this client has no argument for
        "system": [{"type": "text", "text": long}, {"type": "text", "text": "# 3"}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "def add("}]}],
    }
    whole = claude.messages.create(**given)
    assert [block.text for block in whole.content if block.type == "text"] == [want.text]
    assert whole.stop_reason == "max_tokens"
    usage = whole.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(want.prompt_ids)
    with claude.messages.stream(**given) as stream:
        assert "".join(stream.text_stream) == want.text
        final = stream.get_final_message()
    assert final.usage.output_tokens == 16
    assert final.usage.cache_read_input_tokens
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == len(want.prompt_ids)
    del given["max_tokens"], given["extra_body"]
    assert claude.messages.count_tokens(**given).input_tokens == len(want.prompt_ids)


def test_messages_go_on_from_the_assistants_own_words(claude: Any, plain: LLM) -> None:
    conversation: Any = [*HELLO, {"role": "assistant", "content": "a, b):\n    return"}]
    ids = plain.apply_chat_template(conversation, continue_final_message=True)
    want = plain.generate([ids], SamplingParams(temperature=0, max_tokens=16))[0].text
    given: Any = {"model": "shipped", "max_tokens": 16, "messages": conversation, "extra_body": {"temperature": 0}}
    got = claude.messages.create(**given)
    assert got.content[0].type == "text"
    assert got.content[0].text == want
    stopped = claude.messages.create(**given, stop_sequences=[want[2:5]])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", want[2:5])


def test_errors_of_messages(claude: Any) -> None:
    import anthropic

    image: Any = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}]
    with pytest.raises(anthropic.BadRequestError, match="the model reads texts alone"):
        claude.messages.create(model="shipped", max_tokens=4, messages=image)
    with pytest.raises(anthropic.NotFoundError, match="it must be 'shipped'") as error:
        claude.messages.create(model="claude", max_tokens=4, messages=HELLO)
    body: Any = error.value.body
    assert body["error"]["type"] == "not_found_error"
    assert body["request_id"] == error.value.request_id


# -------------------------------------------------------------------------------------------------- texts and ids


def test_tokenize_and_back(server: Running, plain: LLM) -> None:
    ids = plain.tokenizer.encode(CODE)
    assert server.http.post("/tokenize", json={"prompt": CODE}).json()["tokens"] == ids
    assert server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == CODE
    chat = server.http.post("/tokenize", json={"messages": HELLO, "return_token_strs": True}).json()
    assert chat["tokens"] == plain.apply_chat_template(HELLO)
    assert len(chat["token_strs"]) == chat["count"] == len(chat["tokens"])
    for url, body, sentence in (
        ("/tokenize", {}, "a prompt or messages"),
        ("/tokenize", {"prompt": 3}, "must be a text"),
        ("/tokenize", {"prompt": CODE, "tools": []}, "tools belongs to messages"),
        ("/tokenize", {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}, "know tools"),
        ("/detokenize", {"tokens": [10**9]}, "a list of ids"),
        ("/detokenize", {"ids": []}, "there is no field 'ids'"),
    ):
        assert_refused(server.http.post(url, json=body), sentence)


def test_what_harnesses_ask_of_the_tokenizer(server: Running, plain: LLM) -> None:
    """They cut their texts by /tokenize, and make conversations texts by the template."""
    info = server.http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == ("<|endoftext|>", "<|endoftext|>")
    assert (info["chat_template"], info["model_max_length"]) == (plain.chat_template.text, 2048)
