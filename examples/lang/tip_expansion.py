# ruff: noqa: PLW2901 - `state += ...` is how programs append
"""Parallel tip expansion: short tips first, then each is expanded by a fork of its own."""

from __future__ import annotations

import argparse

import sylvan as sgl

TOPIC = "staying healthy"
TIPS = ("Eat well.", "Sleep enough.", "Move every day.")


@sgl.function
def expand(s, topic, tips):
    s += sgl.user(f"Give {len(tips)} tips for {topic}.")
    s += sgl.assistant("".join(f"{i + 1}. {tip}\n" for i, tip in enumerate(tips)))
    forks = s.fork(len(tips))
    for i, fork in enumerate(forks):
        fork += sgl.user(f"Explain tip {i + 1} in one sentence.")
        fork += sgl.assistant(sgl.gen("detail", max_tokens=48, temperature=0.7))
    forks.join()
    s += sgl.user("Put it together.")
    with s.assistant():
        for tip, detail in zip(tips, s["detail"], strict=True):
            s += f"{tip} {detail}\n"


def run(topic=TOPIC, tips=TIPS):
    return expand.run(topic, tips).messages()[-1]["content"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:30000")
    sgl.set_default_backend(sgl.RuntimeEndpoint(parser.parse_args().base_url))
    print(run())


if __name__ == "__main__":
    main()
