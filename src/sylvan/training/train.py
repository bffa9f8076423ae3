"""Trains an EAGLE-3 head or a context tree for a model, and evaluates it (`sylvan train-draft`)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sylvan.config import Config
from sylvan.config.checkpoint import model_dir
from sylvan.config.fields import replaced
from sylvan.config.tree import SpeculativeConfig
from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.engine.text import load_tokenizer
from sylvan.runtime.models.config import ModelConfig, common_fields, make_config
from sylvan.runtime.models.draft_heads import model_tensor
from sylvan.runtime.models.registry import load_config
from sylvan.training.answers import TEXTS_PER_FILE, TrainingText, generate_answers, load, save
from sylvan.training.contexts import context_tree
from sylvan.training.evaluate import Evaluation, evaluate
from sylvan.training.head import TrainableHead
from sylvan.training.loop import Schedule, SharedWeights, Trainer
from sylvan.training.prompts import read_prompts

DEFAULT_DRAFT_VOCAB = 32_000
"""Default size of the draft vocabulary."""
HELD_OUT_SHARE, MAX_HELD_OUT = 0.05, 64
"""Share and maximum number of prompts held out for the evaluation."""
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")

Progress = Callable[[str], None]
"""Receives a line of progress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftTrainOptions:
    """Training options.

    Attributes:
        prompts: Maximum number of prompts.
        answer_tokens: Maximum tokens of an answer.
        draft_vocab: Maximum size of the draft vocabulary: the most frequent tokens of the answers.
        context_tokens: Maximum context of a tree, in tokens.
        min_count: Contexts of a tree that occur less often are left out.
        schedule: Training schedule of a head.
    """

    prompts: int = 10_000
    answer_tokens: int = 256
    draft_vocab: int = DEFAULT_DRAFT_VOCAB
    context_tokens: int = 16
    min_count: int = 1
    schedule: Schedule = field(default_factory=Schedule)


def train_draft(
    config: Config, data: Path, out: Path, options: DraftTrainOptions, progress: Progress
) -> Evaluation:
    """Train a head for a model, and write it to a directory; resumes an interrupted run.

    Intermediate files are in `out/training`, which may be removed afterwards.

    Args:
        config: Configuration of the model.
        data: File of prompts; see `read_prompts`.
        out: Directory of the head, created if needed.
        options: Training options.
        progress: Called with each line of progress.

    Raises:
        ConfigError: The model, the file or the directory is unusable.
    """
    path = model_dir(config.model)
    model = load_config(path, trusted=config.trust_remote_code)
    if model.head != "lm" or not model.causal or model.path != "native":
        raise ConfigError(f"{config.model}: a head can be trained for native models that generate")
    layers = read_layers(model.num_hidden_layers)
    files, held_out = generate_training_texts(
        config, data, out / "training", layers, options, progress
    )
    raw = head_config(model, layers)
    layer = make_config(common_fields(raw) | {"num_hidden_layers": 1})
    embedding, lm_head, norm = (
        model_tensor(f"{name}.weight", path, model).float()
        for name in ("embed_tokens", "lm_head", "norm")
    )
    token_ids = frequent_tokens(files, options.draft_vocab)
    if not len(token_ids):
        raise ConfigError(f"{config.model} answered none of the prompts in {data} by two tokens")
    shared = SharedWeights(embedding, lm_head * model.logit_scale, token_ids)
    head = _new_head(layer, len(layers), shared, files, options.schedule)
    head.init_from_model(norm + model.norm_offset, shared.head[token_ids])
    _train(head, shared, files, out / "training", options.schedule, progress)
    write_head(out, raw, head, token_ids, getattr(torch, model.dtype))
    progress(f"evaluating on {len(held_out)} prompts that it was not trained on")
    speculative = SpeculativeConfig(
        algorithm="eagle3",
        draft_model=str(out),
        num_steps=options.schedule.depth,
        adaptive=False,
    )
    with_head = replaced(config, {"speculative": speculative})
    return evaluate(with_head, held_out, options.answer_tokens)


def train_contexts(
    config: Config, data: Path, out: Path, options: DraftTrainOptions, progress: Progress
) -> Evaluation:
    """Build a tree of the model's usual continuations for `ngram`; arguments as `train_draft`."""
    path = model_dir(config.model)
    model = load_config(path, trusted=config.trust_remote_code)
    files, held_out = generate_training_texts(
        config, data, out / "training", None, options, progress
    )
    texts = [(text.tokens, text.prompt_len) for file in files for text in load(file)]
    if not texts:
        raise ConfigError(f"{config.model} answered none of the prompts in {data} by two tokens")
    tree = context_tree(texts, model.vocab_size, options.context_tokens, options.min_count)
    tree.save(out)
    progress(
        f"{len(tree.parents)} contexts; evaluating on {len(held_out)} prompts that it was not made "
        "from"
    )
    speculative = SpeculativeConfig(
        algorithm="ngram", draft_model=str(out), num_steps=options.schedule.depth, adaptive=False
    )
    with_tree = replaced(config, {"speculative": speculative})
    return evaluate(with_tree, held_out, options.answer_tokens)


def generate_training_texts(
    config: Config,
    data: Path,
    work: Path,
    layers: Sequence[int] | None,
    options: DraftTrainOptions,
    progress: Progress,
) -> tuple[list[Path], list[IntArray]]:
    """Let the model answer prompts; return files of texts, and prompts held out for evaluation.

    Raises:
        ConfigError: see `train_draft`.
    """
    prompts = read_prompts(data, load_tokenizer(config), options.prompts)
    held_out = min(MAX_HELD_OUT, max(1, int(HELD_OUT_SHARE * len(prompts))))
    if len(prompts) <= held_out:
        raise ConfigError(f"{data} has {len(prompts)} prompts; at least 2 are needed")
    _check_same_run(work, config, data, options)
    files = _generate_all(config, prompts[held_out:], layers, options, work, progress)
    return files, prompts[:held_out]


def read_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers that a head reads: an early, the middle and the last one."""
    return min(1, num_layers - 1), num_layers // 2, num_layers - 1


def head_config(model: ModelConfig, layers: Sequence[int]) -> dict[str, Any]:
    """Return config.json of a head for `model`: one layer with the model's sizes."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "target_hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.rms_norm_eps,
        "hidden_act": "silu",
        "torch_dtype": model.dtype,
        "tie_word_embeddings": False,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(layers),
        },
    } | {name: model.raw[name] for name in _ROPE if model.raw.get(name) is not None}


def frequent_tokens(files: Sequence[Path], limit: int) -> torch.Tensor:
    """Return the IDs of the most frequent tokens in answers, at most `limit`, ascending, int64."""
    counts: Counter[int] = Counter()
    for file in files:
        for text in load(file):
            counts.update(text.tokens[text.prompt_len :].tolist())
    return torch.tensor(sorted(token for token, _ in counts.most_common(limit)))


def write_head(
    out: Path,
    raw: dict[str, Any],
    head: TrainableHead,
    token_ids: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Write the checkpoint of a head in the published EAGLE-3 format."""
    count, vocab = len(token_ids), int(raw["vocab_size"])
    weights = {name: w.detach().cpu().to(dtype) for name, w in head.state_dict().items()}
    is_draftable = torch.zeros(vocab, dtype=torch.bool)
    is_draftable[token_ids] = True
    weights |= {"d2t": token_ids - torch.arange(count), "t2d": is_draftable}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(raw | {"draft_vocab_size": count}, indent=2) + "\n")


def _check_same_run(work: Path, config: Config, data: Path, options: DraftTrainOptions) -> None:
    """Record the arguments of this run, or check that an earlier run here had the same ones.

    Raises:
        ConfigError: The earlier run had others, or the directory is not writable.
    """
    run = {"model": config.model, "data": str(data.resolve()), "options": asdict(options)}
    record = work / "run.json"
    try:
        work.mkdir(parents=True, exist_ok=True)
        if not record.exists():
            record.write_text(json.dumps(run, indent=2) + "\n")
        before = json.loads(record.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{work} cannot be used: {error}") from None
    differing = [name for name in run if before.get(name) != run[name]]
    if differing:
        raise ConfigError(
            f"{work} holds a training run with different {differing[0]} "
            f"({before.get(differing[0])}); remove it, or choose another directory with --out"
        )


def _generate_all(
    config: Config,
    prompts: Sequence[IntArray],
    layers: Sequence[int] | None,
    options: DraftTrainOptions,
    work: Path,
    progress: Progress,
) -> list[Path]:
    """Return the files of all texts; generate those that are missing."""

    def name(first: int) -> Path:
        return work / f"texts-{first:07}.safetensors"

    done = 0
    while done < len(prompts) and name(done).exists():
        done += TEXTS_PER_FILE

    def on_texts(first: int, texts: Sequence[TrainingText]) -> None:
        save(name(done + first), texts)
        answered = min(done + first + TEXTS_PER_FILE, len(prompts))
        progress(f"{answered} of {len(prompts)} prompts answered")

    if done < len(prompts):
        generate_answers(config, prompts[done:], layers, options.answer_tokens, on_texts)
    return [name(first) for first in range(0, len(prompts), TEXTS_PER_FILE)]


def _new_head(
    layer: ModelConfig,
    num_layers: int,
    shared: SharedWeights,
    files: Sequence[Path],
    schedule: Schedule,
) -> TrainableHead:
    """Return an untrained head for texts of the lengths in these files."""
    torch.manual_seed(schedule.seed)
    longest = max(len(text.tokens) for file in files for text in load(file))
    num_features, length = num_layers * layer.hidden_size, longest + schedule.depth
    return TrainableHead(layer, num_features, len(shared.token_ids), length)


def _train(
    head: TrainableHead,
    shared: SharedWeights,
    files: Sequence[Path],
    work: Path,
    schedule: Schedule,
    progress: Progress,
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(head, shared, files, work, schedule, device)
    for report in trainer.run():
        if report.step % 50 == 0 or report.step == schedule.steps:
            accuracy = ", ".join(f"{100 * share:.0f} %" for share in report.accuracy)
            loss = f"loss {report.loss:.3f}, accuracy {accuracy}"
            progress(f"step {report.step} of {schedule.steps}: {loss}")
