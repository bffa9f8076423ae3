"""A chat of several turns, whose answers are printed as they come."""

from __future__ import annotations

import argparse

import sylvan as sgl

QUESTIONS = ("My name is Ada.", "What is 12 + 30?", "What is my name?")


@sgl.function
def chat(s, questions):
    for i, question in enumerate(questions):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen(f"answer{i}", max_tokens=64, temperature=0))


def run(questions=QUESTIONS, show=lambda text: None):
    state = chat.run(questions=questions, stream=True)
    for i, _ in enumerate(questions):
        for piece in state.text_iter(f"answer{i}"):
            show(piece)
        show("\n")
    return [state[f"answer{i}"] for i in range(len(questions))]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    sgl.set_default_backend(sgl.RuntimeEndpoint(parser.parse_args().base_url))
    run(show=lambda text: print(text, end="", flush=True))


if __name__ == "__main__":
    main()
