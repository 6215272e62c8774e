"""The official OpenAI and Anthropic clients, unchanged, through the gateway."""

import anthropic
import openai
import pytest
import pytest_asyncio

pytestmark = pytest.mark.asyncio(loop_scope="module")

SYSTEM = "You answer in few words and never hurry. " * 60


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(start_gateway):
    async with start_gateway(standins=3) as running:
        yield running
        await running.until_idle()
        assert await running.service.metric("extproc_errors_total") == 0
        assert await running.service.metric("extproc_fallbacks_total") == 0


@pytest_asyncio.fixture(loop_scope="module")
async def openai_client(gateway):
    url = f"{gateway.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def anthropic_client(gateway):
    async with anthropic.AsyncAnthropic(
        base_url=gateway.url, api_key="key", max_retries=0
    ) as client:
        yield client


async def test_an_openai_chat_hits_the_cache_with_its_second_turn(openai_client):
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Tell me of the sea. " * 50},
    ]
    first = await openai_client.chat.completions.create(
        model="standin", messages=messages, max_tokens=4
    )
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And of the wind."},
    ]
    second = await openai_client.chat.completions.create(
        model="standin", messages=messages, max_tokens=4
    )

    assert second.usage.prompt_tokens_details.cached_tokens >= 0.9 * first.usage.prompt_tokens


async def test_an_openai_stream_comes_whole(openai_client):
    stream = await openai_client.chat.completions.create(
        model="standin",
        messages=[{"role": "user", "content": "Count."}],
        max_tokens=50,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]

    assert chunks[-1].usage.completion_tokens == 50
    words = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert len(words) == 50


async def test_the_other_openai_paths_answer(openai_client):
    completion = await openai_client.completions.create(
        model="standin", prompt=["one", "two"], max_tokens=3
    )
    embedding = await openai_client.embeddings.create(model="standin", input=["a", "b"])
    answer = await openai_client.responses.create(
        model="standin", instructions="Be kind.", input="Hello", max_output_tokens=3
    )
    models = [model.id async for model in openai_client.models.list()]

    assert [choice.index for choice in completion.choices] == [0, 1]
    assert len(embedding.data) == 2
    assert answer.output_text
    assert models == ["standin"]


async def test_an_anthropic_message_hits_the_cache_with_its_second_turn(anthropic_client):
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    messages = [{"role": "user", "content": "Tell me of the hills. " * 50}]
    first = await anthropic_client.messages.create(
        model="standin", system=system, messages=messages, max_tokens=4
    )
    messages += [
        {"role": "assistant", "content": first.content[0].text},
        {"role": "user", "content": "And of the vale."},
    ]
    second = await anthropic_client.messages.create(
        model="standin", system=system, messages=messages, max_tokens=4
    )

    length = first.usage.input_tokens + first.usage.cache_read_input_tokens
    assert second.usage.cache_read_input_tokens >= 0.9 * length


async def test_an_anthropic_stream_comes_whole(anthropic_client):
    async with anthropic_client.messages.stream(
        model="standin", messages=[{"role": "user", "content": "Count."}], max_tokens=50
    ) as stream:
        words = [text async for text in stream.text_stream]
        final = await stream.get_final_message()

    assert len(words) == 50
    assert final.usage.output_tokens == 50
    assert final.content[0].text == "".join(words)


async def test_an_engines_error_reaches_the_client_as_its_own(openai_client):
    with pytest.raises(openai.BadRequestError) as caught:
        await openai_client.chat.completions.create(model="standin", messages=[], n=2)

    assert caught.value.status_code == 400
