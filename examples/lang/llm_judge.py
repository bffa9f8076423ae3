# ruff: noqa: PLW2901 - `state += ...` is how programs append
"""LLM judge: an essay judged in several dimensions in parallel, then graded."""

from __future__ import annotations

import argparse

import sylvan as sgl

ESSAY = "The sea is big. The sea is blue. I like the sea because it is big and blue."
DIMENSIONS = ("clarity", "originality", "evidence")
GRADES = ["A", "B", "C", "D"]


@sgl.function
def judge(s, essay):
    s += sgl.system("You judge essays.")
    s += sgl.user("Essay: " + essay)
    forks = s.fork(len(DIMENSIONS))  # the essay is computed once
    for fork, dimension in zip(forks, DIMENSIONS, strict=True):
        fork += sgl.user(f"Judge its {dimension} in one sentence.")
        fork += sgl.assistant(sgl.gen("judgment", max_tokens=48, stop="\n", temperature=0))
    forks.join()
    s += sgl.user("Summary of judgments: " + " ".join(s["judgment"]) + " Which grade?")
    s += sgl.assistant("Grade: " + sgl.select("grade", GRADES))


def run(essay=ESSAY):
    state = judge.run(essay)
    return state["judgment"], state["grade"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    sgl.set_default_backend(sgl.RuntimeEndpoint(parser.parse_args().base_url))
    judgments, grade = run()
    for dimension, judgment in zip(DIMENSIONS, judgments, strict=True):
        print(f"{dimension}: {judgment}")
    print(f"grade: {grade}")


if __name__ == "__main__":
    main()
