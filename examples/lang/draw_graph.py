"""The graph of a program, drawn without running it."""

from __future__ import annotations

import argparse
from pathlib import Path

import sylvan as sgl


@sgl.function
def program(s, question, branches=2):
    s += sgl.system("You answer briefly.")
    s += sgl.user(question)
    forks = s.fork(branches)
    forks += sgl.assistant(sgl.gen("draft", max_tokens=32))
    forks.join()
    s += sgl.user("Drafts: " + s["draft"] + " Which is best?")
    s += sgl.assistant(sgl.select("best", ["1", "2"]))


def run():
    return program.trace(branches=2)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dot", action="store_true", help="DOT instead of SVG")
    parser.add_argument("--output", default="program.svg")
    args = parser.parse_args()
    trace = run()
    Path(args.output).write_text(trace.to_dot() if args.dot else trace.to_svg())
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
