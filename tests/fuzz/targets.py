"""Fuzz targets: functions of bytes, each with initial inputs and the errors that it may raise.

An input is a finding if it raises another error, takes longer than `MAX_S` of processor time, or
more memory than the runner allows.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sylvan.api.multipart import parse_form
from sylvan.api.strict_json import decode_json
from sylvan.api.validation import parse
from sylvan.checkpoints import headers
from sylvan.checkpoints.gguf import header as gguf
from sylvan.gateway.prefixes.events import read_batch
from sylvan.protocol.errors import ConfigError, ExecutorError, RequestError
from sylvan.protocol.journal import (
    FrameReader,
    JournalError,
    JournalTicket,
    ResumeFrom,
    read_head,
    read_totals,
)
from sylvan.protocol.messages import FromScheduler, ToScheduler
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.core.step import StepPlan
from sylvan.runtime.core.wire import StepCodec
from sylvan.runtime.features.disagg import messages as disagg
from sylvan.runtime.features.disagg.channel import ChannelError
from sylvan.runtime.features.grammar.counts import check_counts
from sylvan.runtime.features.grammar.spec import GrammarSpec, check_limits
from sylvan.runtime.models.config import architecture_of, common_fields, make_config, read_config
from sylvan.runtime.models.lora_config import parse_config
from sylvan.runtime.server.batches.lines import read_lines
from sylvan.runtime.server.routes import ENDPOINTS
from sylvan.runtime.server.schema_formats import unknown_formats
from sylvan.runtime.storage.manifest import GroupLayout, decode_manifest
from sylvan.runtime.storage.record import RecordError, check_record
from sylvan.text.chat_template import ChatRequest, ChatTemplate
from sylvan.text.parsers import make_parsers
from sylvan.text.patterns.compile import PatternError
from sylvan.text.patterns.search import PatternSearch, automaton_of
from sylvan.text.tokenizer import Tokenizer
from sylvan.transport.api import MessageError
from sylvan.transport.codec import MessageDecoder, MessageEncoder
from tests.integration.test_http_chaos import GOOD
from tests.support.scripted import write_checkpoint
from tests.support.tiny import MODEL

MAX_S = 5.0
"""Processor time of one input; they are small."""


@dataclass(frozen=True, slots=True)
class Target:
    """One of them.

    Attributes:
        name: For the command line, and the folder of its corpus.
        run: Raises for what it finds.
        seeds: Makes inputs to begin from.
        allowed: Errors that report an invalid input.
    """

    name: str
    run: Callable[[bytes], object]
    seeds: Callable[[], Sequence[bytes]]
    allowed: tuple[type[BaseException], ...]

    def try_(self, data: bytes) -> None:
        """Run one input; an error that is not allowed passes through."""
        with contextlib.suppress(*self.allowed):
            self.run(data)


@functools.cache
def _scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="sylvan-fuzz-"))


def _bodies() -> list[tuple[str, Any]]:
    return sorted((e.path, e.body) for e in ENDPOINTS if e.body is not None and e.path in GOOD)


def run_body(data: bytes) -> None:
    """The body of a route, which the first line names."""
    path, _, text = data.partition(b"\n")
    models = dict(_bodies())
    model = models.get(path.decode("latin-1"), models["/generate"])
    decoded = decode_json(text)
    unknown_formats(decoded)
    parse(model, decoded)


def body_seeds() -> list[bytes]:
    return [path.encode() + b"\n" + json.dumps(GOOD[path]).encode() for path, _ in _bodies()]


def run_gguf(data: bytes) -> None:
    file = _scratch() / "model.gguf"
    file.write_bytes(data)
    gguf.read_header(file)


def gguf_seeds() -> list[bytes]:
    """As the writer of the GGUF project makes them; metadata of every kind."""
    import gguf as library

    file = _scratch() / "seed.gguf"
    out = library.GGUFWriter(file, "llama")
    out.add_name("x")
    out.add_block_count(1)
    out.add_float32("a.float", 0.5)
    out.add_bool("a.flag", val=True)
    out.add_array("a.words", ["x", "yy"])
    out.add_array("a.numbers", [1, 2, 3])
    out.add_tensor("blk.0.attn_q.weight", np.zeros((4, 32), np.float32))
    out.add_tensor("token_embd.weight", np.zeros((4, 32), np.float16))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return [file.read_bytes()]


def run_safetensors(data: bytes) -> None:
    headers.read_header_of(memoryview(data), "x")
    file = _scratch() / "model.safetensors"
    file.write_bytes(data)
    headers.read_header(file)


def safetensors_seeds() -> list[bytes]:
    from safetensors.numpy import save

    return [save({"a": np.zeros((2, 3), np.float32), "b": np.ones(4, np.int8)}, {"format": "pt"})]


def run_safetensors_json(data: bytes) -> None:
    """The header's text alone, with the right length before it."""
    run_safetensors(len(data).to_bytes(8, "little") + data)


def safetensors_json_seeds() -> list[bytes]:
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    return [json.dumps({"a": entry, "__metadata__": {"format": "pt"}}).encode()]


def run_config(data: bytes) -> None:
    (_scratch() / "config.json").write_bytes(data)
    raw = read_config(_scratch())
    architecture_of(raw)
    make_config(common_fields(raw))


def config_seeds() -> list[bytes]:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    return [json.dumps(each).encode() for each in (MODEL, {**MODEL, "rope_scaling": rope})]


@functools.cache
def _checkpoint() -> Path:
    return write_checkpoint(_scratch() / "checkpoint")


def run_tokenizer(data: bytes) -> None:
    """`tokenizer_config.json` and `tokenizer.json`, which a line without text parts."""
    config, _, model = data.partition(b"\n\n")
    folder = _scratch() / "tokenizer"
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer_config.json").write_bytes(config)
    (folder / "tokenizer.json").write_bytes(model)
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("Hello <|im_start|> wörld")
    tokenizer.decode(ids)


def tokenizer_seeds() -> list[bytes]:
    config = _checkpoint() / "tokenizer_config.json"
    model = json.dumps(json.loads((_checkpoint() / "tokenizer.json").read_text()))
    return [config.read_bytes().replace(b"\n\n", b"\n") + b"\n\n" + model.encode()]


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.load(_checkpoint())


def run_template(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    file = _scratch() / "template.jinja"
    file.write_text(text)
    tokenizer = Tokenizer.load(_checkpoint(), chat_template=str(file))
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    ]
    ChatTemplate(tokenizer).render(ChatRequest(messages=messages, tools=[_TOOL]))


_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def template_seeds() -> list[bytes]:
    return [
        b"{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
        b"{%- macro f(x) -%}{{ x | tojson(indent=2) }}{%- endmacro -%}{% for t in tools %}"
        b"{{ f(t.function) }}{% endfor %}{% set ns = namespace(a=0) %}{{ ns.a + 1 }}",
        b"{{ raise_exception('no') if messages[0].role == 'x' else messages[-1]['content'] }}"
        b"{{ strftime_now('%Y') }}{{ 'x' * 3 }}{{ range(5) | list | join(',') }}",
    ]


def run_pattern(data: bytes) -> None:
    """A stop pattern, in the first line, looked for in the rest, whole and by characters."""
    pattern, _, text = data.decode("utf-8", "replace").partition("\n")
    PatternSearch(automaton_of(pattern)).push(text)
    search = PatternSearch(automaton_of(pattern))
    for char in text:
        if search.push(char) is not None:
            break


def pattern_seeds() -> list[bytes]:
    return [
        b"(a|b)*c\nabababc",
        rb"(?i)\bword\b[^x-z]{2,3}" + b"\nsome Word 12",
        rb"(?<=\n)#+\s" + b"\n# a\n## b",
        rb"(?s)x.*?\d+$" + b"\nx\n12",
    ]


def run_grammar(data: bytes) -> None:
    """The checks of a grammar before any library sees it; the first line is its kind."""
    kind, _, text = data.decode("utf-8", "replace").partition("\n")
    kinds = ("json_schema", "regex", "ebnf", "structural_tag", "choice")
    spec = GrammarSpec(kind if kind in kinds else "json_schema", text)  # type: ignore[arg-type]
    check_limits(spec)
    check_counts(spec)


def grammar_seeds() -> list[bytes]:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^x{2,5}$"}, "b": {"$ref": "#/$defs/c"}},
        "$defs": {"c": {"anyOf": [{"type": "integer", "maximum": 5}, {"enum": ["x", None]}]}},
        "additionalProperties": False,
    }
    return [
        b"json_schema\n" + json.dumps(schema).encode(),
        b"regex\n[a-z]{1,9}(x|yy)*",
        b'ebnf\nroot ::= "a" | b{2,3}\nb ::= [x-z]+',
        b'choice\n["a", "b"]',
    ]


def _decoding(kind: object) -> Callable[[bytes], object]:
    decoder: MessageDecoder[Any] = MessageDecoder(kind)
    return decoder.decode


def message_seeds() -> list[bytes]:
    from sylvan.protocol import messages

    ids = np.arange(3, dtype=np.int32)
    sampling = SamplingParams(stop=("x",), json_schema='{"type": "object"}')
    request = GenerateRequest(rid="r", input_ids=ids, output_ids=ids, sampling=sampling)
    found = (
        messages.Submit(request=request),
        messages.Params(slot=1, sampling=sampling),
        messages.Abort(rid="r"),
        messages.StopFound(rid="r", num_tokens=3, matched="x"),
        messages.Control(id=1, command=messages.FlushCache()),
    )
    return [MessageEncoder().encode(each) for each in found]


def answer_seeds() -> list[bytes]:
    from sylvan.protocol import messages

    found = (
        messages.Heartbeat(load=messages.SchedulerLoad()),
        messages.Ready(facts={"vocab_size": 5, "model": "x"}),
        messages.StartFailed(message="no"),
        messages.Loading(done=1, total=2),
    )
    return [MessageEncoder().encode(each) for each in found]


def run_plan(data: bytes) -> None:
    codec = StepCodec({}, {})
    for read in (codec.plan, codec.result, codec.command, codec.answer):
        with contextlib.suppress(ExecutorError):
            read(data)


def plan_seeds() -> list[bytes]:
    plan = StepPlan(
        num_slices=1,
        num_tokens=2,
        num_samples=1,
        num_in_flight=0,
        numbers=np.arange(6, dtype=np.int32),
        pages=np.zeros((4, 1), np.int32),
    )
    return [StepCodec({}, {}).encode(plan)]


def run_frames(data: bytes) -> None:
    """Frames of a gateway's call, whole and byte by byte."""

    def frames(pieces: Iterator[bytes]) -> list[Any] | None:
        reader, found = FrameReader(), list[Any]()
        try:
            for piece in pieces:
                found += reader.feed(piece)
        except JournalError:
            return None
        return found

    whole = frames(iter([data]))
    apart = frames(data[i : i + 1] for i in range(len(data)))
    if whole is not None:
        assert whole == apart, "frames depend on how their bytes arrive"
    for frame in whole or ():
        for read in (read_head, read_totals):
            with contextlib.suppress(JournalError):
                read(frame)


def frame_seeds() -> list[bytes]:
    from sylvan.protocol.journal import FrameKind, JournalFrame, ResponseHead, Totals

    head = msgspec.msgpack.encode(ResponseHead(200, (("a", "b"),)))
    end = msgspec.msgpack.encode(Totals(1, 2, 3))
    kinds = ((FrameKind.HEAD, head), (FrameKind.DATA, b"abc"), (FrameKind.END, end))
    return [b"".join(JournalFrame(kind, body, b"").encode() for kind, body in kinds)]


def run_ticket(data: bytes) -> None:
    """The gateway's headers of a call: the ticket, and the progress of its client."""
    with contextlib.suppress(JournalError):
        ResumeFrom.decode(data)
    with contextlib.suppress(JournalError):
        JournalTicket.from_header(data.decode("latin-1"))
    JournalTicket.from_header(base64.urlsafe_b64encode(data[:4096]).decode())


def ticket_seeds() -> list[bytes]:
    ticket = JournalTicket(name="x", seed=1, created=1.5, tenant="t")
    return [ResumeFrom((b"a", b"bc"), 2).encode(), msgspec.json.encode(ticket)]


def run_form(data: bytes) -> None:
    """A form with a file, and the file as a batch of requests."""
    form = parse_form("multipart/form-data; boundary=b", data)
    for part in form.values():
        read_lines(part.content, "/v1/completions")


def form_seeds() -> list[bytes]:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    return [head + json.dumps(line).encode() + b"\n" + b"\r\n--b--\r\n"]


def run_kv_page(data: bytes) -> None:
    """A page of a store of KV, and the manifest that a store is bound to."""
    with contextlib.suppress(RecordError):
        check_record("kv-x", data, None)
    decode_manifest(data)


def manifest_seeds() -> list[bytes]:
    texts = ("version", "weights", "tokenizer", "dtype", "quantization", "kv_dtype", "runner")
    fields = dict.fromkeys((*texts, "attention"), "x") | {"context_len": 64, "page_size": 16}
    group = dict.fromkeys(GroupLayout.__struct_fields__, 16) | {"name": "full"}
    return [msgspec.json.encode({**fields, "groups": [group]})]


def run_adapter(data: bytes) -> None:
    """`adapter_config.json` of a LoRA adapter."""
    parse_config(data, "x")


def adapter_seeds() -> list[bytes]:
    fields = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    more = {"alpha_pattern": {"layers.*.q": 2.0}, "rank_pattern": {"^x$": 4}, "use_rslora": True}
    return [json.dumps(each).encode() for each in (fields, {**fields, **more})]


def event_seeds() -> list[bytes]:
    """As vLLM writes them: a time, and events as arrays that begin with their kind."""
    stored = ["BlockStored", [b"a" * 8], None, [1, 2, 3], 3, None]
    return [msgspec.msgpack.encode([1.5, [stored, ["BlockRemoved", [7]], ["AllBlocksCleared"]], 0])]


def handover_seeds() -> list[bytes]:
    return [
        disagg.encode(disagg.Done()),
        disagg.encode(disagg.Failed("x")),
    ]


def run_rpc(data: bytes) -> None:
    """A request to the scheduler service over gRPC."""
    from google.protobuf.message import DecodeError

    from sylvan.rpc import scheduler_pb2 as pb
    from sylvan.runtime.server.grpc.requests import embed_input, generate_input

    parsers = make_parsers(_tokenizer(), reasoning_parser=None, tool_parser=None, architecture=None)
    with contextlib.suppress(DecodeError, RequestError):
        generate_input(pb.GenerateRequest.FromString(data), "", None, parsers)
    with contextlib.suppress(DecodeError):
        embed_input(pb.EmbedRequest.FromString(data), "", None)


def rpc_seeds() -> list[bytes]:
    from sylvan.rpc import scheduler_pb2 as pb

    message = pb.GenerateRequest(request_id="r", stream=True)
    message.tokenized.input_ids.extend([1, 2, 3])
    message.sampling_params.temperature = 0.5
    message.sampling_params.stop.append("x")
    message.sampling_params.json_schema = "{}"
    message.thinking.ends.add().ids.extend([5])
    message.emitted.add(finish_reason="stop")
    return [message.SerializeToString()]


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("body", run_body, body_seeds, (RequestError,)),
        Target("gguf", run_gguf, gguf_seeds, (ConfigError,)),
        Target("safetensors", run_safetensors, safetensors_seeds, (ConfigError,)),
        Target("safetensors-json", run_safetensors_json, safetensors_json_seeds, (ConfigError,)),
        Target("config", run_config, config_seeds, (ConfigError,)),
        Target("tokenizer", run_tokenizer, tokenizer_seeds, (ConfigError,)),
        Target("template", run_template, template_seeds, (ConfigError, RequestError)),
        Target("pattern", run_pattern, pattern_seeds, (PatternError,)),
        Target("grammar", run_grammar, grammar_seeds, (RequestError,)),
        Target("to-scheduler", _decoding(ToScheduler), message_seeds, (MessageError,)),
        Target("from-scheduler", _decoding(FromScheduler), answer_seeds, (MessageError,)),
        Target("plan", run_plan, plan_seeds, ()),
        Target("frames", run_frames, frame_seeds, ()),
        Target("rpc", run_rpc, rpc_seeds, (RequestError,)),
        Target("ticket", run_ticket, ticket_seeds, (JournalError,)),
        Target("form", run_form, form_seeds, (RequestError,)),
        Target("kv-page", run_kv_page, manifest_seeds, (ConfigError,)),
        Target("adapter", run_adapter, adapter_seeds, (ConfigError,)),
        Target("cache-events", read_batch, event_seeds, (ValueError,)),
        Target("handover", disagg.decode, handover_seeds, (ChannelError,)),
    )
}
