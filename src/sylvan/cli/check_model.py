"""`sylvan check model`: how a checkpoint would be served, and what prevents it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sylvan.checkpoints.formats import GGUF_INDEX, PICKLED, PT_WEIGHTS
from sylvan.checkpoints.gguf.view import read_index
from sylvan.cli.finding import Finding
from sylvan.cli.settings import fetch_models, load_settings, resolve_settings
from sylvan.config.checkpoint import model_dir, model_facts
from sylvan.config.facts import CheckpointInfo
from sylvan.config.fields import size_text
from sylvan.config.flags import Parsed
from sylvan.config.tree import Config
from sylvan.protocol.errors import ConfigError
from sylvan.text.tokenizer import Tokenizer

_TOKENIZERS = (
    "tokenizer.json",
    "tekken.json",
    "*.tiktoken",
    "tiktoken.model",
    "tokenizer.model",
    "rwkv_vocab*.txt",
)


def check_model(directory: str, args: Parsed) -> Iterable[Finding]:
    """Check a model: its files, the runner, its memory, tokenizer and template."""
    given = Parsed(positions=[directory], options=args.options, given=args.given)
    config = load_settings(given).config
    fetch_models(directory, config.tokenizer)
    path = model_dir(directory)
    yield Finding("ok", "directory", _place(path))
    facts = model_facts(directory, trusted=config.trust_remote_code)
    yield Finding("ok", "size", f"{facts.num_params:,} parameters in {facts.dtype}")
    yield _weights(path, facts, config)
    trusted = config.trust_remote_code
    yield _outcome("architecture", lambda: _architecture(path, trusted=trusted))
    yield from _own_code(path, trusted=trusted)
    yield from _quantisation(path)
    if facts.weights == "safetensors":
        yield from _tensors(path, trusted=trusted)
        yield from _kv_scales(path, trusted=trusted)
    yield _outcome("memory", lambda: _memory(path, config))
    yield from _text(path, config)
    yield _generation(path)
    yield _outcome("fits", lambda: _fits(given))
    if config.parallel.ranks > 1:
        yield _outcome("ranks", lambda: _ranks(given))
    if args.has("program"):
        yield from _program(given)


def _program(given: Parsed) -> Iterable[Finding]:
    """List the ops of a step; the floor is the time to read an op's weights from memory."""
    from sylvan.kernels.native.cost import describe_costs, read_rate  # both import torch
    from sylvan.kernels.native.library import load
    from sylvan.runtime.engine.build import program_of

    runner, costs = program_of(load_settings(given).config)
    if not costs:
        cost = "no step program: the log says why (sylvan serve sets OMP_WAIT_POLICY=PASSIVE)"
        yield Finding("slow", "program", runner, cost)
        return
    rate = read_rate(load())
    total = sum(cost.weight_bytes for cost in costs)
    detail = f"{runner}: {len(costs)} ops, weights {size_text(total)}, read in no less than "
    yield Finding(
        "ok", "program", f"{detail}{total / rate * 1e3:.2f} ms at {size_text(int(rate))}/s"
    )
    for number, line in enumerate(describe_costs(costs, rate)):
        yield Finding("ok", f"op {number}", line)


def _fits(given: Parsed) -> str:
    return resolve_settings(load_settings(given)).resolved.plan.describe()


def _ranks(given: Parsed) -> str:
    from sylvan.runtime.engine.ranks import describe_ranks  # needs torch

    return describe_ranks(resolve_settings(load_settings(given)).resolved.config)


def _place(path: Path) -> str:
    if (path / GGUF_INDEX).is_file():
        return f"{read_index(path)['file']} (its config and tokenizer are in {path})"
    return str(path)


def _weights(path: Path, facts: CheckpointInfo, config: Config) -> Finding:
    if facts.weights == "gguf":
        kinds: dict[str, int] = {}
        for tensor in read_index(path)["tensors"]:
            kinds[tensor["type"]] = kinds.get(tensor["type"], 0) + tensor["stop"] - tensor["start"]
        shares = ", ".join(f"{name} {size_text(kinds[name])}" for name in sorted(kinds))
        return Finding("ok", "weights", f"GGUF: {shares}; {_kept(kinds, facts.dtype)}")
    pattern = PT_WEIGHTS if facts.weights == "pt" else "*.safetensors"
    files = list(path.glob(pattern))
    size = size_text(sum(file.stat().st_size for file in files))
    if facts.weights == "pt":
        allowed = config.load_format == "pt"
        detail = f"{len(files)} PyTorch .bin files, {size}"
        return Finding("ok" if allowed else "missing", "weights", detail, f"the model {PICKLED}")
    return Finding(
        "ok" if files else "missing",
        "weights",
        f"{len(files)} safetensors files, {size}",
        "there are no weights (*.safetensors, *.gguf); --load-format dummy uses random ones",
    )


def _kept(kinds: Iterable[str], dtype: str) -> str:
    """Return which tensor types of a GGUF file stay unchanged on a CPU."""
    from sylvan.runtime.models.formats.gguf import KEPT  # needs torch

    kept = sorted(KEPT.keys() & set(kinds))
    rest = f"computed with in {dtype}"
    return f"matrices of {', '.join(kept)} stay so on a CPU, others are {rest}" if kept else rest


def _architecture(path: Path, *, trusted: bool) -> str:
    from sylvan.runtime.models.config import read_config  # needs torch, like the next
    from sylvan.runtime.models.registry import choose_path

    choice = choose_path(read_config(path), path if trusted else None)
    words = f"{choice.config.architecture}, path {choice.config.path}"
    return words if choice.config.path == "native" else f"{words}: {choice.why}"


def _tensors(path: Path, *, trusted: bool) -> Iterable[Finding]:
    from sylvan.runtime.executor.facts import check_tensors  # needs torch
    from sylvan.runtime.models.registry import load_config

    try:
        config = load_config(path, trusted=trusted)
    except ConfigError:
        return  # already reported
    if config.path == "native":
        yield _outcome(
            "tensors", lambda: f"{check_tensors(config, path)} compared by name and shape"
        )


def _kv_scales(path: Path, *, trusted: bool) -> Iterable[Finding]:
    """Say whether the checkpoint has scales for keys and values of 8-bit floats."""
    from sylvan.runtime.models.kv_scales import scaled_layers  # needs torch, like the next
    from sylvan.runtime.models.registry import load_config

    try:
        config = load_config(path, trusted=trusted)
    except ConfigError:
        return  # already reported
    try:
        found = scaled_layers(path, config)
    except ConfigError as error:
        yield Finding("slow", "KV scales", "unusable", str(error))
        return
    if found:
        yield Finding("ok", "KV scales", f"of {found} layers; cache.dtype=fp8_e4m3 uses them")


def _quantisation(path: Path) -> Iterable[Finding]:
    """Return how matrices are stored, and the dtype of their inputs."""
    from sylvan.runtime.models.config import read_config  # needs torch, like the next
    from sylvan.runtime.models.formats import kept_format, stored_format

    raw = read_config(path)

    def described() -> str:
        stored, kept = stored_format(raw), kept_format(raw)
        if stored is None or kept is None:
            return "MXFP4; kept in 4 bits on a CPU, elsewhere read as bfloat16"
        rows = "rounded to int8" if kept.name in ("w8a8", "w4a8") else "kept in the model's type"
        return f"{stored.name}; kept in {max(4, kept.bits or 0)} bits, rows are {rows}"

    if raw.get("quantization_config") or raw.get("compression_config"):
        yield _outcome("quantisation", described)


def _own_code(path: Path, *, trusted: bool) -> Iterable[Finding]:
    from sylvan.runtime.models.config import read_config

    if read_config(path).get("auto_map"):
        run = "run only if nothing else can serve it" if trusted else "not run"
        yield Finding("ok", "code", f"the checkpoint contains Python files, which are {run}")


def _memory(path: Path, config: Config) -> str:
    from sylvan.runtime.executor.facts import read_facts  # needs torch

    trusted = config.trust_remote_code
    facts = read_facts(path, config.dtype, config.quantization, trusted=trusted)
    stored = "stored" if model_facts(str(path), trusted=trusted).quantization else facts.dtype
    words = f"weights {size_text(facts.weight_bytes)} as {config.quantization or stored}"
    words += f", KV cache {size_text(facts.kv_bytes_per_token)} a token in {facts.dtype}"
    if facts.state_bytes:
        words += f", recurrent state {size_text(facts.state_bytes)} a request"
    return words


def _text(path: Path, config: Config) -> Iterable[Finding]:
    """Check the tokenizer, its match with the model, templates and parsers."""
    from sylvan.runtime.engine.text import (
        check_vocabulary,
        read_chat_template,
        read_tokenizer,
        tokenizer_dir,
    )

    template, problem = None, ""
    try:
        template = read_chat_template(config)
    except ConfigError as error:
        problem = str(error)
    try:
        folder = tokenizer_dir(config)
        tokenizer = read_tokenizer(config, template)
    except ConfigError as error:
        yield Finding("missing", "tokenizer", "no", str(error))
        return
    yield Finding("ok", "tokenizer", _source(folder))
    yield _outcome("vocabulary", lambda: check_vocabulary(tokenizer, path))
    if problem:
        yield Finding("missing", "chat template", "no", problem)
        return
    yield _template(tokenizer, config)
    yield from _parsers(tokenizer, config)


def _source(folder: Path) -> str:
    if (folder / GGUF_INDEX).is_file():
        return "from the GGUF file"
    found = (file.name for pattern in _TOKENIZERS for file in sorted(folder.glob(pattern)))
    return next(found, "made by transformers from other files")


def _template(tokenizer: Tokenizer, config: Config) -> Finding:
    from sylvan.text.chat_template import ChatTemplate

    if config.text.chat_template:  # it was compiled when it was read
        return Finding("ok", "chat template", config.text.chat_template)
    if not tokenizer.chat_templates:
        cost = "chat requests are refused, completions are not; --chat-template FILE gives one"
        return Finding("slow", "chat template", "none", cost)
    names = ", ".join(sorted(tokenizer.chat_templates))
    return _outcome("chat template", lambda: names if ChatTemplate(tokenizer) else "")


def _parsers(tokenizer: Tokenizer, config: Config) -> Iterable[Finding]:
    from sylvan.text import reasoning, tools

    source = tokenizer.chat_template or ""
    names = config.text.tool_parser, config.text.reasoning_parser
    call = names[0] and tools.family(
        names[0], chat_template=source, architecture=tokenizer.files.architecture
    )
    thought = names[1] and reasoning.family(names[1], chat_template=source)
    for what, name, found in (("tool calls", names[0], call), ("reasoning", names[1], thought)):
        yield Finding("ok", what, _parser(name, found))


def _parser(name: str | None, found: Any) -> str:
    if not found:
        return "none: the template contains no markers" if name == "auto" else "none, as chosen"
    return f"{found.name}, by the template" if name == "auto" else f"{found.name}, as chosen"


def _generation(path: Path) -> Finding:
    name = "generation_config.json"
    if (path / name).is_file():
        return Finding("ok", name, "")
    return Finding("slow", name, "not there", "OpenAI's sampling defaults are used")


def _outcome(what: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding("ok", what, look())
    except ConfigError as error:
        return Finding("missing", what, "no", str(error))
