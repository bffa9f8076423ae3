"""A prefill and a decode server in one process, stepped by the test."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sylvan.config.sources import from_keywords, gather
from sylvan.protocol.arrays import EMPTY_IDS
from sylvan.protocol.messages import Finish, TokenOutput
from sylvan.protocol.requests import Bootstrap, GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.engine.build import build_scheduler
from tests.support.scripted import write_checkpoint
from tests.support.tiny import MODEL

HOST = "127.0.0.1"
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 1,
    },
    "windows only": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 0,
    },
    "recurrent": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention"],
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": False,
    },
}


def write_kind(folder: Path, kind: str) -> str:
    """Write a tiny model whose layers keep KV of this kind."""
    write_checkpoint(folder)
    (folder / "config.json").write_text(json.dumps(MODEL | KINDS[kind]))
    return str(folder)


class Server:
    """A scheduler in this process."""

    def __init__(self, model: str, **options: Any) -> None:
        given: dict[str, Any] = {
            "model": model,
            "load_format": "dummy",
            "dtype": "float32",
            "threads": 1,
            "log_level": "error",
            "cache__page_size": 16,
            "cache__max_tokens": 4096,
            "scheduler__chunk_tokens": 64,
            **options,
        }
        self.outputs: list[TokenOutput] = []
        self.built = build_scheduler(gather(from_keywords(given)).config, self.outputs.extend)
        self.scheduler = self.built.scheduler

    def add(self, rid: str, ids: list[int], meeting: Bootstrap | None = None, **given: Any) -> None:
        given = {"max_new_tokens": 8, "temperature": 1.0, "sampling_seed": 5, **given}
        request = GenerateRequest(
            rid=rid,
            input_ids=np.array(ids, np.int32),
            output_ids=EMPTY_IDS,
            sampling=SamplingParams(ignore_eos=True, **given),
            bootstrap=meeting,
        )
        self.scheduler.add(request)

    def tokens(self, rid: str) -> list[int]:
        """Return all tokens of a request so far."""
        return [t for output in self.outputs if output.rid == rid for t in output.token_ids]

    def finish(self, rid: str) -> Finish | None:
        """Return how it ended."""
        return next((o.finish for o in self.outputs if o.rid == rid and o.finish), None)

    def state(self) -> dict[str, Any]:
        """Return the state of the transfers."""
        return self.built.state()["disaggregation"]

    def step(self) -> bool:
        return self.scheduler.step()

    def is_clean(self) -> bool:
        """Whether no request holds a page, and none was lost."""
        load = self.scheduler.load()
        busy = load.num_running_reqs + load.num_waiting_reqs
        return not busy and not self.scheduler.holds_kv and not self.scheduler.audit()

    def close(self) -> None:
        self.built.close()


class Pair:
    """A prefill and a decode server that transfer KV."""

    def __init__(self, model: str, **options: Any) -> None:
        apart = {key: options.pop(key) for key in tuple(options) if key[:2] in ("p_", "d_")}
        own = {
            side: {key[2:]: value for key, value in apart.items() if key[0] == side}
            for side in ("p", "d")
        }
        options = {"disagg__transfer": "tcp", **options}
        first = {"disagg__role": "prefill", "disagg__bootstrap_port": 0, **options, **own["p"]}
        self.prefill = Server(model, **first)
        self.decode = Server(model, **{"disagg__role": "decode", **options, **own["d"]})
        self.port = self.prefill.state()["bootstrap_port"]
        self._rooms = itertools.count(1)

    def meeting(self) -> Bootstrap:
        return Bootstrap(host=HOST, port=self.port, room=next(self._rooms))

    def ask(self, rid: str, ids: list[int], **given: Any) -> None:
        """Send a request to both, as gateways do; the prefill server generates one token."""
        meeting = self.meeting()
        self.prefill.add(rid, ids, meeting, **{**given, "max_new_tokens": 1})
        self.decode.add(rid, ids, meeting, **given)

    def run(self, done: Callable[[], bool] | None = None, seconds: float = 120.0) -> None:
        """Step both until `done`, or until nothing is left to do."""
        servers = (self.prefill, self.decode)
        deadline = time.monotonic() + seconds
        while not (done() if done else all(server.scheduler.idle for server in servers)):
            assert time.monotonic() < deadline, "they did not come to an end"
            if not sum(server.step() for server in servers):
                time.sleep(0.0002)

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


def prompt(length: int, seed: int) -> list[int]:
    """Return random tokens."""
    return np.random.default_rng(seed).integers(5, 60, length).tolist()


def same(meeting: Bootstrap, **changes: Any) -> Bootstrap:
    """Return an equal copy of a rendezvous."""
    return msgspec.structs.replace(meeting, **changes)
