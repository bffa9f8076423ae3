"""Retrieval: answer questions from a folder of text files."""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from pathlib import Path

import sylvan as sgl

QUESTIONS = ("When does the museum open?", "How much is a ticket?")
NOTES = {
    "hours.txt": "The museum opens at 9 and closes at 18. It is closed on Monday.",
    "prices.txt": "A ticket is 12 euros. Children under 6 enter for free.",
    "food.txt": "The cafe in the garden serves soup and cake.",
}


def words(text):
    return re.findall(r"\w+", text.lower())


class Index:
    """Passages by the weight of the words that they share with a question (TF-IDF)."""

    def __init__(self, passages):
        self.passages = passages
        counts = [Counter(words(passage)) for passage in passages]
        spread = Counter(word for count in counts for word in count)
        self.weights = {w: math.log(1 + len(passages) / n) for w, n in spread.items()}
        self.counts = counts

    def best(self, question, k):
        asked = set(words(question))
        scores = [
            sum(self.weights[w] * count[w] for w in asked & set(count)) for count in self.counts
        ]
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        return [self.passages[i] for i in order[:k]]


def read_folder(folder):
    return [path.read_text() for path in sorted(Path(folder).glob("*.txt"))]


@sgl.function
def answer(s, passages, question):
    # Passages come first and in a fixed order, so that questions about the same share them.
    s += sgl.system("Answer from these notes.\n" + "\n".join(sorted(passages)))
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=48, temperature=0))


def run(passages=None, questions=QUESTIONS, k=2):
    index = Index(passages or tuple(NOTES.values()))
    batch = [{"passages": index.best(q, k), "question": q} for q in questions]
    return [state["answer"] for state in answer.run_batch(batch)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    parser.add_argument("--folder", help="text files to answer from, instead of three short notes")
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    args = parser.parse_args()
    sgl.set_default_backend(sgl.RuntimeEndpoint(args.base_url))
    passages = read_folder(args.folder) if args.folder else None
    for question, found in zip(args.questions, run(passages, args.questions), strict=True):
        print(f"{question}\n  {found}")


if __name__ == "__main__":
    main()
