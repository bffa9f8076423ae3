"""`sylvan eval`: perplexity of a model on a text, and divergence from another model."""

from __future__ import annotations

from pathlib import Path

from sylvan.cli.calibration import read_text, windows
from sylvan.cli.main import DONE, Spec
from sylvan.cli.progress import loading
from sylvan.config.checkpoint import model_dir, model_facts
from sylvan.config.flags import Option, Parsed
from sylvan.protocol.errors import ConfigError

_WINDOW, _TOKENS = 512, 4096
_LEAST, _MOST = 16, 8192

SPEC = Spec(
    usage="eval MODEL --file TEXT [--against BASE] [--quantization w4a8]",
    doc="Measure the perplexity of the model directory MODEL on a text, in independent windows of "
    "--window tokens. With --against, also measure the divergence (KL, nats) of its predictions "
    "from those of BASE, which must have the same vocabulary, and how often their most likely "
    "tokens agree: if BASE is the unquantised model, this is the loss of a weight format.",
    options=(
        Option("file", "The text, UTF-8.", metavar="PATH"),
        Option("against", "Another model directory.", metavar="DIR"),
        Option(
            "quantization", "Format to which MODEL is quantised while loading.", metavar="FORMAT"
        ),
        Option("dtype", "bfloat16 or float32; default MODEL's.", metavar="TYPE"),
        Option(
            "window", f"Tokens per window, {_LEAST} to {_MOST}; default {_WINDOW}.", metavar="N"
        ),
        Option("tokens", f"Number of tokens of the text to use; default {_TOKENS}.", metavar="N"),
    ),
    tree=None,
)


def run(args: Parsed) -> int:
    if len(args.positions) != 1 or "file" not in args.options:
        raise ConfigError(f"usage: sylvan {SPEC.usage}")
    window = _number(args, "window", _WINDOW, _LEAST, _MOST)
    tokens = _number(args, "tokens", _TOKENS, _LEAST, 1 << 24)
    paths = [model_dir(args.positions[0])]
    if "against" in args.options:
        paths.insert(0, model_dir(args.options["against"]))
    dtype = _dtype(args, paths[-1])
    text = read_text("file", args.options["file"])
    texts = windows("file", text, paths[-1], window, tokens)
    import torch  # slow import, like the next

    from sylvan.runtime.executor.predictor import Predictor, losses

    cores, wanted = torch.get_num_threads(), args.options.get("quantization")
    with loading(f"evaluating {args.positions[0]}"):
        predictors = [Predictor(path, dtype, window, threads=cores) for path in paths[:-1]]
        predictors.append(Predictor(paths[-1], dtype, window, wanted, threads=cores))
        found = losses(predictors, texts)
    count = sum(len(text) - 1 for text in texts)
    print(f"{args.positions[0]}: perplexity {found[-1].perplexity:.4f} over {count:,} tokens")
    if len(paths) > 1:
        print(
            f"{args.options['against']}: perplexity {found[0].perplexity:.4f}\n"
            f"KL divergence {found[-1].kl:.5f} nats, same best token {found[-1].same_top:.2%}"
        )
    return DONE


def _number(args: Parsed, name: str, default: int, least: int, most: int) -> int:
    given = args.options.get(name, str(default))
    if not given.isdecimal() or not least <= int(given) <= most:
        raise ConfigError(f"--{name}: expected a number from {least} to {most}, not {given!r}")
    return int(given)


def _dtype(args: Parsed, path: Path) -> str:
    given = args.options.get("dtype")
    if given is None:
        return "float32" if model_facts(str(path)).dtype == "float32" else "bfloat16"
    if given not in ("bfloat16", "float32"):
        raise ConfigError(f"--dtype: expected bfloat16 | float32, not {given!r}")
    return given
