"""Claims: images are answered faster than by transformers, and hardly delay texts.

Faster both for a single image and in images per second, up to the machine's matrix-multiply
throughput (docs/howto/multimodal.md); 15 of 16 questions about one image are answered without
running the encoder, with their first token at least 5 times as soon; and with concurrent requests
with large images, the 99th percentile of the time between tokens of a text is at most 1.25 times
that without.

    python benchmarks/media/bench_images.py [--shape qwen2.5-vl-3b] [--parts speeds same beside]
        [--ways native torch] [--images 2] [--rounds 3] [--size 384x384] [--dtype bfloat16]
        [--stream 100] [--depth 2]

Shapes have random weights: `tiny`, `llava-onevision-0.5b` and `qwen2.5-vl-3b`. A round runs all in
turn: our server (`native`; `torch` is one with `media.encoder_backend torch`), then transformers in
this process. Each gets images that it has not seen before. Ratios are per round; their median,
smallest and largest are printed. transformers gets its processor's output as we prepare it, within
its time; its images per second are measured one after the other, which is its fastest mode on a CPU
whose cores one image occupies. Encoders have a low priority here: any other work on the machine
delays them, so measure on a quiet one. `qwen2.5-vl-3b` takes about 8 GB for each of the checkpoint,
our servers and transformers.

llama.cpp (mtmd) and OpenVINO GenAI are not compared. llama.cpp's converter does not support
LLaVA-OneVision, and recognises tokenizers by hashes, so it rejects a byte tokenizer. OpenVINO GenAI
does not support LLaVA-OneVision either; optimum-intel 2.2 exports the text part of `qwen2.5-vl-3b`,
but its encoder only with transformers up to 5.0.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import transformers
from PIL import Image

from sylvan.media.messages import PrepareItem
from sylvan.media.processor import Processor
from tests.support.multimodal import FAMILIES, IMAGE, VIDEO
from tests.support.processors import PROCESSORS, write_files

ROOT = Path(__file__).parents[2]
PATIENCE_S = 900.0
REPORTED_S = 2.0  # several times as long as a scheduler takes to report its counts
QUESTION = list(b" what is that?")
ASKED = 16
ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
HALF_BILLION = json.loads((ROOT / "benchmarks" / "half_billion.json").read_text())
_TILES = [[384 * i, 384 * j] for i in range(1, 4) for j in range(1, 4)]


def _qwen() -> Any:
    return transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32768,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [16, 24, 24],
            },
            **ENDS,
        },
        vision_config={
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "out_hidden_size": 2048,
        },
        tie_word_embeddings=True,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=265,
        vision_end_token_id=266,
        **ENDS,
    )


def _onevision() -> Any:
    return transformers.LlavaOnevisionConfig(
        text_config=transformers.Qwen2Config(**HALF_BILLION, **ENDS).to_dict(),
        vision_config=transformers.SiglipVisionConfig(
            hidden_size=1152,
            intermediate_size=4304,
            num_hidden_layers=26,
            num_attention_heads=16,
            image_size=384,
            patch_size=14,
            vision_use_head=False,  # as llava-hf publishes it
        ).to_dict(),
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=_TILES,
        **ENDS,
    )


@dataclass(frozen=True)
class Shape:
    """A family's configuration, and the arguments of its processor."""

    family: str
    config: Any
    images: dict[str, Any]
    whole: dict[str, Any]


_PATCHES = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
SHAPES = {
    "tiny": Shape("qwen2.5-vl", FAMILIES["qwen2.5-vl"].config, {}, {}),
    "qwen2.5-vl-3b": Shape(
        "qwen2.5-vl",
        _qwen,
        _PATCHES | {"size": {"shortest_edge": 3136, "longest_edge": 12845056}},
        {},
    ),
    "llava-onevision-0.5b": Shape(
        "llava-onevision",
        _onevision,
        {"size": {"height": 384, "width": 384}, "image_grid_pinpoints": _TILES},
        {"num_image_tokens": 729},
    ),
}


def _shorten(config: Any, depth: int) -> None:
    """Keep only this many layers in each part."""
    config.text_config.num_hidden_layers = depth
    if getattr(config.text_config, "layer_types", None):
        config.text_config.layer_types = config.text_config.layer_types[:depth]
    for name in ("depth", "num_hidden_layers"):
        if hasattr(config.vision_config, name):
            setattr(config.vision_config, name, depth)
    if hasattr(config.vision_config, "fullatt_block_indexes"):
        config.vision_config.fullatt_block_indexes = [depth - 1]


def write_shape(shape: Shape, folder: Path, dtype: torch.dtype, depth: int | None = None) -> None:
    """Write a checkpoint with random weights, a byte tokenizer and the family's processor."""
    files = PROCESSORS[shape.family]
    images, whole = files.images | shape.images, files.whole | shape.whole
    write_files(replace(files, images=images, whole=whole), folder)
    torch.manual_seed(0)
    config = shape.config()
    if depth:
        _shorten(config, depth)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
    model.save_pretrained(folder)


class Images:
    """Creates new images of one size."""

    def __init__(self, size: tuple[int, int]) -> None:
        self._size, self._rng = size, np.random.default_rng(0)

    def new(self) -> bytes:
        width, height = self._size
        rough = self._rng.integers(0, 255, (height // 16 + 1, width // 16 + 1, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC).save(file, "PNG")
        return file.getvalue()


class Server:
    """`sylvan serve` with one of our encoders."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=PATIENCE_S)

    def first(self, image: bytes, question: list[int]) -> float:
        """Return the seconds to the first token about an image."""
        start = time.perf_counter()
        self._ask([IMAGE, *question], 1, image)
        return time.perf_counter() - start

    def each_second(self, images: list[bytes]) -> float:
        """Return images per second, all sent at once."""
        start = time.perf_counter()
        with ThreadPoolExecutor(len(images)) as pool:
            list(pool.map(lambda image: self.first(image, QUESTION), images))
        return len(images) / (time.perf_counter() - start)

    def between(self, tokens: int) -> list[float]:
        """Return the seconds between the tokens of a text; tokens of one event are 0 s apart."""
        body = self._body(list(b"tell me more "), tokens, None) | {"stream": True}
        times: list[float] = []
        with self._http.stream("POST", "/generate", json=body) as reply:
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    count = json.loads(line.removeprefix("data: "))["meta_info"][
                        "completion_tokens"
                    ]
                    times += [time.perf_counter()] * (count - len(times))
        assert len(times) == tokens, f"{len(times)} of {tokens} tokens came"
        return np.diff(times).tolist()

    def encoded(self) -> int:
        """Return the number of images that the encoder has seen, once two consecutive reports
        agree.
        """
        before, now = -1, self._reported()
        while now != before:
            time.sleep(REPORTED_S)
            before, now = now, self._reported()
        return now

    def _reported(self) -> int:
        text = self._http.get("/metrics").text
        found = re.search(r"^\S*encoder_items\S* (\d+)", text, re.MULTILINE)
        assert found, "the server counts no images"
        return int(found[1])

    def _ask(self, ids: list[int], tokens: int, image: bytes | None) -> Any:
        reply = self._http.post("/generate", json=self._body(ids, tokens, image))
        assert reply.status_code == 200, reply.text
        return reply.json()

    def _body(self, ids: list[int], tokens: int, image: bytes | None) -> dict[str, Any]:
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        seen = {} if image is None else {"image_data": base64.b64encode(image).decode()}
        return {"input_ids": ids, "sampling_params": sampling, **seen}


@contextmanager
def serving(folder: Path, dtype: str, *flags: str) -> Iterator[Server]:
    code = "import sys; from sylvan.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", str(folder), "--until-eof", "--dtype", dtype]
    command += ["--server.port", "0", "--log-level", "warning", "--load-cache", "none", *flags]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            seen += line
            if found := re.search(r"Sylvan serves \S+ at (http://\S+)", line):
                yield Server(found[1])
                break
        else:
            raise RuntimeError(f"the server did not start:\n{seen}")
    finally:
        process.communicate(timeout=PATIENCE_S)


class Theirs:
    """transformers, in this process."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._processor = Processor(folder)
        kind = transformers.AutoModelForImageTextToText
        self._model = kind.from_pretrained(folder, dtype=dtype).eval()
        self._dtype = dtype

    def first(self, image: bytes, question: list[int]) -> float:
        start = time.perf_counter()
        made = self._processor.prepare(
            PrepareItem(id=0, kind="image", data=image, max_pixels=64 << 20)
        )
        ids = torch.tensor([[*made.tokens, *question]])
        features: dict[str, torch.Tensor] = {}
        for name, array in made.features.items():
            tensor = torch.from_numpy(np.ascontiguousarray(array))
            features[name] = tensor.to(self._dtype) if tensor.is_floating_point() else tensor
        if "image_grid_thw" in features:
            features["mm_token_type_ids"] = (ids == IMAGE).int()
        with torch.inference_mode():
            self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=1,
                do_sample=False,
                **features,
            )
        return time.perf_counter() - start


def spread(numbers: Sequence[float]) -> str:
    """Format the median and the range."""
    return f"{statistics.median(numbers):.2f} ({min(numbers):.2f} to {max(numbers):.2f})"


def speeds(servers: dict[str, Server], theirs: Theirs, images: Images, args: Any) -> None:
    firsts: dict[str, list[float]] = {name: [] for name in (*servers, "transformers")}
    rates: dict[str, list[float]] = {name: [] for name in firsts}
    for server in (*servers.values(), theirs):
        server.first(images.new(), QUESTION)  # processes start, memory becomes resident
    for _ in range(args.rounds):
        for name, server in servers.items():
            firsts[name].append(server.first(images.new(), QUESTION))
            rates[name].append(server.each_second([images.new() for _ in range(args.images)]))
        alone = [theirs.first(images.new(), QUESTION) for _ in range(args.images)]
        firsts["transformers"].append(statistics.median(alone))
        rates["transformers"].append(len(alone) / sum(alone))
    for name in firsts:
        first, rate = statistics.median(firsts[name]), statistics.median(rates[name])
        line = f"{name:14} first token {1e3 * first:6.0f} ms, {rate:6.3f} images/s"
        if name != "transformers":
            base = firsts["transformers"], rates["transformers"]
            sooner = [b / a for a, b in zip(firsts[name], base[0], strict=True)]
            more = [a / b for a, b in zip(rates[name], base[1], strict=True)]
            line += f"; of transformers: first token {spread(sooner)}, images/s {spread(more)}"
        print(line, flush=True)


def same_image(server: Server, images: Images, args: Any) -> None:
    """Ask `ASKED` questions about the same image, one image per round."""
    server.first(images.new(), QUESTION)
    ratios: list[float] = []
    for _ in range(args.rounds):
        image, before = images.new(), server.encoded()
        times = [server.first(image, [*QUESTION, 48 + i]) for i in range(ASKED)]
        runs = server.encoded() - before
        assert runs == 1, f"the encoder ran {runs} times for one image"
        later = statistics.median(times[1:])
        ratios.append(times[0] / later)
        print(
            f"the same image {ASKED} times: the encoder ran once; first token "
            f"{1e3 * times[0]:.0f} ms, then {1e3 * later:.0f} ms",
            flush=True,
        )
    print(f"first token about an image seen before: {spread(ratios)} times as soon", flush=True)


def beside(server: Server, images: Images, args: Any) -> None:
    """Stream a text with and without concurrent image requests; a pair of both is a round."""
    server.first(images.new(), QUESTION)
    p99: tuple[list[float], list[float]] = ([], [])
    for _ in range(args.rounds):
        p99[0].append(percentile(server.between(args.stream)))
        stop = threading.Event()

        def ask(stop: threading.Event = stop) -> None:
            while not stop.is_set():
                server.first(images.new(), QUESTION)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            p99[1].append(percentile(server.between(args.stream)))
        finally:
            stop.set()
            thread.join()
    ratios = [busy / max(alone, 1e-6) for alone, busy in zip(*p99, strict=True)]
    print(
        f"99th percentile between tokens of a text: {1e3 * statistics.median(p99[0]):.1f} ms "
        f"alone, {1e3 * statistics.median(p99[1]):.1f} ms beside images: ratio {spread(ratios)}",
        flush=True,
    )


def percentile(times: Sequence[float]) -> float:
    """Return the 99th percentile, in seconds."""
    return float(np.percentile(times, 99))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llava-onevision-0.5b")
    parts = ("speeds", "same", "beside")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--ways", nargs="+", choices=("native", "torch"), default=["native"])
    parser.add_argument("--images", type=int, default=2, help="concurrent images")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", default="384x384", help="width x height of images")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--stream", type=int, default=100, help="tokens of the text")
    parser.add_argument("--depth", type=int, help="layers of each part, for a quick trial")
    args = parser.parse_args()
    width, height = map(int, args.size.split("x"))
    images, dtype = Images((width, height)), getattr(torch, args.dtype)
    backends = {"native": "auto", "torch": "torch"}
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        folder = Path(made)
        write_shape(SHAPES[args.shape], folder, dtype, args.depth)
        servers = {
            name: stack.enter_context(
                serving(folder, args.dtype, "--media.encoder-backend", backends[name])
            )
            for name in dict.fromkeys(("native", *args.ways))
        }
        print(
            f"{args.shape}, {args.dtype}, images of {args.size}, {torch.get_num_threads()} threads",
            flush=True,
        )
        if "speeds" in args.parts:
            speeds(servers, Theirs(folder, dtype), images, args)
        if "same" in args.parts:
            same_image(servers["native"], images, args)
        if "beside" in args.parts:
            beside(servers["native"], images, args)


if __name__ == "__main__":
    main()
