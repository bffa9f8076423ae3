"""Adapters over HTTP: names, bad input, tenants, unloading amid streams, and back after a loss."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file, save_file

from sylvan.config.check import check
from sylvan.config.resolve import resolve
from sylvan.config.tree import LoraConfig, ServerConfig
from sylvan.protocol.errors import CapacityError
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.engine.facts import gather_facts
from sylvan.runtime.engine.runtime import Runtime
from sylvan.runtime.server.app import app_of
from sylvan.runtime.server.context import make_context
from sylvan.runtime.server.settings import ServerSettings
from sylvan.runtime.tokenizer.types import GenerateInput, error_of
from tests.support.adapters import write_random_adapter
from tests.support.random_model import write_random_model
from tests.support.tiny import tiny_config

GREEDY = {"temperature": 0, "max_new_tokens": 8}
PROMPT = "the old tree"
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("base"), context_len=16384)


@pytest.fixture(scope="module")
def folders(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_random_adapter(folder / name, model_dir, seed)
        for seed, name in enumerate(("first", "second", "third"))
    }


class Served:
    """A server and its client."""

    def __init__(self, runtime: Runtime, http: httpx.AsyncClient) -> None:
        self.runtime, self.http = runtime, http

    async def post(self, path: str, body: Any, **also: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **also)

    async def text(self, adapter: str | None, **fields: Any) -> str:
        body = {"text": PROMPT, "sampling_params": GREEDY, "lora_path": adapter} | fields
        response = await self.post("/generate", body)
        assert response.status_code == 200, response.text
        return response.json()["text"]

    async def long_text(
        self, adapter: str, count: int, meanwhile: Callable[[], Awaitable[None]] | None = None
    ) -> str:
        """The generated text; `meanwhile` is called after the first token."""
        inp = GenerateInput(
            text=PROMPT,
            sampling=SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True),
            lora=adapter,
        )
        text = ""
        async with aclosing(self.runtime.manager.generate(inp)) as deltas:
            async for delta in deltas:
                text += delta.text
                if meanwhile is not None:
                    await meanwhile()
                    meanwhile = None
                if (error := error_of(delta.finish)) is not None:
                    raise error
        return text

    async def load(self, name: str, folder: Path, **fields: Any) -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(folder)} | fields
        return await self.post("/load_lora_adapter", body)


@asynccontextmanager
async def served(
    model_dir: Path,
    lora: LoraConfig | None,
    processes: str = "one",
    kept: ServerConfig | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    config = tiny_config(
        model_dir,
        load_format="auto",
        processes=processes,
        lora=lora,
        served_model_name="base",
        server=kept or ServerConfig(),
    )
    facts = gather_facts(config)
    result = resolve(config, facts)
    check(result, facts)
    runtime = await Runtime.start(result.config)
    try:
        given = ServerSettings(served_model_name="base", **settings)
        transport = httpx.ASGITransport(app_of(make_context(runtime.manager, given)))
        url = "http://127.0.0.1:30000"
        async with httpx.AsyncClient(transport=transport, base_url=url) as http:
            yield Served(runtime, http)
    finally:
        await runtime.close()


def chat(model: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": PROMPT}]
    return {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}


async def test_all_apis_name_adapters_and_list_them(model_dir, folders):
    given = {"first": str(folders["first"]), "second": str(folders["second"])}
    async with served(model_dir, LoraConfig(adapters=given)) as server:
        cards = (await server.http.get("/v1/models")).json()["data"]
        found = {card["id"]: card["parent"] for card in cards}
        assert found == {"base": None, "first": "base", "second": "base"}
        assert (await server.http.get("/v1/models/second")).json()["root"] == given["second"]
        tags = (await server.http.get("/api/tags")).json()["models"]
        assert [tag["name"] for tag in tags] == ["base", "first", "second"]
        shown = (await server.post("/api/show", {"model": "first"})).json()
        assert shown["details"]["parent_model"] == "base"

        texts = {name: await server.text(name) for name in (None, "first", "second")}
        assert len(set(texts.values())) == 3
        batch = {"text": [PROMPT] * 3, "lora_path": [None, "first", "second"]}
        answers = (await server.post("/generate", batch | {"sampling_params": GREEDY})).json()
        assert [answer["text"] for answer in answers] == list(texts.values())

        plain = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        for name, want in texts.items():
            models = ("base", "anything") if name is None else (name, f"base:{name}")
            for model in models:
                reply = (await server.post("/v1/completions", plain | {"model": model})).json()
                assert reply["choices"][0]["text"] == want
                assert reply["model"] == model
        replies = [
            (await server.post("/v1/chat/completions", chat(model))).json()["choices"][0]
            for model in ("base", "first", "base:first", "second")
        ]
        said = [reply["message"]["content"] for reply in replies]
        assert said[1] == said[2]
        assert len(set(said)) == 3
        claude = [
            (await server.post("/v1/messages", chat(model))).json()["content"][0]["text"]
            for model in ("claude:1", "first", "base:second")
        ]
        assert claude == [said[0], said[1], said[3]]
        options = {"num_predict": 8, "temperature": 0}
        ollama = [
            (
                await server.post("/api/chat", chat(model) | {"stream": False, "options": options})
            ).json()["message"]["content"]
            for model in ("base:latest", "first", "base:second")
        ]
        assert ollama == claude
        loads = (await server.http.get("/v1/loads")).json()["loads"]
        assert loads[0]["lora"]["slots_total"] == 8
        metrics = (await server.http.get("/metrics")).text
        assert "lora_pool_slots_total{" in metrics
        asked = {"input": PROMPT, "max_output_tokens": 8, "temperature": 0}
        responses = [
            (await server.post("/v1/responses", asked | {"model": model})).json()
            for model in ("base", "second")
        ]
        outputs = [r["output"][-1]["content"][0]["text"] for r in responses]
        assert outputs == [said[0], said[3]]


async def test_loading_and_unloading_while_serving(model_dir, folders):
    async with served(model_dir, LoraConfig(max_per_batch=2)) as server:
        before = await server.text(None)
        reply = await server.load("new", folders["first"])
        assert reply.status_code == 200
        served_now = {"new": str(folders["first"])}
        assert reply.json() == {
            "success": True,
            "error_message": "",
            "loaded_adapters": served_now,
        }
        text = await server.text("new")
        assert text != before

        again = await server.load("new", folders["second"])
        assert again.status_code == 400
        assert "already" in again.json()["error_message"]
        assert again.json()["loaded_adapters"] == served_now
        assert await server.text("new") == text

        weights = (folders["first"] / "adapter_model.safetensors").read_bytes()
        sent = {
            "lora_name": "sent",
            "config_dict": json.loads((folders["first"] / "adapter_config.json").read_text()),
            "serialized_named_tensors": base64.b64encode(weights).decode(),
        }
        tensor, values = next(iter(load_file(folders["first"] / WEIGHTS).items()))
        digest = xxhash.xxh3_128_hexdigest(values.tobytes())
        wrong = {tensor: digest[::-1]}, {"nobody": digest}
        for sums in wrong:
            reply = await server.post(
                "/load_lora_adapter_from_tensors", sent | {"expected_checksums": sums}
            )
            assert reply.status_code == 400
            assert next(iter(sums)) in reply.json()["error"]["message"]
        sent["expected_checksums"] = {tensor: digest}
        reply = await server.post("/load_lora_adapter_from_tensors", sent)
        assert reply.status_code == 200, reply.text
        assert await server.text("sent") == text

        reply = await server.post("/unload_lora_adapter", {"lora_name": "new"})
        assert reply.status_code == 200
        assert list(reply.json()["loaded_adapters"]) == ["sent"]
        gone = await server.post("/generate", {"text": PROMPT, "lora_path": "new"})
        assert gone.status_code == 400
        assert gone.json()["error"]["param"] == "lora_path"
        assert (await server.load("new", folders["second"])).status_code == 200
        assert await server.text("new") not in (text, before)
        assert await server.text(None) == before


def broken(folder: Path, source: Path, **changes: Any) -> Path:
    """A copy of an adapter with another configuration."""
    folder.mkdir()
    config = json.loads((source / "adapter_config.json").read_text()) | changes
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = source / "adapter_model.safetensors"
    (folder / weights.name).write_bytes(weights.read_bytes())
    return folder


async def test_what_cannot_be_served_is_refused_and_changes_nothing(model_dir, folders, tmp_path):
    allowed, first = tmp_path / "allowed", folders["first"]
    allowed.mkdir()
    narrow = write_random_adapter(allowed / "narrow", model_dir, 5)
    cut = broken(allowed / "cut", first)
    (cut / "adapter_model.safetensors").write_bytes(
        (first / "adapter_model.safetensors").read_bytes()[:-50]
    )
    pickled = broken(allowed / "pickled", first)
    (pickled / "adapter_model.safetensors").write_bytes(pickle.dumps({"a": 1}))
    foreign = broken(allowed / "foreign", first)
    tensors = load_file(first / "adapter_model.safetensors")
    halves = {n: t[:, : t.shape[1] // 2] for n, t in tensors.items() if "lora_A" in n}
    save_file(
        {n: np.ascontiguousarray(t) for n, t in (tensors | halves).items()},
        foreign / "adapter_model.safetensors",
    )
    endless = broken(allowed / "endless", first)
    infinite = {n: t * np.inf for n, t in tensors.items()}
    save_file(infinite, endless / "adapter_model.safetensors")
    only_bin = broken(allowed / "bin", first)
    (only_bin / "adapter_model.safetensors").rename(only_bin / "adapter_model.bin")
    (allowed / "link").symlink_to(first)
    (allowed / "linked").mkdir()
    for file in first.iterdir():
        (allowed / "linked" / file.name).symlink_to(file)
    cases = {
        str(allowed / "nothing"): "cannot read",
        str(first): "not in one of lora.allowed_dirs",
        str(allowed / "link"): "not in one of lora.allowed_dirs",
        str(allowed / "linked"): "not in one of lora.allowed_dirs",
        str(allowed / ".." / ".." / "x"): "not in one of lora.allowed_dirs",
        str(broken(allowed / "dora", first, use_dora=True)): "lacks",
        str(broken(allowed / "ia3", first, peft_type="IA3")): "peft_type IA3",
        str(broken(allowed / "bias", first, bias="all")): "trained biases",
        str(write_random_adapter(allowed / "large", model_dir, 1, r=17)): "lora.max_rank is 16",
        str(cut): "cut off",
        str(foreign): "made for another model",
        str(endless): "not finite",
        str(pickled): "pickle",
        str(only_bin): "pickles",
    }
    lora = LoraConfig(allowed_dirs=(str(allowed),), max_rank=16)
    async with served(model_dir, lora) as server:
        before = await server.text(None)
        for path, says in cases.items():
            reply = await server.load("bad", Path(path))
            assert reply.status_code == 400, (path, reply.text)
            assert says in reply.json()["error_message"], (path, reply.text)
        for name in ("", "base", "x" * 300, "a\nb"):
            reply = await server.load(name, narrow)
            assert reply.status_code == 400, name
        reply = await server.post("/unload_lora_adapter", {"lora_name": "nobody"})
        assert (reply.status_code, reply.json()["success"]) == (400, False)
        for change, param in (
            ({"serialized_named_tensors": "!"}, "is not base64"),
            ({"serialized_named_tensors": base64.b64encode(pickle.dumps(1)).decode()}, "pickle"),
            ({"load_format": "pt"}, "expected safetensors"),
            ({"added_tokens_config": {"x": 1}}, "cannot add tokens"),
        ):
            body = {"lora_name": "bad", "config_dict": {"r": 4, "lora_alpha": 8}}
            body |= {"serialized_named_tensors": base64.b64encode(b"12345678").decode()}
            reply = await server.post("/load_lora_adapter_from_tensors", body | change)
            assert reply.status_code == 400
            assert param in reply.text
        reply = await server.post("/v1/completions", {"model": "base:bad", "prompt": "x"})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "model"
        assert [m["id"] for m in (await server.http.get("/v1/models")).json()["data"]] == ["base"]
        assert (await server.load("good", narrow)).status_code == 200
        assert await server.text(None) == before


async def test_adapters_are_off_unless_asked_for(model_dir, folders):
    async with served(model_dir, None) as server:
        reply = await server.load("x", folders["first"])
        assert reply.status_code == 400
        assert "--enable-lora" in reply.json()["error_message"]
        reply = await server.post("/generate", {"text": "x", "lora_path": "x"})
        assert reply.status_code == 400


async def test_a_tenant_sees_its_own_adapters_only(model_dir, folders, tmp_path):
    entries = [
        {"sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": name} | also
        for name, also in (("red", {"adapters": ["first"]}), ("blue", {}))
    ]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": entries}))
    given = {name: str(folder) for name, folder in folders.items()}
    keys = ServerConfig(api_key_file=str(tmp_path / "keys.json"))
    async with served(model_dir, LoraConfig(adapters=given), server=keys) as server:
        for tenant, names in (("red", ["first"]), ("blue", list(folders))):
            headers = {"authorization": f"Bearer {tenant}"}
            cards = (await server.http.get("/v1/models", headers=headers)).json()["data"]
            assert [card["id"] for card in cards] == ["base", *names]
            for name in folders:
                body = {"text": "x", "lora_path": name, "sampling_params": GREEDY}
                reply = await server.post("/generate", body, headers=headers)
                assert reply.status_code == (200 if name in names else 400)


@pytest.mark.slow
async def test_files_that_were_sent_stay_while_they_are_read(model_dir, folders, tmp_path):
    kept = ServerConfig(data_dir=str(tmp_path / "data"))
    config = json.loads((folders["first"] / "adapter_config.json").read_text())
    weights = (folders["first"] / WEIGHTS).read_bytes()
    spool = tmp_path / "data" / "adapters.json.adapters"

    def num_kept() -> int:
        return len(list(spool.iterdir()))

    async with served(model_dir, LoraConfig(), kept=kept) as server:
        sent = base64.b64encode(weights).decode()
        body = {"config_dict": config, "serialized_named_tensors": sent}

        async def send(name: str) -> None:
            reply = await server.post("/load_lora_adapter_from_tensors", body | {"lora_name": name})
            assert reply.status_code == 200, reply.text

        async def unload() -> None:
            await server.post("/unload_lora_adapter", {"lora_name": "streamed"})
            assert num_kept() == 1  # its request may need them

        for _ in range(3):
            await send("passing")
            await server.post("/unload_lora_adapter", {"lora_name": "passing"})
            assert num_kept() == 0
        await send("streamed")
        assert await server.long_text("streamed", 2500, unload)
        await send("next")
        assert num_kept() == 1
        (spool / "left").mkdir()  # by one that was killed
    async with served(model_dir, LoraConfig(), kept=kept) as server:
        assert num_kept() == 1
        assert await server.text("next")


@pytest.mark.parametrize("abort", [False, True])
async def test_a_stream_whose_adapter_is_unloaded(model_dir, folders, abort):
    lora = LoraConfig(adapters={"first": str(folders["first"])})
    async with served(model_dir, lora) as server:
        count = 12_000 if abort else 1500
        whole = "" if abort else await server.long_text("first", count)

        async def unload() -> None:
            gone = {"lora_name": "first", "abort_requests": abort}
            assert (await server.post("/unload_lora_adapter", gone)).status_code == 200

        if not abort:
            assert await server.long_text("first", count, unload) == whole
        else:
            with pytest.raises(CapacityError, match="unloaded"):
                await server.long_text("first", count, unload)
        late = await server.post("/generate", {"text": "x", "lora_path": "first"})
        assert late.status_code == 400


@pytest.mark.slow
async def test_adapters_are_back_after_the_scheduler_was_killed(model_dir, folders, tmp_path):
    """Those of the configuration, those loaded since, but not those unloaded; then a new start."""
    given = {name: str(folders[name]) for name in ("first", "second")}
    lora, kept = LoraConfig(adapters=given), ServerConfig(data_dir=str(tmp_path / "data"))
    async with served(model_dir, lora, "many", kept) as server:
        assert (await server.load("third", folders["third"])).status_code == 200
        await server.post("/unload_lora_adapter", {"lora_name": "first"})
        want = {name: await server.text(name) for name in ("second", "third")}
        whole = await server.long_text("third", 4000)

        async def kill() -> None:
            [pid] = [p for name, p in server.runtime.pids.items() if "scheduler" in name]
            os.kill(pid, signal.SIGKILL)

        assert await server.long_text("third", 4000, kill) == whole  # the next one continues it
        assert {name: await server.text(name) for name in want} == want
        gone = await server.post("/generate", {"text": "x", "lora_path": "first"})
        assert gone.status_code == 400

    async with served(model_dir, lora, "one", kept) as server:
        cards = (await server.http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["base", "second", "third"]
        assert {name: await server.text(name) for name in want} == want
