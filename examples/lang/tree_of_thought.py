# ruff: noqa: PLW2901 - `state += ...` is how programs append
"""Tree of thought: propose plans, carry out each in several ways, keep the best answer."""

from __future__ import annotations

import argparse

import sylvan as sgl

QUESTION = "Anna has 24 pens. She gives 9 to Ben and buys 6 more. How many pens has she now?"
YES_NO = ["yes", "no"]


@sgl.function
def tree_of_thought(s, question, branches):
    s += sgl.user("Question: " + question + " Propose a plan in one sentence.")
    plans = s.fork(branches)
    plans += sgl.assistant(sgl.gen("plan", max_tokens=48, temperature=0.8))
    leaves = []
    for plan in plans:
        plan += sgl.user("Follow the plan and solve it.")
        solutions = plan.fork(branches)
        solutions += sgl.assistant(sgl.gen("solution", max_tokens=64, temperature=0.8))
        solutions += sgl.user("Is that right?")
        solutions += sgl.assistant(sgl.select("right", YES_NO))
        leaves.extend(solutions)
    scored = [(confidence(leaf), leaf["solution"]) for leaf in leaves]
    return max(scored)


def confidence(leaf):
    """How much likelier `yes` is than `no`."""
    yes, no = leaf.get_meta_info("right")["normalized_prompt_logprobs"]
    return yes - no


def run(question=QUESTION, branches=2):
    return tree_of_thought.run(question, branches).ret_value


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    sgl.set_default_backend(sgl.RuntimeEndpoint(parser.parse_args().base_url))
    score, solution = run()
    print(f"{solution}\n(score {score:.3f})")


if __name__ == "__main__":
    main()
