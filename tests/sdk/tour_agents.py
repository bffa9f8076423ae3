"""Agent libraries: `pydantic-ai`, `openai-agents` and `smolagents`."""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

import agents
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from smolagents import OpenAIServerModel
from steps import KEY, MODEL, run, step

URL = sys.argv[1]
agents.set_tracing_disabled(True)


class Plan(BaseModel):
    city: Literal["Paris", "Rome"]
    sunny: bool


SETTINGS = {"max_tokens": 200, "temperature": 0.0}


@step
def pydantic_ai_gives_objects():
    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
    for model in (
        OpenAIChatModel(MODEL, provider=provider),
        OpenAIResponsesModel(MODEL, provider=provider),
    ):
        found = Agent(model, output_type=Plan, model_settings=SETTINGS).run_sync("Hello")
        assert isinstance(found.output, Plan)


@step
def pydantic_ai_streams():
    async def stream() -> str:
        provider = AnthropicProvider(base_url=URL, api_key=KEY)
        agent = Agent(AnthropicModel(MODEL, provider=provider), model_settings=SETTINGS)
        async with agent.run_stream("Hello") as result:
            return "".join([part async for part in result.stream_text(delta=True)])

    assert isinstance(asyncio.run(stream()), str)


@step
def openai_agents_run():
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    settings = agents.ModelSettings(max_tokens=200, temperature=0.0)
    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        model = kind(model=MODEL, openai_client=client)
        plain = agents.Agent(
            name="a", instructions="Be brief.", model=model, model_settings=settings
        )
        assert isinstance(agents.Runner.run_sync(plain, "Hello").final_output, str)
        typed = agents.Agent(name="a", model=model, model_settings=settings, output_type=Plan)
        assert isinstance(agents.Runner.run_sync(typed, "Hello").final_output, Plan)


@step
def smolagents_generate():
    model = OpenAIServerModel(MODEL, api_base=f"{URL}/v1", api_key=KEY, max_tokens=16)
    reply = model.generate([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}])
    assert isinstance(reply.content, str)
    assert reply.token_usage.output_tokens <= 16


run("pydantic-ai-slim")
