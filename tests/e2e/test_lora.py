"""A real server whose adapters and weights change under its clients, and which is killed."""

from __future__ import annotations

import base64
import itertools
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from safetensors.torch import save

from tests.e2e.conftest import running
from tests.support.adapters import write_random_adapter
from tests.support.random_model import write_random_model
from tests.support.updates import weights_in

PROMPT = [5, 9, 150, 31] * 12
FLAGS = ("--enable-lora", "--page-size", "16", "--threads", "1")
KEY = {"authorization": "Bearer root"}
STAYS, COMES = ("f0", "f1"), ("c0", "c1", "c2")
ROUNDS = 8


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def folders(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_random_adapter(folder / name, model_dir, seed, r=1 + 3 * seed)
        for seed, name in enumerate((*STAYS, *COMES))
    }


class Caller:
    """Speaks to one server as its operator."""

    def __init__(self, url: str) -> None:
        self.url = url

    def post(self, path: str, **body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=KEY, timeout=120)

    def load(self, name: str, folder: Path) -> httpx.Response:
        return self.post("/load_lora_adapter", lora_name=name, lora_path=str(folder))

    def send(self, name: str, folder: Path) -> httpx.Response:
        weights = (folder / "adapter_model.safetensors").read_bytes()
        return self.post(
            "/load_lora_adapter_from_tensors",
            lora_name=name,
            config_dict=json.loads((folder / "adapter_config.json").read_text()),
            serialized_named_tensors=base64.b64encode(weights).decode(),
        )

    def ask(self, adapter: str | None, new: int = 12) -> httpx.Response:
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        return self.post("/generate", input_ids=PROMPT, lora_path=adapter, sampling_params=sampling)

    def ids(self, adapter: str | None) -> list[int]:
        reply = self.ask(adapter)
        assert reply.status_code == 200, reply.text
        return reply.json()["output_ids"]

    def listed(self) -> set[str]:
        cards = httpx.get(self.url + "/v1/models", headers=KEY, timeout=60).json()["data"]
        return {card["id"] for card in cards[1:]}

    def stream(self, adapter: str | None, *, leave: bool) -> dict:
        """The last event of a stream, or the first if its client leaves."""
        sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        body = {"input_ids": PROMPT, "lora_path": adapter, "sampling_params": sampling}
        last: dict = {}
        with httpx.stream(
            "POST", self.url + "/generate", json=body | {"stream": True}, headers=KEY, timeout=120
        ) as reply:
            if reply.status_code != 200:
                return json.loads(reply.read())
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    last = json.loads(line[6:])
                    if leave:
                        break
        return last


def hostile(folder: Path, source: Path) -> dict[str, Path]:
    """Adapters that cannot be served."""
    config = json.loads((source / "adapter_config.json").read_text())
    tensors = load_file(source / "adapter_model.safetensors")
    made: dict[str, Path] = {}

    def write(name: str, changed: dict, **fields: object) -> None:
        made[name] = folder / name
        made[name].mkdir()
        (made[name] / "adapter_config.json").write_text(json.dumps(config | fields))
        save_file(changed, made[name] / "adapter_model.safetensors")

    write("nan", {n: t * np.float32(np.nan) for n, t in tensors.items()})
    empty = {n: t[:0] if "lora_A" in n else t[:, :0] for n, t in tensors.items()}
    write("no rank", {n: np.ascontiguousarray(t) for n, t in empty.items()})
    write("integers", {n: t.astype(np.int64) for n, t in tensors.items()})
    write("half", {n: np.ascontiguousarray(t[:, ::2]) for n, t in tensors.items()})
    write("pattern", tensors, alpha_pattern={"(": 3})
    write("scale", tensors, lora_alpha=1e300)
    return made


class Storm:
    """Clients that ask and leave, and an operator that changes the adapters that they use."""

    def __init__(
        self, caller: Caller, folders: dict[str, Path], want: dict[str | None, list[int]]
    ) -> None:
        self.caller, self.folders, self.want = caller, folders, want

    def client(self, number: int) -> None:
        rng = random.Random(number)
        for turn in range(ROUNDS):
            name = rng.choice([*self.want])
            if turn % 3:
                self.judge(name, 200, self.caller.stream(name, leave=turn % 3 == 2))
            else:
                reply = self.caller.ask(name)
                self.judge(name, reply.status_code, reply.json())

    def judge(self, name: str | None, status: int, found: dict) -> None:
        """Right as far as it goes, or ended because its adapter was unloaded."""
        text = json.dumps(found)
        meta = found.get("meta_info", {})
        if (meta.get("finish_reason") or {}).get("type") == "abort" or "error" in found:
            assert name == COMES[0], text
            assert "adapter" in text
        else:
            assert status == 200, text
            assert found["output_ids"] == self.want[name][: len(found["output_ids"])], (name, text)

    def change(self, pool: ThreadPoolExecutor) -> None:
        name = COMES[0]
        for turn in range(ROUNDS):
            abort = bool(turn % 2)
            gone = self.caller.post("/unload_lora_adapter", lora_name=name, abort_requests=abort)
            assert gone.status_code == 200, gone.text
            folder = self.folders[name]
            twice = [pool.submit(self.caller.load, name, folder) for _ in range(2)]
            assert sorted(reply.result().status_code for reply in twice) == [200, 400]

    def attack(self, bad: dict[str, Path]) -> None:
        for name, folder in itertools.islice(itertools.cycle(bad.items()), ROUNDS):
            load = self.caller.load if len(name) % 2 else self.caller.send
            reply = load("bad", folder)
            assert reply.status_code == 400, (name, reply.text)

    def update(self, data: bytes) -> None:
        """To the same weights, or not at all."""
        for turn in range(ROUNDS // 2):
            cut = data if turn % 2 else data[: -100 * (turn + 1)]
            sent = [base64.b64encode(cut).decode()]
            reply = self.caller.post("/update_weights_from_tensor", serialized_named_tensors=sent)
            assert reply.status_code == (200 if turn % 2 else 400), reply.text


@pytest.mark.slow
def test_every_answer_is_right_while_adapters_and_weights_come_and_go(
    model_dir: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Requests get their own adapter, whatever is loaded, refused, unloaded or replaced."""
    flags = (*FLAGS, "--server.admin-api-key", "root", "--max-loras-per-batch", "2")
    paths = ("--lora-paths", *(f"{name}={folders[name]}" for name in STAYS))
    bad = hostile(tmp_path, folders["f0"])
    data = save(weights_in(model_dir))
    with running(str(model_dir), *flags, "--max-loaded-loras", "3", *paths) as server:
        caller = Caller(server.url)
        for name in COMES:
            assert caller.load(name, folders[name]).status_code == 200
        want = {name: caller.ids(name) for name in (None, *STAYS, *COMES)}
        assert len({str(ids) for ids in want.values()}) == len(want)

        storm = Storm(caller, folders, want)
        with ThreadPoolExecutor(16) as pool:
            jobs = [pool.submit(storm.client, number) for number in range(5)]
            jobs += [pool.submit(storm.change, pool), pool.submit(storm.attack, bad)]
            jobs += [pool.submit(storm.update, data)]
            for job in jobs:
                job.result()

        assert {name: caller.ids(name) for name in want} == want
        load = httpx.get(server.url + "/v1/loads", headers=KEY, timeout=60).json()["loads"][0]
        assert load["lora"]["slots_used"] <= load["lora"]["slots_total"] == 2
        assert caller.listed() == {*STAYS, *COMES}


@pytest.mark.slow
def test_after_a_kill_adapters_and_what_the_store_has_of_each_are_back(
    model_dir: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Those loaded from a directory and those that were sent; keys and values are kept apart."""
    flags = (*FLAGS, "--server.data-dir", str(tmp_path / "data"))
    flags += ("--server.admin-api-key", "root")
    flags += ("--enable-hierarchical-cache", "--tiers.prefetch-min-tokens", "16")
    flags += ("--tiers.storage", str(tmp_path / "kv"))
    names = (None, "c0", "sent")
    with running(str(model_dir), *flags) as server:
        caller = Caller(server.url)
        assert caller.load("c0", folders["c0"]).status_code == 200
        assert caller.send("sent", folders["c1"]).status_code == 200
        assert caller.load("gone", folders["c2"]).status_code == 200
        assert caller.post("/unload_lora_adapter", lora_name="gone").status_code == 200
        replies = [caller.ask(name).json() for name in names]
        want = [reply["output_ids"] for reply in replies]
        assert [reply["meta_info"]["cached_tokens"] for reply in replies] == [0, 0, 0]
        stored(caller, 3 * len(PROMPT))
        server.kill()

    with running(str(model_dir), *flags) as server:
        caller = Caller(server.url)
        replies = [caller.ask(name).json() for name in names]
        assert [reply["output_ids"] for reply in replies] == want
        assert [reply["meta_info"]["cached_tokens"] for reply in replies] == [32, 32, 32]
        assert caller.ask("gone").status_code == 400
        assert caller.listed() == {"c0", "sent"}


def stored(caller: Caller, tokens: int) -> None:
    """Wait until so many tokens are in the store, and no more are written."""
    for _ in range(1200):
        url = caller.url + "/hicache/storage-backend"
        status = httpx.get(url, headers=KEY, timeout=60).json()
        if status["counts"]["offered_tokens"] >= tokens and not status["pending_bytes"]:
            return
        time.sleep(0.05)
    raise AssertionError(f"still writing: {status}")
