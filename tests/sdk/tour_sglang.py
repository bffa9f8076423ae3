"""SGLang's own package: its frontend language, against a server of ours."""

from __future__ import annotations

import sys

import sglang as sgl
from steps import KEY, run, step

URL = sys.argv[1]


@sgl.function
def capital(s, country):
    s += sgl.user(f"What is the capital of {country}?")
    s += sgl.assistant(sgl.gen("answer", max_tokens=16, temperature=0))
    s += sgl.user("Is that so?")
    s += sgl.assistant(sgl.select("sure", ["yes", "no"]))


@step
def programs_run():
    backend = sgl.RuntimeEndpoint(URL, api_key=KEY)
    states = [capital.run(country="Italy", backend=backend, stream=s) for s in (False, True)]
    plain, streamed = (state["answer"] for state in states)
    assert plain == streamed
    assert all(state["sure"] in ("yes", "no") for state in states)


run("sglang")
