"""Self-consistency: sample several chains of thought and take the most common result."""

from __future__ import annotations

import argparse
import re
from collections import Counter

import sylvan as sgl

QUESTION = "Tom has 12 apples and buys 7 more. Then he gives 5 away. How many are left?"


@sgl.function
def solve(s, question, samples):
    s += sgl.user(question)
    s += sgl.assistant_begin()
    forks = s.fork(samples)  # all share the question
    forks += sgl.gen("thoughts", max_tokens=96, temperature=0.7)
    forks.join()


def last_number(text):
    numbers = re.findall(r"-?\d+", text)
    return numbers[-1] if numbers else None


def run(question=QUESTION, samples=5):
    thoughts = solve.run(question, samples)["thoughts"]
    votes = Counter(number for text in thoughts if (number := last_number(text)))
    return votes.most_common()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    sgl.set_default_backend(sgl.RuntimeEndpoint(parser.parse_args().base_url))
    for number, votes in run():
        print(f"{number}: {votes} votes")


if __name__ == "__main__":
    main()
