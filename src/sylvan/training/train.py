"""From a model and prompts to a trained EAGLE-3 head, and how well it guesses."""

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
from sylvan.training.answers import PART, Text, answer, load, save
from sylvan.training.contexts import context_tree
from sylvan.training.evaluate import Evaluation, evaluate
from sylvan.training.head import TrainableHead
from sylvan.training.loop import Schedule, SharedWeights, Trainer
from sylvan.training.prompts import read_prompts

MAX_GUESSED = 32_000
"""Tokens that a head can guess unless more are asked for."""
HELD_OUT_SHARE, MAX_HELD_OUT = 0.05, 64
"""Prompts that are kept for the evaluation."""
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")

Progress = Callable[[str], None]
"""Receives a line of progress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftTrainOptions:
    """Training options.

    Attributes:
        prompts: At most so many of the file's.
        answer_tokens: Of an answer at most.
        guessed: Tokens that the head can guess at most: the most frequent ones in the answers.
        context_tokens: Of the longest context of a tree.
        least: Times that a context of a tree came.
        schedule: How a head is trained.
    """

    prompts: int = 10_000
    answer_tokens: int = 256
    guessed: int = MAX_GUESSED
    context_tokens: int = 16
    least: int = 1
    schedule: Schedule = field(default_factory=Schedule)


def train_draft(
    config: Config, data: Path, out: Path, options: DraftTrainOptions, progress: Progress
) -> Evaluation:
    """Train a head for a model and write it to a directory; continues an interrupted run.

    What is needed for that is in `out/training`, which may be removed afterwards.

    Args:
        config: Of the model.
        data: File of prompts, see `read_prompts`.
        out: Directory of the head, made if need be.
        options: Training options.
        progress: Called with progress.

    Raises:
        ConfigError: the model, the file or the directory cannot be used for that.
    """
    path = model_dir(config.model)
    model = load_config(path, trusted=config.trust_remote_code)
    if model.head != "lm" or not model.causal or model.path != "native":
        raise ConfigError(f"{config.model}: a head can be trained for native models that generate")
    layers = read_layers(model.num_hidden_layers)
    files, held_out = answered(config, data, out / "training", layers, options, progress)
    raw = head_config(model, layers)
    layer = make_config(common_fields(raw) | {"num_hidden_layers": 1})
    embedding, lm_head, norm = (
        model_tensor(f"{name}.weight", path, model).float()
        for name in ("embed_tokens", "lm_head", "norm")
    )
    token_ids = frequent_tokens(files, options.guessed)
    if not len(token_ids):
        raise ConfigError(f"{config.model} answered none of the prompts in {data} by two tokens")
    shared = SharedWeights(embedding, lm_head * model.logit_scale, token_ids)
    head = _new_head(layer, len(layers), shared, files, options.schedule)
    head.begin_as(norm + model.norm_offset, shared.head[token_ids])
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
    """Make a tree of what a model mostly says, by which `ngram` guesses; as `train_draft`."""
    path = model_dir(config.model)
    model = load_config(path, trusted=config.trust_remote_code)
    files, held_out = answered(config, data, out / "training", None, options, progress)
    texts = [(text.tokens, text.prompt_len) for file in files for text in load(file)]
    if not texts:
        raise ConfigError(f"{config.model} answered none of the prompts in {data} by two tokens")
    tree = context_tree(texts, model.vocab_size, options.context_tokens, options.least)
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


def answered(
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
        raise ConfigError(f"{data} has {len(prompts)} prompts; 2 are needed at least")
    _begin(work, config, data, options)
    files = _answer_all(config, prompts[held_out:], layers, options, work, progress)
    return files, prompts[:held_out]


def read_layers(num_layers: int) -> tuple[int, ...]:
    """An early, the middle and the last layer of a model of so many: the head names them."""
    return min(1, num_layers - 1), num_layers // 2, num_layers - 1


def head_config(model: ModelConfig, layers: Sequence[int]) -> dict[str, Any]:
    """config.json of a head for `model`: a layer of its sizes."""
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


def frequent_tokens(files: Sequence[Path], most: int) -> torch.Tensor:
    """The ids of the tokens that answers have most, ascending, int64."""
    counts: Counter[int] = Counter()
    for file in files:
        for text in load(file):
            counts.update(text.tokens[text.prompt_len :].tolist())
    return torch.tensor(sorted(token for token, _ in counts.most_common(most)))


def write_head(
    out: Path,
    raw: dict[str, Any],
    head: TrainableHead,
    token_ids: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Write the checkpoint of a head as EAGLE-3 heads are published."""
    count, vocab = len(token_ids), int(raw["vocab_size"])
    weights = {name: w.detach().cpu().to(dtype) for name, w in head.state_dict().items()}
    guessed = torch.zeros(vocab, dtype=torch.bool)
    guessed[token_ids] = True
    weights |= {"d2t": token_ids - torch.arange(count), "t2d": guessed}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(raw | {"draft_vocab_size": count}, indent=2) + "\n")


def _begin(work: Path, config: Config, data: Path, options: DraftTrainOptions) -> None:
    """Write down what is trained, or check that a previous run here trained the same.

    Raises:
        ConfigError: the previous run differs, or the directory cannot be written.
    """
    asked = {"model": config.model, "data": str(data.resolve()), "wish": asdict(options)}
    note = work / "asked.json"
    try:
        work.mkdir(parents=True, exist_ok=True)
        if not note.exists():
            note.write_text(json.dumps(asked, indent=2) + "\n")
        before = json.loads(note.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{work} cannot be used: {error}") from None
    differing = [name for name in asked if before.get(name) != asked[name]]
    if differing:
        raise ConfigError(
            f"{work} holds a training with another {differing[0]} ({before.get(differing[0])}); "
            "remove it, or write to another directory"
        )


def _answer_all(
    config: Config,
    prompts: Sequence[IntArray],
    layers: Sequence[int] | None,
    options: DraftTrainOptions,
    work: Path,
    progress: Progress,
) -> list[Path]:
    """Files of all texts; those that are there already are not made again."""

    def name(first: int) -> Path:
        return work / f"texts-{first:07}.safetensors"

    done = 0
    while done < len(prompts) and name(done).exists():
        done += PART

    def keep(first: int, texts: Sequence[Text]) -> None:
        save(name(done + first), texts)
        progress(f"{min(done + first + PART, len(prompts))} of {len(prompts)} prompts answered")

    if done < len(prompts):
        answer(config, prompts[done:], layers, options.answer_tokens, keep)
    return [name(first) for first in range(0, len(prompts), PART)]


def _new_head(
    layer: ModelConfig,
    num_layers: int,
    shared: SharedWeights,
    files: Sequence[Path],
    schedule: Schedule,
) -> TrainableHead:
    """A head for texts as long as these."""
    torch.manual_seed(schedule.seed)
    longest = max(len(text.tokens) for file in files for text in load(file))
    columns, length = num_layers * layer.hidden_size, longest + schedule.depth
    return TrainableHead(layer, columns, len(shared.token_ids), length)


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
    for learnt in trainer.run():
        if learnt.step % 50 == 0 or learnt.step == schedule.steps:
            right = ", ".join(f"{100 * share:.0f} %" for share in learnt.right)
            loss = f"loss {learnt.loss:.3f}, right {right}"
            progress(f"step {learnt.step} of {schedule.steps}: {loss}")
