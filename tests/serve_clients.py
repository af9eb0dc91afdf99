# SPDX-License-Identifier: Apache-2.0
"""Real clients of `mxdraft serve`, unmodified: run by `make test-serve` in an environment that has them.

Each asks for the same answer, whole and streamed, and has to get the text given.

    python serve_clients.py URL WYOMING MODEL PROMPT TEXT      the text is that of 16 greedy tokens
"""

from __future__ import annotations

import asyncio
import sys

import ollama
import openai
from langchain_openai import ChatOpenAI
from wyoming.asr import Transcript
from wyoming.client import AsyncTcpClient
from wyoming.handle import Handled
from wyoming.info import Describe, Info

TOKENS = 16


def ask_openai(url: str, model: str, prompt: str, text: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    assert [m.id for m in client.models.list()] == [model]
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": prompt}], max_tokens=TOKENS, temperature=0
    )
    assert answer.choices[0].message.content == text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage
    assert answer.usage.completion_tokens == TOKENS
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_completion_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces = list(stream)
    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == text
    assert pieces[-1].usage
    assert pieces[-1].usage.completion_tokens == TOKENS
    response = client.responses.create(model=model, input=prompt, max_output_tokens=TOKENS, temperature=0)
    assert response.output_text == text
    with client.responses.stream(
        model=model, input=[{"role": "user", "content": prompt}], max_output_tokens=TOKENS, temperature=0
    ) as events:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == text
    told = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=TOKENS,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    assert told.choices[0].logprobs
    assert len(told.choices[0].logprobs.content or ()) == TOKENS
    try:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "x " * 5000}])
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded"  # noqa: PT017
    else:
        raise AssertionError("a prompt that does not fit was taken")


async def ask_openai_together(url: str, model: str, prompt: str, text: str) -> None:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    answers = await asyncio.gather(
        *(
            client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": prompt}],
                max_tokens=TOKENS,
                temperature=0,
            )
            for _ in range(12)
        )
    )
    assert {a.choices[0].message.content for a in answers} == {text}


def ask_langchain(url: str, model: str, prompt: str, text: str) -> None:
    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_tokens=TOKENS)
    assert chat.invoke(prompt).content == text
    assert "".join(str(piece.content) for piece in chat.stream(prompt)) == text


def ask_ollama(url: str, model: str, prompt: str, text: str) -> None:
    client = ollama.Client(host=url)
    assert [m.model for m in client.list().models] == [model]
    assert [m.model for m in client.ps().models] == [model]
    assert client.show(model).capabilities == ["completion"]
    options = {"num_predict": TOKENS, "temperature": 0, "num_ctx": 8192}
    messages = [{"role": "user", "content": prompt}]
    assert client.chat(model, messages, options=options).message.content == text
    pieces = client.chat(model, messages, options=options, stream=True)
    assert "".join(p.message.content or "" for p in pieces) == text
    assert client.generate(model, prompt, options=options).response == text
    client.pull(model)


async def ask_wyoming(place: str, model: str, prompt: str, text: str) -> None:
    async with AsyncTcpClient.from_uri(place) as client:  # type: ignore[union-attr]
        await client.write_event(Describe().event())
        event = await client.read_event()
        assert event
        assert [m.name for m in Info.from_event(event).handle[0].models] == [model]
        await client.write_event(Transcript(prompt).event())
        event = await client.read_event()
        assert event
        assert (Handled.from_event(event).text or "").startswith(text)


def main() -> None:
    url, wyoming, model, prompt, text = sys.argv[1:]
    ask_openai(url, model, prompt, text)
    asyncio.run(ask_openai_together(url, model, prompt, text))
    ask_langchain(url, model, prompt, text)
    ask_ollama(url, model, prompt, text)
    asyncio.run(ask_wyoming(wyoming, model, prompt, text))


if __name__ == "__main__":
    main()
