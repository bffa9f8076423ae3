"""Writes the built-in model in every format that Sylvan supports, for other programs to read.

    python -m benchmarks.quality.write_formats FOLDER
    OTHER/bin/python benchmarks/quality/read_formats.py FOLDER --with vllm

Also writes `expected.json`: held-out conversations, and for each format the most likely next token
at every token of the assistant, by Sylvan in float32 or with `--dtype`. `--formats` adds formats to
an existing folder.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.quality.fidelity import SAPLING, Predictor, held_out
from sylvan.checkpoints.gguf.recipes import PREFIX, RECIPES
from sylvan.cli.main import main as sylvan
from sylvan.config.checkpoint import model_dir
from sylvan.protocol.arrays import IntArray

FORMATS = (
    *("w8a8", "w4a8", "w4a16", "fp8", "fp8-block", "mxfp8", "mxfp4", "nvfp4"),
    *(PREFIX + kind for kind in RECIPES),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS, metavar="NAME")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    texts, said = held_out(1), args.folder / "expected.json"
    expected = json.loads(said.read_text())["expected"] if said.exists() else {}
    for name in args.formats:
        file = name.startswith(PREFIX)
        path = args.folder / (f"{name.removeprefix(PREFIX)}.gguf" if file else name)
        how = ["--format", name] if file else ["--quantization", name]
        if sylvan(["quantize", str(SAPLING), str(path), *how]):
            raise SystemExit(f"{name} could not be made")
        predictor = Predictor(args.dtype, model=model_dir(str(path)))
        expected[path.name] = [_best(predictor, text.ids, text.rows) for text in texts]
    inputs = [{"ids": text.ids, "rows": text.rows.tolist()} for text in texts]
    said.write_text(json.dumps({"texts": inputs, "expected": expected}))


def _best(predictor: Predictor, ids: list[int], rows: IntArray) -> list[int]:
    return [int(best) for part in predictor.log_probs(ids, rows) for best in part.argmax(-1)]


if __name__ == "__main__":
    main()
