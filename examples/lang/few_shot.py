"""Few-shot classification: a batch of programs that share their examples."""

from __future__ import annotations

import argparse

import sylvan as sgl

EXAMPLES = """Label each review with positive or negative.

Review: I loved every minute of it.
Label: positive

Review: The food was cold and the waiter rude.
Label: negative

Review: Great value, works as promised.
Label: positive

Review: It broke on the second day.
Label: negative

"""
REVIEWS = ("What a happy surprise!", "I want my money back.", "Good, fast and cheap.")


@sgl.function
def classify(s, review):
    s += EXAMPLES  # computed once for the whole batch
    s += "Review: " + review + "\nLabel: "
    s += sgl.select("label", ["positive", "negative"])


def run(reviews=REVIEWS):
    states = classify.run_batch([{"review": review} for review in reviews])
    return [state["label"] for state in states]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    sgl.set_default_backend(sgl.RuntimeEndpoint(parser.parse_args().base_url))
    for review, label in zip(REVIEWS, run(), strict=True):
        print(f"{label:>8}: {review}")


if __name__ == "__main__":
    main()
