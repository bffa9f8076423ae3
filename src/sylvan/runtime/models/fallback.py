"""Serves any other causal model of the installed transformers, with our paging and batching.

The model's own Python runs on the concatenated tokens of all requests, with their positions. Its
attention calls are replaced by ours (see `skeleton`). Recurrent layers read their states from our
pool, through the cache interface (see `recurrent`); such models compute prompts one request at a
time, and all decoding requests together. Anything else that depends on earlier tokens (distance
biases, private states) would be lost, so such models are rejected.

Shapes: T rows, D hidden, R rows of the head, B requests that run together, L tokens of each.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch
from torch import nn

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.core.step import EMBEDDINGS
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import (
    ModelConfig,
    StatePart,
    architecture_of,
    make_config,
    plain_fields,
)
from sylvan.runtime.models.fallback_media import RENAMED, media_text
from sylvan.runtime.models.formats import stored_format
from sylvan.runtime.models.recurrent import SlotCache, StateKey, groups
from sylvan.runtime.models.rope import RopeParams
from sylvan.runtime.models.skeleton import (
    NAME,
    NO_CACHE,
    AttentionStep,
    attach,
    cache_name,
    called,
    check_layers,
    first_position,
    probe,
    skeleton,
    skeleton_of,
)
from sylvan.runtime.models.text_parts import IMAGES, canonical
from sylvan.runtime.models.transformers_classes import find_classes
from sylvan.runtime.models.transformers_loading import (
    ExpectedTensors,
    NumbersOf,
    plain_numbers,
    read_model,
)
from sylvan.runtime.pool.states import TensorStates

_CHECKED_TOKENS = 9
_CUT_TOLERANCE = 1e-3
_CUT_TOLERANCE_BF16 = 0.05  # larger than rounding errors
_RESETTING = frozenset({"mamba", "falcon_mamba", "jamba", "zamba"})
"""Models whose recurrent layers reset their state at each chunk of more than one token."""


def parse(raw: dict[str, Any], code: Path | None = None) -> ModelConfig:
    """Check that transformers has the model, and probe its attention.

    Args:
        raw: config.json.
        code: Directory of the checkpoint, if its Python files may run.

    Raises:
        ConfigError: the model is unknown, needs code that may not run, or keeps state that is
          neither KV nor a supported recurrent state.
    """
    multimodal = None if code is not None else media_text(raw)
    if multimodal is not None:
        text = parse(multimodal.raw)
        if text.states:
            raise ConfigError("its images cannot be divided among recurrent layers")
        return msgspec.structs.replace(text, media=multimodal.media)
    if raw.get("model_type") in _RESETTING:
        raise ConfigError("it cannot continue from a recurrent state within a prompt")
    classes = find_classes(raw, code)
    model, step = skeleton(classes.model, classes.config, torch.bfloat16)
    found = probe(model, step)
    text, calls = classes.config.get_text_config(), found.calls
    positions = getattr(text, "max_position_embeddings", None) or 2048
    check_layers(text, found)
    widths = {"head_dim": max((max(c.head_dim, c.value_dim) for c in calls), default=2)}
    heads = {(call.num_heads, call.num_kv_heads) for call in calls} or {(1, 1)}
    num_heads, num_kv_heads = max(n for n, _ in heads), max(kv for _, kv in heads)
    if any(n != num_heads or num_kv_heads % kv or n % num_kv_heads for n, kv in heads):
        raise ConfigError("its layers have different numbers of heads")
    sizes = {
        "architecture": architecture_of(raw),
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": 1,
        "num_hidden_layers": max(len(calls), 1),
        "attention_layers": tuple(range(len(calls))),
        "layer_windows": tuple(call.window for call in calls),
        "states": tuple(found.states.values()),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": positions - first_position(model),
        "rope": RopeParams(),
        "path": "transformers",
        "code": str(code) if classes.from_checkpoint else None,
    }
    return make_config(plain_fields(raw) | sizes | widths)


class TransformersModel(nn.Module):
    """A causal model of the transformers library behind the interface of native models."""

    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    inner: Any

    def __init__(self, config: ModelConfig, build: Build) -> None:
        """A skeleton without weights; `load` fills it."""
        super().__init__()
        self._sizes, self._build = config, build
        self._state_indices: dict[StateKey, int] = {}
        self._first = 0
        # Modules of `inner` that receive expert ids per row, with the number of ids.
        self.chosen: Mapping[str, int] = {}
        self._classes = find_classes(config.raw, Path(config.code) if config.code else None)
        self.inner, self.step = skeleton(self._classes.model, self._classes.config, build.dtype)

    def load(self, model_dir: Path, *, pickled: bool = False) -> None:
        """Load the weights through transformers: safetensors unless `pickled`.

        Raises:
            ConfigError: they do not match the config (names the tensor), or are pickles without
              permission.
        """
        import transformers

        own, raw = self._classes.from_checkpoint, self._sizes.raw
        stored = stored_format(raw)
        reader: Any = self._classes.model if own else transformers.AutoModelForCausalLM
        given: dict[str, Any] = {"config": self._classes.config} if own else {}
        numbers: NumbersOf | None = None
        if self._sizes.media is not None:
            reader, given = self._classes.model, {"config": self._classes.config}
            given["key_mapping"] = dict(RENAMED)
        if stored is not None:
            numbers = partial(plain_numbers, stored=stored, dtype=self._build.dtype)
            reader, given = self._classes.model, given | {"config": _plain(self._classes.config)}
        read = partial(
            reader.from_pretrained,
            dtype=self._build.dtype,
            attn_implementation=NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=not pickled,
            weights_only=True,
            **given,
        )
        loaded = read_model(
            read,
            model_dir,
            pickled=pickled,
            expected=ExpectedTensors(
                headless=self._sizes.head == "none",
                quantised=bool(raw.get("quantization_config") or raw.get("compression_config")),
                ignored=IMAGES if self._sizes.media is not None else (),
            ),
            numbers=numbers,
        )
        self.inner = loaded.to(self._build.device).eval()
        found = probe(*skeleton_of(self.inner))
        self.step = attach(self.inner, [call.name for call in found.calls])
        self.step.width = self._sizes.head_dim
        self.step.groups = self._sizes.num_key_value_heads
        self._first = first_position(self.inner)
        self._state_indices = {key: index for index, key in enumerate(found.states)}
        self.chosen = found.chosen
        if self._sizes.media is not None:
            self.step.ends_in_windows = self._sizes.media.windows_only
            table = self.inner.get_input_embeddings()
            table.forward = _with_vectors(table.forward, self.step)
        if found.states:
            self._check_resumes(tuple(found.states.values()))

    def _check_resumes(self, states: tuple[StatePart, ...]) -> None:
        """Check that hidden vectors do not depend on where a prompt is cut into chunks.

        Raises:
            ConfigError: a layer resets its state at each chunk.
        """
        parts = [(p.shape, torch.float32 if p.exact else self._build.dtype) for p in states]
        pool = TensorStates(parts, 3, self._build.device)
        ids_L = torch.arange(_CHECKED_TOKENS, device=self._build.device) % self._sizes.vocab_size
        rows: list[torch.Tensor] = []
        with torch.inference_mode():
            for slot, cuts in ((1, (0, _CHECKED_TOKENS)), (2, (0, 4, _CHECKED_TOKENS))):
                last = ids_L
                for start, stop in itertools.pairwise(cuts):
                    cache = SlotCache(pool, self._state_indices, torch.tensor([slot]))
                    memory = {cache_name(self.inner): cache, "use_cache": True}
                    at = torch.arange(start, stop, device=ids_L.device)[None]
                    run = called(self.inner)
                    out = run(input_ids=ids_L[None, start:stop], position_ids=at, **memory)
                    cache.flush()
                    last = out.last_hidden_state[0, -1].float()
                rows.append(last)
        whole, cut = rows
        exact = self._build.dtype is torch.float32
        if (whole - cut).norm() > (_CUT_TOLERANCE if exact else _CUT_TOLERANCE_BF16) * whole.norm():
            name = type(self.inner).__name__
            raise ConfigError(f"{name} cannot continue from a recurrent state within a prompt")

    def source_name(self, name: str) -> str:
        """The checkpoint's name of a parameter, without common prefixes."""
        return canonical(name.removeprefix("inner."))

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the ids: the model computes its embeddings itself."""
        return batch.input_ids_T

    def forward(self, x_T: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Hidden vectors after the final norm. Shape: (T, D)."""
        self.step.hidden = None
        if self._sizes.media is not None:
            x_T = self._without_placeholders(x_T, batch)
        if batch.state_work is None or batch.states is None:
            return self._run(batch, x_T[None], None)[0]
        starts = batch.q_starts_R.tolist()
        out_TD = torch.empty(0)
        for group in groups(starts, batch.state_work.saves):
            rows, reqs = torch.tensor(group.rows), torch.tensor(group.reqs)
            slots_B = torch.from_numpy(batch.state_work.slots)[reqs].long()
            cache = SlotCache(batch.states, self._state_indices, slots_B)
            part = batch.part(rows, reqs)
            part.attention.plan(part)
            out_BLD = self._run(part, x_T[rows].unflatten(0, (len(reqs), -1)), cache)
            if not len(out_TD):
                out_TD = out_BLD.new_empty(len(x_T), out_BLD.shape[-1])
            out_TD[rows] = out_BLD.flatten(0, 1)
            cache.flush()
            for slot, kept in zip(slots_B.tolist(), group.save, strict=True):
                if kept:
                    batch.states.copy(slot, kept)
        return out_TD

    def _without_placeholders(self, ids_T: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Ids with the padding id in place of tokens whose embeddings are replaced."""
        ids_T, padding = ids_T.clone(), self.inner.config.pad_token_id or 0
        for rows, _ in batch.vectors(EMBEDDINGS, ids_T):
            ids_T[rows] = padding
        return ids_T

    def _run(self, batch: ForwardBatch, ids_BL: torch.Tensor, cache: Any) -> torch.Tensor:
        """Hidden vectors of the rows of `batch`, as (B, L, D)."""
        self.step.begin(batch)
        memory = {cache_name(self.inner): cache, "use_cache": True} if cache else NO_CACHE
        positions = batch.positions_T.long().view(ids_BL.shape) + self._first
        out = called(self.inner)(input_ids=ids_BL.long(), position_ids=positions, **memory)
        return out.last_hidden_state

    def head(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Logits with the model's own scales and caps. Shape: (R, V)."""
        self.step.hidden = hidden_RD[None]
        ids = torch.zeros(1, len(hidden_RD), dtype=torch.long, device=hidden_RD.device)
        return self.inner(input_ids=ids, use_cache=False).logits[0].float()


def _with_vectors(forward: Callable[..., Any], step: AttentionStep) -> Callable[..., Any]:
    """Wrap an embedding module's forward to replace embeddings by vectors of items."""

    def run(ids_BL: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        x_BLD = forward(ids_BL, *args, **kwargs)
        if step.batch is not None:
            for rows, vectors_ND in step.batch.vectors(EMBEDDINGS, x_BLD):
                x_BLD[0, rows] = vectors_ND
        return x_BLD

    return run


def _plain(config: Any) -> Any:
    """The config without the checkpoint's quantisation settings."""
    found = copy.deepcopy(config)
    for part in (found, found.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            if hasattr(part, name):
                delattr(part, name)
    return found


MODEL = TransformersModel
