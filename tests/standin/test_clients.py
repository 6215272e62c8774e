from __future__ import annotations

from contextlib import asynccontextmanager

import anthropic
import openai
import pytest

MESSAGES = [{"role": "user", "content": "word " * 200}]


@asynccontextmanager
async def openai_client(standin):
    url = f"{standin.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
        yield client


@asynccontextmanager
async def anthropic_client(standin):
    url = standin.url
    async with anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as client:
        yield client


async def test_openai_chat_reports_growing_cached_tokens(running):
    async with running() as standin, openai_client(standin) as client:
        turns, cached = list(MESSAGES), []
        for _ in range(3):
            answer = await client.chat.completions.create(model="m", messages=turns)
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
            turns += [{"role": "assistant", "content": answer.choices[0].message.content}]
            turns += MESSAGES

    assert cached[0] == 0 < cached[1] < cached[2]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 16


async def test_openai_chat_stream_gives_the_whole_text_and_usage_when_asked(running):
    async with running() as standin, openai_client(standin) as client:
        whole = await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=5)
        stream = await client.chat.completions.create(
            model="m",
            messages=MESSAGES,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]

    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 5
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


async def test_openai_chat_stream_has_no_usage_unasked(running):
    async with running() as standin, openai_client(standin) as client:
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        chunks = [chunk async for chunk in stream]

    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


async def test_openai_completions_answer_each_prompt(running):
    async with running() as standin, openai_client(standin) as client:
        whole = await client.completions.create(model="m", prompt=["one", "two"], max_tokens=3)
        stream = await client.completions.create(
            model="m", prompt=["one", "two"], max_tokens=3, stream=True
        )
        texts = {0: "", 1: ""}
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text

    assert [choice.text for choice in whole.choices] == [texts[0], texts[1]]
    assert whole.usage.completion_tokens == 6


async def test_openai_responses_stream_ends_in_the_whole_answer(running):
    async with running() as standin, openai_client(standin) as client:
        whole = await client.responses.create(model="m", input="word " * 200)
        async with client.responses.stream(model="m", input="word " * 200) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()

    assert final.output_text == whole.output_text
    assert whole.usage.input_tokens_details.cached_tokens == 0
    assert final.usage.input_tokens_details.cached_tokens > 0
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_openai_responses_are_incomplete_at_the_limit(running):
    async with running() as standin, openai_client(standin) as client:
        answer = await client.responses.create(model="m", input="Hi", max_output_tokens=2)

    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


async def test_openai_embeddings_are_the_same_in_both_encodings(running):
    async with running() as standin, openai_client(standin) as client:
        packed = await client.embeddings.create(model="m", input=["a", "b"])
        plain = await client.embeddings.create(
            model="m", input=["a", "b"], encoding_format="float", dimensions=16
        )

    assert plain.data[0].embedding != plain.data[1].embedding
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)


async def test_openai_models_lists_the_model_and_its_adapters(running):
    async with (
        running(model="base", adapters=("lora",)) as standin,
        openai_client(standin) as client,
    ):
        models = [model.id async for model in client.models.list()]

    assert models == ["base", "lora"]


async def test_anthropic_messages_report_what_was_read_from_the_cache(running):
    async with running() as standin, anthropic_client(standin) as client:
        asked = {"model": "m", "max_tokens": 4, "messages": MESSAGES, "system": "Be brief"}
        first = await client.messages.create(**asked)
        second = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            text = "".join([part async for part in stream.text_stream])
            streamed = await stream.get_final_message()

    assert first.usage.cache_read_input_tokens == 0
    assert second.usage.cache_read_input_tokens > 0
    assert first.usage.input_tokens == sum(
        (second.usage.input_tokens, second.usage.cache_read_input_tokens)
    )
    assert streamed.usage.cache_read_input_tokens == second.usage.cache_read_input_tokens
    assert text == second.content[0].text
    assert streamed.stop_reason == "max_tokens"


async def test_an_unknown_model_is_a_not_found_error_where_names_are_strict(running):
    async with running(model="base", strict_models=True) as standin:
        async with openai_client(standin) as client:
            with pytest.raises(openai.NotFoundError, match="`m` does not exist"):
                await client.chat.completions.create(model="m", messages=MESSAGES)
        async with anthropic_client(standin) as client:
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(model="m", max_tokens=1, messages=MESSAGES)
