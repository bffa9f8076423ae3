"""Libraries for structured output: `instructor`, `outlines` and `guidance`."""

from __future__ import annotations

import sys
from typing import Literal

import guidance
import instructor
import outlines
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel
from steps import HELLO, KEY, MODEL, run, step

URL = sys.argv[1]


class Plan(BaseModel):
    city: Literal["Paris", "Rome"]
    sunny: bool


def client() -> OpenAI:
    return OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=120)


def asked(mode: instructor.Mode) -> Plan:
    made = instructor.from_openai(client(), mode=mode)
    given = {"model": MODEL, "messages": HELLO, "max_tokens": 200, "temperature": 0}
    return made.chat.completions.create(response_model=Plan, max_retries=0, **given)


@step
def instructor_with_tools():
    names = ("TOOLS", "TOOLS_STRICT", "RESPONSES_TOOLS", "RESPONSES_TOOLS_WITH_INBUILT_TOOLS")
    for name in (*names, "FUNCTIONS"):
        assert isinstance(asked(instructor.Mode[name]), Plan)


@step
def instructor_with_a_schema():
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON_O1):
        assert isinstance(asked(mode), Plan)


@step
def instructor_with_tools_of_anthropic():
    """`tool_choice` names the one tool: the call is made whatever the model would say."""
    plain = Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=120)
    made = instructor.from_anthropic(plain, mode=instructor.Mode.ANTHROPIC_TOOLS)
    given = {"model": MODEL, "messages": HELLO, "max_tokens": 200, "temperature": 0}
    assert isinstance(made.messages.create(response_model=Plan, max_retries=0, **given), Plan)


@step
def outlines_with_a_schema():
    model = outlines.from_openai(client(), MODEL)
    text = model("Hello", Plan, max_tokens=100, temperature=0)
    assert isinstance(Plan.model_validate_json(text), Plan)


@step
def guidance_generates():
    lm = guidance.models.OpenAI(MODEL, api_key=KEY, base_url=f"{URL}/v1", echo=False)
    with guidance.user():
        lm += "Hello"
    with guidance.assistant():
        lm += guidance.gen("answer", max_tokens=8)
    assert isinstance(lm["answer"], str)


run("instructor")
