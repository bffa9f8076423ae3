"""Writes the page of all error messages, `docs/reference/errors.md`, from the sources.

Each message belongs to an area, found by the file that raises it. An area has one cure for all its
messages; docs/troubleshooting.md has specific cures of common messages.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeGuard

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "sylvan"
ELLIPSIS = "…"
_BASE = "SylvanError"
_STATUS = {"RequestError": "400", "CapacityError": "503"}  # unless the call names another
_WORDS = re.compile(r"[A-Za-z]{2,}")
_CLASS = re.compile(r"^class (\w+)\((\w+)", re.MULTILINE)
Names = dict[str, list[ast.expr]]  # name -> expressions that may be its value


class Area(NamedTuple):
    """Messages that some files raise.

    Attributes:
        title: Heading of the section.
        cure: Advice that applies to all of them.
        files: Prefixes of paths under src/sylvan/; the longest matching one decides.
    """

    title: str
    cure: str
    files: tuple[str, ...]


class _Call(NamedTuple):
    """A call that may create an error, and the texts that names in it may stand for."""

    name: str
    text: ast.expr
    status: ast.expr | None
    names: Names


class _Module(NamedTuple):
    """The parts of a module's tree that the page needs."""

    file: str
    texts: Names  # texts assigned to names of the module
    returned: Names  # texts that functions return, by name with parentheses
    calls: list[_Call]


AREAS = (
    Area(
        "Command line and configuration",
        "The message names the setting or the word of the command line, and what it accepts. "
        "`sylvan config MODEL` prints every setting with its value and where the value came from; "
        "[settings](config.md) and [commands](cli.md) list what exists.",
        ("cli/", "config/", "runtime/engine/arguments.py", "utils/", "runtime/features/build.py"),
    ),
    Area(
        "Adapters on the command line",
        "See [merge a LoRA adapter](../howto/lora.md).",
        ("cli/lora.py", "runtime/models/lora_merge.py"),
    ),
    Area(
        "Recordings and replays",
        "The recording is incomplete, of another version or of another configuration; "
        "[record and replay](../howto/record-and-replay.md) says what a replay needs.",
        ("cli/replay.py", "runtime/features/flight_recorder/"),
    ),
    Area(
        "Model directories and files",
        "A file is missing, truncated, or belongs to another model. Fetch it again, and see "
        "[load a checkpoint](../howto/load-a-checkpoint.md). `sylvan check model MODEL` repeats "
        "the check without loading the model.",
        (
            *("checkpoints/", "runtime/models/safetensors.py", "runtime/models/shards.py"),
            *("runtime/models/checkpoint.py", "runtime/models/files.py"),
            *("runtime/models/pickled.py", "runtime/models/in_memory.py"),
            *(
                "runtime/models/transformers_loading.py",
                "runtime/models/transformers_classes.py",
                "text/checkpoint.py",
            ),
        ),
    ),
    Area(
        "GGUF files",
        "Serve the original checkpoint if the family or the kind of numbers is not supported. "
        "Otherwise the file is incomplete or damaged: fetch it again. "
        "[Quantise](../howto/quantise.md#checkpoints-of-other-tools) lists what can be read and "
        "written.",
        ("checkpoints/gguf/", "runtime/models/gguf_writer.py"),
    ),
    Area(
        "Architectures",
        "The model has a part that Sylvan's own code does not compute. If transformers knows the "
        "model, `pip install 'sylvan[transformers]'` lets it run, slower; otherwise it is "
        "[not served](models.md#not-served).",
        ("runtime/models/", "runtime/layers/", "runtime/executor/parts.py"),
    ),
    Area(
        "Quantised checkpoints and quantising",
        "The format, or a variant of it, has no kernel here, or its tensors do not match "
        "`quantization_config`. Use a checkpoint in a "
        "[supported format](../howto/quantise.md#checkpoints-of-other-tools), or quantise the "
        "unquantised one with `sylvan quantize`.",
        (
            *("runtime/models/formats/", "runtime/models/quantise.py", "runtime/models/mxfp4.py"),
            *("runtime/models/fp8_inputs.py", "runtime/models/writer.py", "cli/quantize.py"),
            *("cli/calibration.py", "runtime/executor/calibrate.py", "runtime/executor/smooth.py"),
        ),
    ),
    Area(
        "Tokenizers and chat templates",
        "The tokenizer or template does not suit the request, or cannot be read. `--tokenizer DIR` "
        "and `--chat-template FILE` replace those of the checkpoint.",
        ("text/", "checkpoints/vocab/"),
    ),
    Area(
        "Devices, kernels and memory",
        "The device, its memory or the compiled kernels do not suffice. `sylvan doctor` checks the "
        "machine, `sylvan check kernels` lists what computes each op, and "
        "[sizing](../sizing.md) explains memory.",
        (
            *("runtime/executor/", "runtime/platform/", "runtime/attention/", "kernels/"),
            *("runtime/pool/", "runtime/sampling/", "runtime/cache/", "runtime/sched/"),
        ),
    ),
    Area(
        "Ranks and machines",
        "All ranks must be reachable, use the same checkpoint and settings, and be started within "
        "the time limit: see [parallel](../howto/parallel.md). The log of the rank that is named "
        "has the cause.",
        (
            *("runtime/engine/ranks.py", "runtime/engine/nodes.py", "runtime/engine/node_agent.py"),
            *("runtime/engine/rank", "kernels/collective/", "runtime/executor/rank"),
            *("runtime/executor/division.py", "runtime/layers/mesh.py", "cli/node.py"),
            *("runtime/layers/placement.py", "runtime/models/stages.py", "cli/ray_nodes.py"),
        ),
    ),
    Area(
        "The engine",
        "The engine starts, stops, or has lost a process, or a command does not apply to this "
        "server. Try again; the log has the cause ([processes](../processes.md)).",
        ("runtime/engine/", "runtime/core/", "transport/", "runtime/tokenizer/", "protocol/"),
    ),
    Area(
        "Requests",
        "The field that the message names is missing, has the wrong type, exceeds a limit, or "
        "excludes another field. [HTTP](http.md) lists fields and types, "
        "[API clients](../howto/clients.md#what-is-not-here) those that are not supported.",
        (
            *("api/", "runtime/server/", "runtime/serving/", "runtime/tokenizer/checks.py"),
            *("runtime/tokenizer/embeds.py", "runtime/tokenizer/encoder_prompts.py"),
            *("runtime/features/early/", "runtime/features/embeddings/"),
        ),
    ),
    Area(
        "Sessions, files and batches",
        "The object does not exist, is in use, or its limit is reached; `limits.*` and "
        "`server.data_dir` set the limits ([settings](config.md)).",
        (
            *("runtime/serving/sessions.py", "runtime/server/batches/", "runtime/server/stores/"),
            "runtime/server/responses/",
        ),
    ),
    Area(
        "LoRA adapters",
        "The adapter's files are incomplete, or it was made for another model, or a limit of "
        "`lora.*` is reached: see [LoRA](../howto/serve-lora.md).",
        (
            *("runtime/features/lora/", "runtime/models/lora", "runtime/models/adapters.py"),
            *("runtime/tokenizer/adapters.py", "runtime/tokenizer/adapter", "api/adapters.py"),
            "runtime/server/native/adapters.py",
        ),
    ),
    Area(
        "Structured output",
        "Correct or simplify the schema, expression or grammar at the named place. "
        "[JSON Schema](grammar.md) lists what is supported.",
        ("runtime/features/grammar/", "text/patterns/", "text/tools/tagged.py"),
    ),
    Area(
        "Images, video and audio",
        "The item is damaged, too large, not reachable, or of a kind that the model rejects: "
        "see [limits](../howto/multimodal.md#limits). Prepared items must fit the processor.",
        (
            *("media/", "runtime/features/multimodal/", "runtime/tokenizer/media.py"),
            *("runtime/models/multimodal.py", "runtime/models/encoder_config.py"),
            *("runtime/models/fallback_media.py", "api/media.py", "cli/encoder.py"),
        ),
    ),
    Area(
        "Speculation",
        "The draft model, head or corpus does not exist or does not match the served model, or the "
        "algorithm does not support it: see [speculate](../howto/speculate.md).",
        (
            *("runtime/features/speculation/", "runtime/models/draft_heads.py"),
            *("runtime/models/medusa_heads.py", "runtime/models/next_heads.py"),
            *(
                "runtime/models/heads.py",
                "runtime/engine/corpus.py",
                "runtime/executor/predictor.py",
            ),
        ),
    ),
    Area(
        "Training draft heads",
        "The message names the file or option. See [speculate](../howto/speculate.md).",
        ("training/", "cli/train_draft.py"),
    ),
    Area(
        "KV tiers and stores",
        "The store cannot be reached, belongs to another model, or its URL or key is malformed: "
        "see [KV tiers](../howto/kv-tiers.md). `sylvan cache` lists and empties stores.",
        ("runtime/storage/", "runtime/features/tiers/", "api/tiers.py", "cli/cache.py"),
    ),
    Area(
        "KV events and metrics",
        "The address is malformed or taken, or the name cannot be used: see "
        "[observe](../howto/observe.md).",
        ("runtime/features/kv_events/", "runtime/server/observe/", "runtime/executor/profiling.py"),
    ),
    Area(
        "Prefill and decode on different servers",
        "The two servers do not match, or cannot reach each other; the message says which: "
        "see [prefill and decode](../howto/prefill-decode.md).",
        (
            *("runtime/features/disagg/", "runtime/features/pdmux/", "runtime/serving/pairing.py"),
            "cli/roles.py",
        ),
    ),
    Area(
        "Diffusion",
        "The request or setting assumes left-to-right generation: see "
        "[diffusion models](../howto/diffusion.md#what-is-not-here).",
        ("runtime/features/diffusion/",),
    ),
    Area(
        "Weights that change",
        "The tensors do not match the model, or the update was not begun, or its group failed: "
        "see [update weights](../howto/update-weights.md).",
        (
            *("runtime/models/live.py", "runtime/executor/sources.py", "api/weights.py"),
            *("runtime/executor/update_groups.py", "runtime/tokenizer/weight_updates.py"),
            *("runtime/engine/weights.py", "runtime/server/native/weights.py"),
        ),
    ),
    Area(
        "Gateway",
        "No worker can serve the request, a worker failed, or a credential is missing. "
        "`sylvan route status` lists workers, their models and their health; "
        "[gateway](../howto/gateway.md) explains limits and keys.",
        ("gateway/", "cli/route"),
    ),
    Area(
        "gRPC",
        "The message format has no field for it, or a field is invalid: see "
        "[gRPC](../howto/grpc.md#what-is-not-here).",
        ("runtime/server/grpc/", "gateway/grpc/", "rpc/"),
    ),
    Area(
        "Load tests",
        "The message names the setting, the file and the line. See [measure](../howto/measure.md).",
        ("bench/", "cli/bench", "cli/evaluate.py", "config/sweep.py"),
    ),
    Area(
        "Simulations",
        "The profile, recording or workload cannot be simulated: see "
        "[simulate](../howto/simulate.md#what-is-not-here).",
        ("sim/", "cli/simulate"),
    ),
    Area(
        "Frontend language",
        "The program or its backend is wrong; see "
        "[frontend language](../howto/frontend-language.md).",
        ("lang/",),
    ),
)


def page() -> str:
    """The page `docs/reference/errors.md`."""
    parts = [
        "# Error messages",
        "Generated by `make docs` from the sources; do not edit. `…` stands for a value. Find a "
        "message by searching for its constant words. [Troubleshooting](../troubleshooting.md) has "
        "a cure for each of the common ones; the first line of a section applies to all its "
        "messages. The number is the HTTP status of requests; the others end a command or a start "
        "with exit code 2, or are in the log.",
    ]
    by_area = defaultdict[str, dict[str, str]](dict)
    for file, status, message in raised():
        area = area_of(file)
        if area is None:
            raise ValueError(f"scripts/messages.py: no area for the errors of {file}")
        by_area[area.title].setdefault(message, status)
    for area in AREAS:
        found = by_area[area.title]
        parts += [f"## {area.title}", area.cure, "| message | status |\n|---|---|\n"]
        rows = (f"| {_code(message)} | {found[message]} |" for message in sorted(found, key=_key))
        parts[-1] += "\n".join(rows)
    return "\n\n".join(parts) + "\n"


def area_of(file: str) -> Area | None:
    """Return the area of a file, by the longest matching prefix; None: it has none."""
    fitting = [(len(start), a) for a in AREAS for start in a.files if file.startswith(start)]
    return max(fitting, key=lambda each: each[0])[1] if fitting else None


def raised() -> Iterator[tuple[str, str, str]]:
    """Yield file, HTTP status and text of each message, with `…` for interpolated values."""
    paths = (p for p in sorted(SRC.rglob("*.py")) if not p.name.endswith("_pb2.py"))
    sources = {str(path.relative_to(SRC)): path.read_text() for path in paths}
    statuses = _statuses(sources.values())
    errors = re.compile(rf"\b(?:{'|'.join(statuses)})\(")
    modules = [_read(file, source, errors) for file, source in sources.items()]
    returned = {name: texts for module in modules for name, texts in module.returned.items()}
    for module in modules:
        for call in module.calls:
            if call.name in statuses:
                names = returned | module.texts | call.names
                status = statuses[call.name]
                if isinstance(call.status, ast.Constant):
                    status = str(call.status.value)
                for text in _texts(call.text, names):
                    if len(_WORDS.findall(text)) > 1:
                        yield module.file, status, " ".join(text.split())


def _statuses(sources: Iterable[str]) -> Mapping[str, str]:
    """Return the package's error classes, with the HTTP status of each."""
    bases = dict[str, str]()
    for source in sources:
        bases = dict(_CLASS.findall(source)) | bases
    found = {_BASE: ""}
    for name in bases:
        way = [name]
        while way[-1] in bases and way[-1] != _BASE:
            way.append(bases[way[-1]])
        if way[-1] == _BASE:
            found[name] = next((_STATUS[each] for each in way if each in _STATUS), "")
    return found


def _read(file: str, source: str, errors: re.Pattern[str]) -> _Module:
    """Read a module; definitions without a call that matches `errors` are skipped."""
    tree, lines = ast.parse(source), source.splitlines()
    module = _Module(file, _assigned(tree.body), {}, [])
    for node in tree.body:
        if any(map(errors.search, lines[node.lineno - 1 : node.end_lineno])):
            module.calls.extend(_calls(node, None))
        if isinstance(node, ast.FunctionDef) and "str" in ast.unparse(node.returns or node.args):
            returns = [n.value for n in ast.walk(node) if _is_text_return(n)]
            module.returned[f"{node.name}()"] = returns
    return module


def _calls(node: ast.AST, names: Names | None) -> Iterator[_Call]:
    """Yield calls in functions; `names` of the outermost function hold those of all in it."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() if names is None:
            names = {}
        case ast.Assign(targets=[ast.Name(id=name), *_], value=value) if names is not None:
            names.setdefault(name, []).extend(_text(value))
        case ast.Call(func=ast.Name(id=name), args=[text, *_]) if names is not None:
            status = next((k.value for k in node.keywords if k.arg == "status"), None)
            yield _Call(name, text, status, names)
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, names)


def _is_text_return(node: ast.AST) -> TypeGuard[ast.Return]:
    return isinstance(node, ast.Return) and isinstance(node.value, _TEXT)


def _assigned(nodes: list[ast.stmt]) -> Names:
    """Names to which texts are assigned."""
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).extend(_text(node.value))
    return found


def _text(node: ast.expr) -> list[ast.expr]:
    return [node] if isinstance(node, _TEXT) else []


_TEXT = (ast.Constant, ast.JoinedStr, ast.BinOp, ast.IfExp)


def _texts(node: ast.expr, names: Names, depth: int = 3) -> list[str]:
    """Return the texts that an expression may evaluate to."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        parts = [str(p.value) if isinstance(p, ast.Constant) else ELLIPSIS for p in node.values]
        return ["".join(parts)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = _texts(node.left, names, depth), _texts(node.right, names, depth)
        return [a + b for a in sides[0] for b in sides[1]]
    values = _alternatives(node, names) if depth else []
    return [text for value in values for text in _texts(value, names, depth - 1)] or [ELLIPSIS]


def _alternatives(node: ast.expr, names: Names) -> list[ast.expr]:
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return names.get(f"{node.func.id}()", [])
    return names.get(node.id, []) if isinstance(node, ast.Name) else []


def _key(message: str) -> str:
    return message.lstrip(f"{ELLIPSIS}:'[]. ").lower()


def _code(message: str) -> str:
    message = re.sub(f"{ELLIPSIS}[{ELLIPSIS}]+", ELLIPSIS, message).replace("|", "\\|")
    ticks = "``" if "`" in message else "`"
    space = " " if message.startswith("`") or message.endswith("`") else ""
    return f"{ticks}{space}{message}{space}{ticks}"
