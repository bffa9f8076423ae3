"""ReAct: the model thinks, calls a tool, reads its result, and repeats until it has an answer."""

from __future__ import annotations

import argparse
import operator
import re

import sylvan as sgl

QUESTION = "What is 17 + 25, plus the age of Ada?"
EXAMPLE = """Answer with tools. Tools: add[a, b], age[name].

Question: What is 2 + 3?
Thought: I add the numbers.
Action: add[2, 3]
Observation: 5
Thought: I know the answer.
Action: finish[5]

"""
AGES = {"ada": 36, "alan": 41}
ACTION = r"(add\[-?\d{1,6}, -?\d{1,6}\]|age\[[A-Za-z]{1,12}\]|finish\[[^\]\n]{1,30}\])"
MAX_STEPS = 4


def call_tool(action):
    """Result of an action, and whether it was the last."""
    found = re.fullmatch(r"(\w+)\[(.*)\]", action)
    if found is None:  # cut off by the limit on tokens
        return action, True
    name, argument = found.groups()
    if name == "add":
        return str(operator.add(*map(int, argument.split(",")))), False
    if name == "age":
        return str(AGES.get(argument.lower(), "unknown")), False
    return argument, True


@sgl.function
def react(s, question):
    s += EXAMPLE + "Question: " + question + "\n"
    for i in range(MAX_STEPS):
        s += "Thought:" + sgl.gen(f"thought{i}", max_tokens=32, stop="\n", temperature=0)
        s += "\nAction: "
        s += sgl.gen(f"action{i}", max_tokens=24, regex=ACTION, temperature=0)
        result, done = call_tool(s[f"action{i}"])
        if done:
            return result
        s += f"\nObservation: {result}\n"
    return None


def run(question=QUESTION):
    state = react.run(question)
    return state.ret_value, state.text().removeprefix(EXAMPLE)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    sgl.set_default_backend(sgl.RuntimeEndpoint(parser.parse_args().base_url))
    answer, steps = run()
    print(f"{steps}\n\nAnswer: {answer}")


if __name__ == "__main__":
    main()
