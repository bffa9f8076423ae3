"""Fuzz one target, led by the code that inputs reach: `python -m tests.fuzz.lead gguf`.

Needs atheris, which wheels of PyPI have for Linux on x86. Its corpus stays in `build/fuzz`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import atheris  # type: ignore[import-not-found]

with atheris.instrument_imports(include=["sylvan"]):
    from tests.fuzz.targets import MAX_S, TARGETS

ROOT = Path(__file__).parents[2]


def main() -> None:
    """See the head of this file; ends the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=list(TARGETS))
    parser.add_argument("--seconds", type=int, default=600)
    args = parser.parse_args()
    target = TARGETS[args.target]
    learnt, found = (
        ROOT / "build" / "fuzz" / target.name,
        Path(__file__).parent / "corpus" / target.name,
    )
    for folder in (learnt, found):
        folder.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(target.seeds()):
        (learnt / f"seed-{i}").write_bytes(seed)
    options = [f"-max_total_time={args.seconds}", f"-timeout={int(MAX_S)}", "-rss_limit_mb=4096"]
    options += [f"-artifact_prefix={found}/", str(learnt), str(found)]
    atheris.Setup([sys.argv[0], *options], target.try_)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
