"""Other names for the settings of a load test: short ones, and SGLang's flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from sylvan.config.aliases import Alias, Pairs, is_on, plain_text


def bench_aliases() -> Mapping[str, Alias]:
    """All aliases by Python name."""
    return _ALL


def offline_aliases() -> Mapping[str, Alias]:
    """Aliases for an engine in this process: without address and adapter choice."""
    kept = {name: alias for name, alias in _ALL.items() if not alias.target.startswith("target.")}
    own = ("seed", "model", "tokenizer")  # top-level settings of the model
    return {name: alias for name, alias in kept.items() if name not in own}


def batch_aliases() -> Mapping[str, Alias]:
    """Flags of SGLang's `bench_one_batch`."""
    many = {
        "batch": "batch.sizes",
        "batch_size": "batch.sizes",
        "input_len": "batch.input_tokens",
        "output_len": "batch.output_tokens",
    }
    return {
        **{name: _many(path) for name, path in many.items()},
        "result_filename": _renamed("batch.file"),
        "output_file": _renamed("batch.file"),
        "run_name": _renamed("batch.tag"),
    }


_RENAMED = {
    "url": "target.url",
    "base_url": "target.url",
    "api": "target.api",
    "model": "target.model",
    "served_model_name": "target.model",
    "tokenizer": "target.tokenizer",
    "api_key": "target.api_key",
    "key": "target.api_key",
    "lora_zipf_alpha": "target.adapter_zipf",
    "ready_check_timeout_sec": "target.ready_s",
    "dataset_path": "data.path",
    "dataset_offset": "data.offset",
    "num_prompts": "data.requests",
    "requests": "data.requests",
    "seed": "data.seed",
    "random_input_len": "data.input_tokens",
    "input_tokens": "data.input_tokens",
    "random_output_len": "data.output_tokens",
    "output_tokens": "data.output_tokens",
    "sharegpt_output_len": "data.output_tokens",
    "gsp_output_len": "data.output_tokens",
    "random_range_ratio": "data.range_ratio",
    "gsp_range_ratio": "data.range_ratio",
    "sharegpt_context_len": "data.context_tokens",
    "gsp_num_groups": "data.groups",
    "gsp_prompts_per_group": "data.prompts_per_group",
    "gsp_system_prompt_len": "data.system_tokens",
    "gsp_question_len": "data.question_tokens",
    "gsp_num_turns": "data.turns",
    "turns": "data.turns",
    "image_count": "data.images",
    "image_resolution": "data.image_size",
    "image_format": "data.image_format",
    "image_content": "data.image_content",
    "prompt_suffix": "data.suffix",
    "rate": "load.rate",
    "burstiness": "load.burstiness",
    "concurrency": "load.concurrency",
    "max_concurrency": "load.concurrency",
    "sweep": "load.sweep",
    "mooncake_slowdown_factor": "load.slowdown",
    "warmup_requests": "load.warmup",
    "temperature": "answer.temperature",
    "top_p": "answer.top_p",
    "top_logprobs_num": "answer.top_logprobs",
    "extra_request_body": "answer.extra_body",
    "output": "result.file",
    "output_file": "result.file",
    "html": "result.html",
    "tag": "result.tag",
}
_SWITCHES: Mapping[str, tuple[str, object]] = {
    "use_trace_timestamps": ("load.timestamps", True),
    "flush_cache": ("load.flush_cache", True),
    "gsp_ordered": ("data.ordered", True),
    "disable_ignore_eos": ("answer.ignore_eos", False),
    "disable_stream": ("answer.stream", False),
    "return_logprob": ("answer.logprobs", True),
    "output_details": ("result.details", True),
}
_DATASETS = {
    "random": "random",
    "random_ids": "random",
    "shared_prefix": "shared-prefix",
    "generated_shared_prefix": "shared-prefix",
    "image": "image",
    "sharegpt": "sharegpt",
    "custom": "custom",
    "openai": "custom",
    "trace": "trace",
    "mooncake": "trace",
}
_APIS = {
    "sglang": "native",
    "sglang_native": "native",
    "sglang_oai": "completions",
    "sglang_oai_chat": "chat",
    "sglang_embedding": "embeddings",
    "vllm": "completions",
    "vllm_chat": "chat",
    "vllm_embedding": "embeddings",
    "lmdeploy": "completions",
    "lmdeploy_chat": "chat",
}
_CHOICES = {"uniform": "uniform", "distinct": "distinct", "skewed": "zipf"}


def _renamed(target: str) -> Alias:
    return Alias(target, lambda value: ((target, value),))


def _switch(target: str, value: object) -> Alias:
    return Alias(target, lambda on: ((target, value),) if is_on(on) else (), is_switch=True)


def _chosen(target: str, words: Mapping[str, str]) -> Alias:
    def convert(value: object) -> Pairs:
        word = plain_text(value).replace("-", "_")
        if word not in words:
            known = ", ".join(name.replace("_", "-") for name in words)
            raise ValueError(f"expected one of {known}, got {value!r}")
        return ((target, words[word]),)

    return Alias(target, convert)


def _words(value: object) -> list[str]:
    if isinstance(value, (list, tuple)):
        return [str(item) for item in cast("Sequence[object]", value)]
    return str(value).split()


def _many(target: str) -> Alias:
    """Several words, or one word with commas."""
    return Alias(
        target,
        lambda value: ((target, ",".join(_words(value)).split(",")),),
        takes_many=True,
    )


def _rate(value: object) -> Pairs:
    """SGLang writes `inf` for no limit."""
    yield "load.rate", None if plain_text(value) == "inf" else value


def _goodput(value: object) -> Pairs:
    """Words `ttft:500`."""
    words = _words(value)
    yield "result.goodput", ",".join(word.replace(":", "=") for word in words)


def _adapters(value: object) -> Pairs:
    words = _words(value)
    yield "target.adapters", words


def _headers(value: object) -> Pairs:
    words = _words(value)
    yield "target.headers", ",".join(words)


_ALL: Mapping[str, Alias] = {
    **{name: _renamed(path) for name, path in _RENAMED.items()},
    **{name: _switch(*args) for name, args in _SWITCHES.items()},
    "dataset": _chosen("data.dataset", _DATASETS),
    "dataset_name": _chosen("data.dataset", _DATASETS),
    "backend": _chosen("target.api", _APIS),
    "lora_request_distribution": _chosen("target.adapter_choice", _CHOICES),
    "request_rate": Alias("load.rate", _rate),
    "goodput": Alias("result.goodput", _goodput, takes_many=True),
    "lora_name": Alias("target.adapters", _adapters, takes_many=True),
    "header": Alias("target.headers", _headers, takes_many=True),
}
