"""Starts without PyTorch: a saved program answers as the model does that it was compiled from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sylvan.config import Config
from sylvan.config.load_cache import PROGRAM, WEIGHTS
from sylvan.config.sources import from_keywords, gather
from sylvan.kernels import describe
from sylvan.kernels.cache_files import CacheFiles
from sylvan.protocol.arrays import EMPTY_IDS
from sylvan.protocol.commands import CheckHealth, HashWeights
from sylvan.protocol.messages import TokenOutput
from sylvan.protocol.requests import GenerateRequest, LogprobOptions, ThinkingOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.engine.build import build_scheduler
from sylvan.runtime.engine.compose import resolved
from sylvan.runtime.engine.early_start import early_start
from sylvan.runtime.engine.engine_core import EngineCore
from tests.support.random_model import write_random_model

pytestmark = pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")

PROMPT = [(7 * i) % 200 + 5 for i in range(75)]
PATIENCE_S = 120.0
REQUESTS: tuple[tuple[list[int], dict[str, Any], LogprobOptions | None], ...] = (
    (PROMPT[:5], {"temperature": 0.0}, None),
    (
        PROMPT,
        {"sampling_seed": 3, "top_k": 40, "top_p": 0.9},
        LogprobOptions(top=2, token_ids=(7,)),
    ),
    (PROMPT[:40], {"sampling_seed": 4, "frequency_penalty": 1.0, "min_new_tokens": 9}, None),
    (PROMPT[:70], {"sampling_seed": 5, "repetition_penalty": 1.3, "logit_bias": {"9": 8.0}}, None),
    (PROMPT[:30], {"sampling_seed": 6, "ignore_eos": False, "stop_token_ids": (50, 51, 52)}, None),
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"), context_len=256)


def config_of(model_dir: Path, cache: Path, **changes: Any) -> Config:
    given = {"device": "cpu", "dtype": "float32", "threads": 1, "seed": 1, "log_level": "error"}
    given |= {"model": str(model_dir), "load_cache": str(cache), "cache__page_size": 16}
    given |= {"cache__max_tokens": 1024, "scheduler__max_batch_tokens": 48, **changes}
    given |= {"scheduler__max_running_reqs": 4}
    return resolved(gather(from_keywords(given)).config)


class Server:
    """A scheduler of this process."""

    def __init__(self, config: Config, *, early: bool) -> None:
        self.outputs: list[TokenOutput] = []
        make = early_start if early else build_scheduler
        built = make(config, self.outputs.extend)
        assert built is not None, "no program was saved"
        self.built: EngineCore = built
        self.scheduler = built.scheduler

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.built.close()

    @property
    def whole(self) -> bool:
        return self.built.executor.whole

    def add(self, rid: str, ids: list[int], sampling: dict[str, Any], **more: Any) -> None:
        params = {"max_new_tokens": 24, "ignore_eos": True, "sampling_seed": 0, **sampling}
        self.scheduler.add(
            GenerateRequest(
                rid=rid,
                input_ids=np.array(ids, np.int32),
                output_ids=EMPTY_IDS,
                sampling=SamplingParams(**params),
                eos_ids=() if params["ignore_eos"] else (258,),
                **more,
            )
        )

    def run(self) -> dict[str, list[object]]:
        """Until nothing is left; tokens and log probabilities of each request."""
        until = time.monotonic() + PATIENCE_S
        while not self.scheduler.idle:
            assert time.monotonic() < until
            if not self.scheduler.step():
                time.sleep(0.001)
        assert self.scheduler.audit() == 0
        return self.found()

    def found(self) -> dict[str, list[object]]:
        by_rid: dict[str, list[object]] = {}
        for output in self.outputs:
            assert output.finish is None or output.finish.type != "abort", output.finish
            row = by_rid.setdefault(output.rid, [])
            row += output.token_ids
            for part in (output.logprobs, output.prompt_logprobs):
                if part is not None:
                    row.append(msgspec.json.encode(part, enc_hook=np.ndarray.tolist))
        return by_rid

    def command(self, command: Any) -> Any:
        pending = self.built.executor.control(command)
        until = time.monotonic() + PATIENCE_S
        while not pending.done():
            assert time.monotonic() < until
            time.sleep(0.001)
        return pending.wait()


def ask(server: Server) -> dict[str, list[object]]:
    """Requests one after another, then all at once: the second time prefixes are cached."""
    for number, (ids, sampling, logprobs) in enumerate(REQUESTS):
        server.add(f"alone-{number}", ids, sampling, logprobs=logprobs)
        server.run()
    for number, (ids, sampling, logprobs) in enumerate(REQUESTS):
        server.add(f"together-{number}", ids, sampling, logprobs=logprobs)
    return server.run()


@pytest.fixture(scope="module")
def saved(model_dir, tmp_path_factory):
    """A configuration whose program is saved, and what its first server has answered."""
    config = config_of(model_dir, tmp_path_factory.mktemp("cache"))
    assert early_start(config, list.clear) is None
    with Server(config, early=False) as server:
        return config, ask(server)


def test_a_saved_program_answers_as_the_model(saved):
    config, want = saved

    with Server(config, early=True) as server:
        found = ask(server)
        assert not server.whole

    assert found == want
    for number in range(len(REQUESTS)):
        assert found[f"alone-{number}"] == found[f"together-{number}"]


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("kind", ["regex", "prompt", "thinking"])
def test_a_request_that_needs_more_joins_running_ones(saved, kind, overlap):
    config, want = saved
    config = config_of(Path(config.model), Path(config.load_cache), scheduler__overlap=overlap)
    needs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "regex": ({"regex": "[a-c]{9}", "ignore_eos": False}, {}),
        "prompt": ({"temperature": 0.0}, {"logprobs": LogprobOptions(start=3, top=1)}),
        "thinking": ({"temperature": 0.0}, {"thinking": ThinkingOptions(ends=((65,),), budget=4)}),
    }
    sampling, more = needs[kind]
    with Server(config, early=False) as server:
        server.add("needs", PROMPT[:60], sampling, **more)
        alone = server.run()["needs"]

    with Server(config, early=True) as server:
        ids, others, logprobs = REQUESTS[1]
        server.add("alone-1", ids, others | {"max_new_tokens": 100}, logprobs=logprobs)
        for _ in range(6):
            server.scheduler.step()
        before = len(server.found()["alone-1"])
        server.add("needs", PROMPT[:60], sampling, **more)
        found = server.run()
        assert 0 < before < len(found["alone-1"])
        assert server.whole
        cached = next(o.usage.cached_tokens for o in server.outputs if o.rid == "needs")
        server.outputs.clear()
        assert ask(server) == want

    assert found["needs"] == alone
    first = want["alone-1"]
    assert found["alone-1"][: len(first)] == first
    assert cached > 0 or kind == "prompt", "the KV of before"


def test_commands_wait_for_what_they_need(saved):
    config, want = saved
    with Server(config, early=False) as server:
        hashes = server.command(HashWeights()).body
    with Server(config, early=True) as server:
        assert server.command(CheckHealth()).body == {"healthy": True, "reason": ""}
        assert not server.whole, "health needs nothing"
        found = ask(server)

        assert server.command(HashWeights()).body == hashes

        assert server.whole
        server.outputs.clear()
        assert ask(server) == found == want


def test_without_torch(saved):
    config, want = saved
    code = f"""
import sys
sys.modules["torch"] = None
import msgspec
import numpy as np
from sylvan.config import Config
from sylvan.config.load_cache import PROGRAM, WEIGHTS
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.engine.early_start import early_start
config = msgspec.json.decode({msgspec.json.encode(config)!r}, type=Config)
outputs = []
built = early_start(config, outputs.extend)
sampling = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=0.0, sampling_seed=0)
ids = np.array({REQUESTS[0][0]}, np.int32)
empty = np.empty(0, np.int32)
built.scheduler.add(GenerateRequest(rid="a", input_ids=ids, output_ids=empty, sampling=sampling))
while not built.scheduler.idle:
    built.scheduler.step()
print([token for output in outputs for token in output.token_ids])
built.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(want["alone-0"])


@pytest.mark.parametrize("damage", ["byte", "cut", "empty", "no weights", "other weights"])
def test_what_is_damaged_is_made_again(model_dir, tmp_path, damage, caplog):
    config = config_of(model_dir, tmp_path / "cache")
    with Server(config, early=False) as server:
        server.add("a", PROMPT, {})
        want = server.run()
    [program] = (tmp_path / "cache").glob(f"*{PROGRAM}")
    [weights] = (tmp_path / "cache").glob("*.weights")
    whole = program.read_bytes()
    if damage == "no weights":
        weights.unlink()
    elif damage == "other weights":
        text = weights.read_bytes()
        weights.write_bytes(text.replace(b'"kind":"dense"', b'"kind":"dens3"', 1))
    else:
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        program.write_bytes({"byte": flipped, "cut": whole[:middle], "empty": b""}[damage])

    assert early_start(config, list.clear) is None

    with Server(config, early=False) as server:
        server.add("a", PROMPT, {})
        assert server.run() == want
    with Server(config, early=True) as server:
        server.add("a", PROMPT, {})
        assert server.run() == want


def test_other_settings_and_checkpoints_have_other_programs(model_dir, saved, tmp_path):
    config, _ = saved
    folder = Path(config.load_cache)
    for changes in ({"context_len": 128}, {"quantization": "w8a8"}, {"cache__dtype": "int8"}):
        assert early_start(config_of(model_dir, folder, **changes), list.clear) is None
    copy = tmp_path / model_dir.name
    write_random_model(copy, context_len=256)
    assert early_start(config_of(copy, folder), list.clear) is None

    with Server(config_of(model_dir, folder, cache__max_tokens=512), early=True) as server:
        assert server.built.facts["max_total_tokens"] == 512
        server.add("a", PROMPT, {})
        assert server.run()


def test_a_failure_of_pytorch_fails_what_needs_it(saved, monkeypatch):
    from sylvan.runtime.engine import build

    def fail(*_: object) -> None:
        raise MemoryError("none left")

    config, want = saved
    monkeypatch.setattr(build, "build_late", fail)
    with Server(config, early=True) as server:
        server.add("alone-0", REQUESTS[0][0], REQUESTS[0][1])
        server.add("needs", PROMPT, {"regex": "[a-c]{4}"})
        until = time.monotonic() + PATIENCE_S
        while not server.scheduler.idle:
            assert time.monotonic() < until
            server.scheduler.step()
        [refusal] = [o.finish for o in server.outputs if o.rid == "needs"]
        server.outputs = [o for o in server.outputs if o.rid != "needs"]
        assert server.found()["alone-0"] == want["alone-0"]
    assert refusal is not None
    assert refusal.status == 500
    assert "none left" in refusal.message


def test_what_makes_room_for_others_is_made_again(saved, tmp_path, monkeypatch):
    config, want = saved
    folder = tmp_path / "cache"
    shutil.copytree(config.load_cache, folder)
    config = config_of(Path(config.model), folder)
    held = sum(file.stat().st_size for file in folder.iterdir())
    for file in folder.iterdir():
        os.utime(file, (1, 1) if file.suffix == PROGRAM else None)
    files = CacheFiles(folder, (held + 50) / shutil.disk_usage(folder).total)

    files.write("other.weights", {}, [np.zeros(60, np.uint8)])

    assert sorted(file.suffix for file in folder.iterdir()) == [WEIGHTS, WEIGHTS]
    assert early_start(config, list.clear) is None
    with Server(config, early=False) as server:
        server.add("alone-0", *REQUESTS[0][:2])
        assert server.run()["alone-0"] == want["alone-0"]
    with Server(config, early=True) as server:
        server.add("alone-0", *REQUESTS[0][:2])
        assert server.run()["alone-0"] == want["alone-0"]


def test_a_cache_that_is_only_readable_is_read(saved, monkeypatch):
    """As one that an image brings along."""
    config, want = saved

    def refuse(*_: object) -> None:
        raise PermissionError("a read-only file system")

    monkeypatch.setattr(Path, "touch", refuse)
    with Server(config, early=True) as server:
        server.add("alone-0", *REQUESTS[0][:2])
        assert server.run()["alone-0"] == want["alone-0"]
        assert not server.whole
