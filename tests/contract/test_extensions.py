"""Ways to extend Sylvan, each by a small example: `docs/extend/index.md` quotes them from here."""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest
import torch
from starlette.responses import Response

from sylvan.api.validation import WireModel
from sylvan.gateway import policies as routing
from sylvan.gateway.policies.api import Placement, PolicyParts, RoutingPolicy, RoutingRequest
from sylvan.gateway.workers.worker import Worker
from sylvan.kernels import registry as kernel_registry
from sylvan.kernels.matmul.weights import CodedWeight
from sylvan.kernels.registry import KernelRegistry
from sylvan.protocol.errors import RequestError
from sylvan.runtime.cache import eviction
from sylvan.runtime.cache.types import Node
from sylvan.runtime.core.req import Req
from sylvan.runtime.features.grammar import backends as grammar_backends
from sylvan.runtime.features.grammar.api import CompiledGrammar
from sylvan.runtime.features.grammar.backends.llguidance import LLGuidance
from sylvan.runtime.features.grammar.libraries import make_backend
from sylvan.runtime.features.grammar.spec import GrammarSpec
from sylvan.runtime.models import formats
from sylvan.runtime.models.formats.stored import Tensors, check_scales, of_integers
from sylvan.runtime.platform.facts import PlatformFacts
from sylvan.runtime.platform.find import GROUP as PLATFORMS
from sylvan.runtime.platform.find import load_kinds, open_platform
from sylvan.runtime.sched import policies
from sylvan.runtime.sched.policies import schedule_policy
from sylvan.runtime.sched.policies.api import PolicyContext, SchedulePolicy
from sylvan.runtime.server import app
from sylvan.runtime.server.endpoint import Call, Endpoint, json_response
from sylvan.runtime.storage.api import Buffer, StoredPage, StoreKind, StoreLimits, spread
from sylvan.runtime.storage.find import GROUP as STORES
from sylvan.runtime.storage.find import store_kind
from sylvan.text.reasoning import ReasoningFamily, make_parser
from sylvan.text.tools import ToolFamily, ToolParser, ToolSpec, parse
from sylvan.text.tools.objects import ObjectGrammar
from sylvan.text.tools.parser import ParsedTools
from sylvan.utils.clock import VirtualClock
from tests.contract import kernel_specs
from tests.support.gateway import make_policy, make_worker
from tests.support.grammar import vocabulary
from tests.support.http import Client, checkpoint, engine
from tests.support.kv import request

ROOT = Path(__file__).parents[2]
__all__ = ["checkpoint", "engine"]


# ---- a scheduling policy: src/sylvan/runtime/sched/policies/shortest_answer.py


class ShortestAnswer:
    """Requests that want the fewest tokens go first."""

    def order(self, waiting: Sequence[Req]) -> Sequence[Req]:
        return sorted(waiting, key=lambda req: req.max_tokens - req.prompt_len)


def build(context: PolicyContext) -> SchedulePolicy:
    return ShortestAnswer()


def test_a_policy_is_a_module_of_its_package(monkeypatch, tmp_path):
    add_module(monkeypatch, tmp_path, policies, "shortest_answer", "build")

    policy = schedule_policy("shortest-answer")(PolicyContext(cached_tokens=lambda req: 0))

    long, short = wanting(90), wanting(3)
    assert list(policy.order([long, short])) == [short, long]


def wanting(tokens):
    return Req(request(str(tokens), [1, 2, 3], new=tokens))


# ---- an eviction policy: src/sylvan/runtime/cache/eviction/longest.py


def key(node: Node) -> tuple[int, ...]:
    """Evict long leaves first: fewer evictions, at the cost of long prompts."""
    return (-len(node.tokens), node.last_used)


def test_an_eviction_policy_is_a_module_of_its_package(monkeypatch, tmp_path):
    add_module(monkeypatch, tmp_path, eviction, "longest", "key")
    leaves = [
        Node(np.arange(count), np.arange(count), None, last_used=used)
        for count, used in ((3, 1), (9, 2), (9, 1))
    ]

    rank = eviction.eviction_policy("longest")

    assert sorted(leaves, key=rank) == [leaves[2], leaves[1], leaves[0]]


# ---- a routing policy: src/sylvan/gateway/policies/fewest.py


class FewestTokens(RoutingPolicy):
    """Selects the worker with the fewest queued prompt tokens."""

    def select(self, workers: Sequence[Worker], request: RoutingRequest) -> Placement:
        worker = min(workers, key=lambda each: each.queued_tokens)
        return Placement(worker, request.num_tokens)


def create(parts: PolicyParts) -> FewestTokens:
    return FewestTokens()


def test_a_routing_policy_is_a_module_of_its_package(monkeypatch, tmp_path):
    add_module(monkeypatch, tmp_path, routing, "fewest", "create")
    clock = VirtualClock()
    busy, idle = make_worker(0, clock), make_worker(1, clock)
    busy.queued_tokens = 100

    policy = make_policy("fewest", clock=clock)

    assert policy.select([busy, idle], RoutingRequest(prompt=b"x" * 8)).worker is idle


# ---- an endpoint: a handler, and a line in a table of src/sylvan/runtime/server/routes/


class CountBody(WireModel):
    text: str


async def count_words(call: Call[CountBody]) -> Response:
    """How many words and tokens a text has."""
    ids = await call.context.engine.tokenize(call.body.text)
    return json_response({"words": len(call.body.text.split()), "tokens": len(ids)})


COUNT = Endpoint(path="/count_words", handler=count_words, body=CountBody)


async def test_an_endpoint_is_a_line_in_a_table(monkeypatch, engine):
    monkeypatch.setattr(app, "ENDPOINTS", (*app.ENDPOINTS, COUNT))
    client = Client(engine)

    answer: httpx.Response = await client.post("/count_words", {"text": "two words"})
    refused = await client.post("/count_words", {"text": 3})

    assert answer.json() == {"words": 2, "tokens": 9}  # the scripted model reads characters
    assert refused.status_code == 400
    assert "text" in refused.text


# ---- a parser of tool calls: a line in src/sylvan/text/tools/families.py

SQUARE = ToolFamily(name="square", grammar=ObjectGrammar(opens=("[CALL]",), closers=("[/CALL]",)))


def test_a_tool_parser_is_a_grammar_with_a_name():
    text = 'Let me look. [CALL]{"name": "weather", "arguments": {"city": "Rome"}}[/CALL]'
    tools = [ToolSpec("weather")]

    whole = parse(text, SQUARE.grammar, tools)
    for size in (1, 3, 7):  # however the text is cut
        parser, cut = ToolParser(SQUARE.grammar, tools), ParsedTools()
        for start in range(0, len(text), size):
            cut.add(parser.feed(text[start : start + size]))
        cut.add(parser.finish())
        assert cut == whole
    assert [(call.name, call.arguments) for call in whole.calls] == [
        ("weather", '{"city": "Rome"}')
    ]


# ---- a parser of thinking: a line in src/sylvan/text/reasoning/families.py

MUSING = ReasoningFamily(name="musing", starts=("<musing>",), ends=("</musing>",))


def test_a_reasoning_parser_is_two_markers_with_a_name():
    parser = make_parser(MUSING, start_in_reasoning=False)
    pieces = [parser.feed(piece) for piece in ("<mus", "ing>Hm.</mus", "ing>Four")]

    thinking, answer = zip(*pieces, parser.finish(), strict=True)
    assert ("".join(thinking), "".join(answer)) == ("Hm.", "Four")


# ---- a grammar backend: src/sylvan/runtime/features/grammar/backends/cautious.py


class Cautious(LLGuidance):
    """llguidance without regular expressions, which a site may not want to offer."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        if spec.kind == "regex":
            raise RequestError("regex is not offered here; use json_schema or choice")
        return super().compile(spec)


BACKEND = Cautious


def test_a_grammar_backend_is_a_module_of_its_package(monkeypatch, tmp_path):
    add_module(monkeypatch, tmp_path, grammar_backends, "cautious", "BACKEND")
    backend = make_backend("cautious", vocabulary())

    matcher = backend.compile(GrammarSpec("choice", '["yes", "no"]')).matcher()

    assert matcher.forced() == b""  # y and n are both possible
    with pytest.raises(RequestError, match="not offered"):
        backend.compile(GrammarSpec("regex", "a+"))


# ---- a format of weights: a function in METHODS of src/sylvan/runtime/models/formats/


class PlainInt8:
    """`NAME.weight` int8 (N, K) with `NAME.weight_scale` (N, 1): w = weight * scale."""

    name, bits, mixes = "plain int8", 8, False

    def parts_of(self, name: str, there: Collection[str]) -> tuple[str, ...]:
        scale = f"{name}_scale"
        return (name, scale) if scale in there else (name,)

    def read(self, name: str, parts: Sequence[str], tensor: Tensors) -> CodedWeight:
        weight, scale = tensor(parts[0]), check_scales(parts[1], tensor(parts[1]))
        levels = (weight.to(torch.int16) + 128).to(torch.uint8)
        return of_integers(levels, scale, None, 8, group=0)

    def idle(self, name: str, tensor: Tensors) -> bool:
        return False


def plain_int8(settings: Mapping[str, Any]) -> PlainInt8:
    return PlainInt8()


def test_a_weight_format_is_a_function_by_its_method(monkeypatch):
    monkeypatch.setattr(formats, "METHODS", {**formats.METHODS, "plain-int8": plain_int8})
    given = {
        "q.weight": torch.tensor([[-128, 0, 5, 127]], dtype=torch.int8),
        "q.weight_scale": torch.tensor([[0.5]]),
    }

    found = formats.stored_format({"quantization_config": {"quant_method": "plain-int8"}})
    parts = found.parts_of("q.weight", given.keys())
    matrix = found.read("q.weight", parts, given.__getitem__)

    assert found.parts_of("norm.weight", given.keys()) == ("norm.weight",)
    assert matrix.numbers().tolist() == [[-64.0, 0.0, 2.5, 63.5]]


# ---- a store of KV pages: an entry point of the group sylvan.kv_stores


class DictStore:
    """Keeps pages in a dictionary: the least that a store can be."""

    def __init__(self) -> None:
        self._manifest: bytes | None = None
        self._records: OrderedDict[str, bytes] = OrderedDict()

    def read_manifest(self) -> bytes | None:
        return self._manifest

    def write_manifest(self, manifest: bytes) -> bytes:
        self._manifest = self._manifest or manifest
        return self._manifest

    def contains(self, names: Sequence[str]) -> Sequence[bool]:
        return [name in self._records for name in names]

    def read(self, name: str) -> bytes | None:
        return self._records.get(name)

    def read_into(self, name: str, parts: Sequence[Buffer]) -> int | None:
        return spread(self.read(name), parts)

    def write(self, name: str, record: bytes) -> None:
        self._records[name] = record

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._records.pop(name, None)

    def pages(self) -> Iterator[StoredPage]:
        return (StoredPage(name, len(record)) for name, record in [*self._records.items()])

    def sweep(self) -> int:
        return 0

    def clear(self) -> None:
        self._records.clear()
        self._manifest = None

    def close(self) -> None:
        pass


STORE = StoreKind(open=lambda url, limits: DictStore())


def test_a_store_is_an_entry_point():
    entry = EntryPoint("dict", f"{__name__}:STORE", STORES)
    store = store_kind("dict:here", [entry]).open("dict:here", StoreLimits())

    store.write("a" * 16, b"page")
    assert store.contains(["a" * 16, "b"]) == [True, False]
    buffer = bytearray(2)
    assert store.read_into("a" * 16, [buffer]) == 4
    assert bytes(buffer) == b"pa"
    assert [page.num_bytes for page in store.pages()] == [4]
    assert store.write_manifest(b"m") == store.write_manifest(b"other") == b"m"
    store.clear()
    assert (store.read("a" * 16), store.read_manifest()) == (None, None)


# ---- a kind of device: an entry point of the group sylvan.platforms


class NewKind:
    """A device that PyTorch knows, here the CPU under another name."""

    facts: ClassVar = PlatformFacts(
        name="new",
        device_type="cpu",
        attention=("torch", "reference"),
        runners=("eager",),
        dtypes=frozenset({"float32", "bfloat16"}),
        streams=False,
        opener="sylvan.runtime.platform.host:open_host",
    )

    def problem(self) -> str | None:
        return None

    def memory(self) -> tuple[int, int] | None:
        return None


KIND = NewKind()


def test_a_platform_is_an_entry_point():
    entry = EntryPoint("new", f"{__name__}:KIND", PLATFORMS)

    platform = open_platform(load_kinds([entry])["new"])

    assert platform.facts.name == "new"
    assert platform.memory().total > 0


# ---- kernels of another package: tests/contract/kernel_specs.py


def test_kernels_of_another_package_come_first():
    value = f"{kernel_specs.__name__}:KERNELS"

    found = KernelRegistry([EntryPoint("mine", value, kernel_registry.GROUP)])

    mine, own = found.of("norm.rms_norm", "cuda")
    assert (mine, own.backend) == (kernel_specs.KERNELS[0], "triton")
    assert mine.fits("cuda", "bfloat16", "sm_90")
    assert not mine.fits("cuda", "bfloat16", "sm_80")
    assert not mine.fits("cuda", "float16", "sm_90")


# ---- the page


def test_the_page_quotes_code_that_is_tested():
    page = (ROOT / "docs/extend/index.md").read_text()
    places = (
        "tests/contract/test_extensions.py",
        "tests/contract/kernel_specs.py",
        "tests/unit/runtime/models/test_plugin.py",
    )
    tested = "\n".join((ROOT / place).read_text() for place in places)
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)

    assert [block for block in blocks if block.strip() not in tested] == []
    assert len(blocks) == 12


def test_the_page_about_kernels_shows_an_op_that_is_compiled():
    page = (ROOT / "docs/howto/add-a-kernel.md").read_text()
    folder = ROOT / "src/sylvan/kernels"
    ops = (folder / "native/opset/rows.py").read_text()
    sources = "\n".join(path.read_text() for path in folder.glob("*/*.cpp"))
    (op,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (kernel,) = re.findall(r"```cpp\n(.*?)\n\n.*?```", page, re.DOTALL)

    assert fields_of(op) <= fields_of(ops)
    assert kernel.strip() in sources


def fields_of(text):
    return {line.strip() for line in text.splitlines() if re.match(r"\s+\w+: |class ", line)}


def add_module(monkeypatch, tmp_path, package, name, content):
    """As if the package had one more file, which holds something of this module."""
    (tmp_path / f"{name}.py").write_text(f"from {__name__} import {content}\n")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, f"{package.__name__}.{name}", raising=False)
