"""A real server whose weights change, and whose memory is given back, while it serves."""

from __future__ import annotations

import base64
import json
import pickle
import re
import socket
import threading
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import zmq
from safetensors.torch import save

from sylvan.runtime.executor.update_groups import broadcast, make_group
from tests.e2e.conftest import running
from tests.support.random_model import write_random_model
from tests.support.updates import changed, weights_in, write_changed

PROMPT = [5, 9, 150, 31]
SAMPLING = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
CONTEXT = 16384
KEY = {"authorization": "Bearer root"}


class Caller:
    """Speaks to one server as its operator."""

    def __init__(self, url: str) -> None:
        self.url = url

    def post(self, path: str, **body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=KEY, timeout=120)

    def done(self, path: str, **body: object) -> dict[str, object]:
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        reply = response.json()
        assert reply["success"] is True
        return reply

    def refused(self, path: str, **body: object) -> str:
        response = self.post(path, **body)
        assert response.status_code == 400, response.text
        reply = response.json()
        return reply["message"] if "message" in reply else reply["error"]["message"]

    def generate(self) -> dict:
        body = {"input_ids": PROMPT, "sampling_params": SAMPLING}
        return self.post("/generate", **body).json()

    def ids(self) -> list[int]:
        return self.generate()["output_ids"]


@pytest.fixture(scope="module")
def old_dir(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("old"), CONTEXT)


@pytest.fixture(scope="module")
def new_dir(tmp_path_factory, old_dir):
    return write_changed(old_dir, tmp_path_factory.mktemp("new"))


@pytest.fixture(scope="module")
def server(old_dir):
    flags = ("--server.admin-api-key", "root", "--weight-version", "v0")
    with running(str(old_dir), *flags) as server:
        yield Caller(server.url)


@pytest.fixture(scope="module")
def want(server, old_dir, new_dir):
    """Answers of the old weights, and of the new."""
    server.done("/update_weights_from_disk", model_path=str(new_dir))
    new = server.ids()
    server.done("/update_weights_from_disk", model_path=str(old_dir))
    old = server.ids()
    assert old != new
    return old, new


@pytest.fixture
def caller(server, old_dir, want):
    """Serves the old weights, whatever a test before has done."""
    server.done("/update_weights_from_disk", model_path=str(old_dir), weight_version="v0")
    return server


def encoded(weights) -> str:
    return base64.b64encode(save(weights)).decode()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.slow
def test_every_answer_tells_the_label_of_its_weights(caller, new_dir, want):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}

    def labels() -> list[str]:
        stream = caller.post("/v1/completions", prompt="a", max_tokens=3, stream=True).text
        chunks = [json.loads(x) for x in re.findall(r"data: (\{.*\})", stream)]
        chat = caller.post("/v1/chat/completions", **body, stream=True).text
        last = [json.loads(x) for x in re.findall(r"data: (\{.*\})", chat)][-1]
        return [
            caller.generate()["meta_info"]["weight_version"],
            caller.post("/v1/completions", prompt="a").json()["metadata"]["weight_version"],
            caller.post("/v1/chat/completions", **body).json()["metadata"]["weight_version"],
            *{chunk["metadata"]["weight_version"] for chunk in chunks},
            last["metadata"]["weight_version"],
            httpx.get(caller.url + "/model_info", timeout=60).json()["weight_version"],
        ]

    assert labels() == ["v0"] * 6
    reply = caller.done("/update_weights_from_disk", model_path=str(new_dir), weight_version="v1")
    assert reply["weight_version"] == "v1"
    assert labels() == ["v1"] * 6
    assert caller.done("/update_weight_version", new_version="v2")["new_version"] == "v2"
    assert labels() == ["v2"] * 6
    assert caller.ids() == want[1]


def test_tensors_in_a_body_and_in_shared_memory(caller, old_dir, new_dir, want):
    new, old = (weights_in(path) for path in (new_dir, old_dir))
    caller.done("/update_weights_from_tensor", serialized_named_tensors=[encoded(new)])
    assert caller.ids() == want[1]

    data = save(old)
    memory = SharedMemory(create=True, size=len(data))
    try:
        memory.buf[: len(data)] = data
        place = {"shared_memory": memory.name, "num_bytes": len(data)}
        caller.done("/update_weights_from_tensor", serialized_named_tensors=[place])
    finally:
        memory.close()
        memory.unlink()
    assert caller.ids() == want[0]


def test_several_calls_are_one_update(caller, new_dir, want):
    new = list(weights_in(new_dir).items())
    caller.done("/begin_weight_update", selector="all")
    for part in (new[:7], new[7:]):
        caller.done(
            "/update_weights_from_tensor",
            serialized_named_tensors=[encoded(dict(part))],
            weight_version="joined",
        )
        assert caller.ids() == want[0]
    caller.done("/end_weight_update")
    assert caller.ids() == want[1]
    assert caller.generate()["meta_info"]["weight_version"] == "joined"
    assert "no update was begun" in caller.refused("/end_weight_update")


def test_a_bad_part_spoils_the_whole_update(caller, new_dir, want):
    new = weights_in(new_dir)
    caller.done("/begin_weight_update")
    for part in (new, {"lm_head.weight": torch.zeros(3, 3)}):
        caller.done("/update_weights_from_tensor", serialized_named_tensors=[encoded(part)])

    assert "shape [3, 3]" in caller.refused("/end_weight_update")
    assert caller.ids() == want[0]


def test_a_trainer_in_another_process_broadcasts(caller, old_dir):
    new = changed(weights_in(old_dir), seed=11)
    port = free_port()

    def train() -> None:
        group = make_group("127.0.0.1", port, 0, 2, "trainer")
        for value in new.values():
            broadcast(group, value)

    trainer = threading.Thread(target=train)
    trainer.start()
    place = {"master_address": "127.0.0.1", "master_port": port, "group_name": "trainer"}
    caller.done("/init_weights_update_group", **place, rank_offset=1, world_size=2)
    caller.done(
        "/update_weights_from_distributed",
        names=list(new),
        dtypes=["float32"] * len(new),
        shapes=[list(value.shape) for value in new.values()],
        group_name="trainer",
    )
    trainer.join()
    caller.done("/destroy_weights_update_group", group_name="trainer")

    assert "was not joined" in caller.refused("/destroy_weights_update_group", group_name="trainer")
    found = caller.post("/get_weights_by_name", name="lm_head.weight", truncate_size=4).json()
    assert np.array_equal(np.float32(found), new["lm_head.weight"][:4].numpy())


def test_a_socket_of_this_machine(caller, new_dir, tmp_path, want):
    address = f"ipc://{tmp_path}/w"
    context = zmq.Context()
    giver = context.socket(zmq.REP)
    giver.bind(address)
    parts = [save(weights_in(new_dir)), b""]

    def give() -> None:
        for part in parts:
            giver.recv()
            giver.send(part)

    thread = threading.Thread(target=give)
    thread.start()
    caller.done("/update_weights_from_ipc", zmq_handles={"0": address})
    thread.join()
    giver.close()
    context.term()

    assert caller.ids() == want[1]


def test_weights_are_read_and_checked(caller, new_dir, want):
    new = weights_in(new_dir)
    before = caller.done("/weights_checker")["checksums"]
    part = {"model.norm.weight": new["model.norm.weight"]}
    caller.done("/update_weights_from_tensor", serialized_named_tensors=[encoded(part)])
    after = caller.done("/weights_checker", skip_tensor_list=["lm_head.weight"])["checksums"]

    assert {name for name in after if after[name] != before[name]} == {"norm.weight"}
    assert before.keys() - after.keys() == {"lm_head.weight"}
    query = {"name": "model.norm.weight", "truncate_size": "5"}
    found = httpx.get(
        caller.url + "/get_weights_by_name", params=query, headers=KEY, timeout=60
    ).json()
    assert np.array_equal(np.float32(found), new["model.norm.weight"][:5].numpy())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/update_weights_from_tensor", {}, "serialized_named_tensors"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": []}, "at least 1"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["%"]}, "is not base64"),
        (
            "/update_weights_from_tensor",
            {"serialized_named_tensors": [base64.b64encode(pickle.dumps({})).decode()]},
            "is a pickle",
        ),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["AA==", "AA=="]}, "1 rank"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["AA=="]}, "truncated"),
        (
            "/update_weights_from_tensor",
            {"serialized_named_tensors": ["AA=="], "load_format": "custom"},
            "load_format",
        ),
        (
            "/update_weights_from_tensor",
            {"serialized_named_tensors": ["AA=="], "selector": "draft"},
            "draft weights cannot be updated",
        ),
        (
            "/update_weights_from_tensor",
            {"serialized_named_tensors": [{"shared_memory": "../x", "num_bytes": 8}]},
            "not the name of shared memory",
        ),
        ("/update_weights_from_disk", {"model_path": "/no/such"}, "not a directory"),
        ("/update_weights_from_disk", {"model_path": "/tmp", "load_format": "x"}, "load_format"),
        ("/update_weights_from_ipc", {"zmq_handles": {}}, "0 entries, for 1 rank"),
        ("/update_weights_from_ipc", {"zmq_handles": {"0": "tcp://1.2.3.4:5"}}, "this machine"),
        (
            "/update_weights_from_distributed",
            {"names": ["a"], "dtypes": [], "shapes": [[1]]},
            "dtypes has 0 entries for 1 names",
        ),
        (
            "/update_weights_from_distributed",
            {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]},
            "was not joined",
        ),
        (
            "/init_weights_update_group",
            {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 0, "world_size": 3},
            "rank_offset 0 must be",
        ),
        ("/get_weights_by_name", {}, "name is missing"),
        ("/get_weights_by_name", {"name": "x"}, "no tensor 'x'"),
        ("/weights_checker", {"action": "reset_tensors"}, "action"),
        ("/release_memory_occupation", {"tags": ["gpu"]}, "tags"),
    ],
)
def test_bad_calls_say_what_is_wrong_and_change_nothing(caller, want, path, body, says):
    assert says in caller.refused(path, **body)
    assert caller.ids() == want[0]
    assert caller.generate()["meta_info"]["weight_version"] == "v0"


def test_these_routes_are_the_operators(caller):
    for path in ("/update_weights_from_disk", "/release_memory_occupation", "/weights_checker"):
        assert httpx.post(caller.url + path, json={}, timeout=60).status_code in (401, 403)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_updates_in_a_pause(caller, new_dir, want, mode):
    caller.post("/pause_generation", mode=mode)
    caller.done("/update_weights_from_disk", model_path=str(new_dir))
    waiting: list[list[int]] = []
    asking = threading.Thread(target=lambda: waiting.append(caller.ids()))
    asking.start()
    asking.join(0.5)
    assert waiting == []
    caller.post("/continue_generation")
    asking.join()

    assert waiting == [want[1]]


def test_keep_pause_waits_for_the_trainer(caller, new_dir, want):
    caller.done("/update_weights_from_disk", model_path=str(new_dir), keep_pause=True)
    waiting: list[list[int]] = []
    asking = threading.Thread(target=lambda: waiting.append(caller.ids()))
    asking.start()
    asking.join(0.5)
    assert waiting == []
    caller.post("/continue_generation")
    asking.join()

    assert waiting == [want[1]]


def test_a_refused_update_keeps_no_pause(caller, want):
    caller.refused("/update_weights_from_disk", model_path="/no/such", keep_pause=True)
    assert caller.ids() == want[0]


LONG = 8_000
"""Tokens: they take seconds, so that an update arrives before the last."""


def long_stream(caller: Caller, seen: threading.Event) -> dict:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {**SAMPLING, "max_new_tokens": LONG, "stream_interval": 50},
        "stream": True,
    }
    last = {}
    with httpx.stream(
        "POST", caller.url + "/generate", json=body, headers=KEY, timeout=120
    ) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                last = json.loads(line[6:])
                seen.set()
    return last


@pytest.mark.slow
def test_streams_survive_while_the_memory_is_away(caller, want):
    whole = long_stream(caller, threading.Event())["output_ids"]
    results: list[dict] = []
    seen = [threading.Event() for _ in range(4)]
    streams = [
        threading.Thread(target=lambda e=e: results.append(long_stream(caller, e))) for e in seen
    ]
    for stream in streams:
        stream.start()
    for event in seen:
        assert event.wait(60)
    released = caller.done("/release_memory_occupation", tags=["kv_cache", "weights"])
    assert "has been released" in caller.refused("/get_weights_by_name", name="lm_head.weight")
    assert caller.post("/continue_generation").status_code == 503
    resumed = caller.done("/resume_memory_occupation", tags=["kv_cache", "weights", "cuda_graph"])
    for stream in streams:
        stream.join()

    assert set(released["released"]) == {"kv_cache", "weights"}
    assert resumed["message"] == "The memory was resumed."
    assert [result["output_ids"] for result in results] == [whole] * 4


def test_a_stream_under_an_update_names_both_labels(caller, new_dir):
    seen = threading.Event()
    results: list[dict] = []
    stream = threading.Thread(target=lambda: results.append(long_stream(caller, seen)))
    stream.start()
    assert seen.wait(60)
    caller.done("/update_weights_from_disk", model_path=str(new_dir), weight_version="late")
    stream.join()

    meta = results[0]["meta_info"]
    assert len(results[0]["output_ids"]) == LONG
    assert meta["weight_versions"] == ["v0", "late"]
    assert meta["weight_version"] == "late"


def test_requests_may_be_ended_by_an_update(caller, new_dir, want):
    seen = threading.Event()
    results: list[dict] = []
    stream = threading.Thread(target=lambda: results.append(long_stream(caller, seen)))
    stream.start()
    assert seen.wait(60)
    caller.done("/update_weights_from_disk", model_path=str(new_dir), abort_all_requests=True)
    stream.join()

    assert "the weights were replaced" in json.dumps(results[0])
    assert caller.ids() == want[1]


def test_another_architecture_changes_nothing(caller, want, tmp_path: Path):
    other = write_changed(write_random_model(tmp_path, CONTEXT), tmp_path)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 500.0}))

    assert "rope" in caller.refused("/update_weights_from_disk", model_path=str(other))
    assert caller.ids() == want[0]
