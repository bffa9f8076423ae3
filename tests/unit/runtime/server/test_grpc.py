"""The scheduler service over gRPC, over a real connection and a scripted engine."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from sylvan.config.values import Secret
from sylvan.protocol.journal import KEY_HEADER
from sylvan.protocol.messages import Finish
from sylvan.protocol.requests import ThinkingOptions
from sylvan.rpc import common_pb2 as common
from sylvan.rpc import scheduler_pb2 as pb
from sylvan.runtime.server.grpc.server import SERVICE
from sylvan.text.tokenizer import Tokenizer
from tests.support.cluster import until
from tests.support.grpc_client import grpc_served
from tests.support.scripted import write_checkpoint

Code = grpc.StatusCode


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("scripted"))


@pytest.fixture
async def server(folder):
    async with grpc_served(folder) as made:
        yield made


def ids(folder, text):
    return Tokenizer.load(folder).encode(text)


def request(folder, text="abc", rid="r1", **changes):
    sampling = changes.pop("sampling", pb.SamplingParams(max_new_tokens=64))
    return pb.GenerateRequest(
        request_id=rid,
        tokenized=pb.TokenizedInput(input_ids=ids(folder, text)),
        sampling_params=sampling,
        **{"stream": True, "logprob_start_len": -1, **changes},
    )


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_chunks_bring_new_ids_and_the_end_brings_all(server, folder):
    *chunks, last = await server.all(request(folder))

    assert {r.request_id for r in (*chunks, last)} == {"r1"}
    new = [i for r in chunks for i in r.chunk.token_ids]
    assert new == list(last.complete.output_ids)
    assert new[:3] == ids(folder, "abc")
    so_far = 0
    for reply in chunks:
        so_far += len(reply.chunk.token_ids)
        assert reply.chunk.completion_tokens == so_far
    end = last.complete
    assert (end.finish_reason, end.prompt_tokens) == ("stop", 3)
    assert end.completion_tokens == len(new)


async def test_without_a_stream_there_are_only_ends(server, folder):
    sampling = pb.SamplingParams(max_new_tokens=64, n=2)
    replies = await server.all(request(folder, stream=False, sampling=sampling))
    assert [r.WhichOneof("response") for r in replies] == ["complete", "complete"]
    assert sorted(r.complete.index for r in replies) == [0, 1]


async def test_a_stop_says_what_matched(server, folder):
    sampling = pb.SamplingParams(max_new_tokens=64, stop=["b"])
    last = (await server.all(request(folder, sampling=sampling)))[-1].complete
    assert last.finish_reason == "stop"
    assert last.matched_stop_str == "b"


async def test_a_length_is_named(server, folder):
    sampling = pb.SamplingParams(max_new_tokens=2)
    last = (await server.all(request(folder, sampling=sampling)))[-1].complete
    assert (last.finish_reason, len(last.output_ids)) == ("length", 2)
    assert last.WhichOneof("matched_stop") is None


async def test_log_probabilities_are_passed_on(server, folder):
    asked = request(
        folder,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        token_ids_logprob=[5, 6],
    )
    *chunks, last = await server.all(asked)
    outputs = last.complete.output_logprobs
    assert list(outputs.token_ids) == list(last.complete.output_ids)
    assert len(outputs.token_logprobs) == len(outputs.top_logprobs) == len(outputs.token_ids)
    assert all(len(row.values) == len(row.token_ids) == 2 for row in outputs.top_logprobs)
    assert all(list(row.token_ids) == [5, 6] for row in outputs.token_ids_logprobs)
    inputs = last.complete.input_logprobs
    assert list(inputs.token_ids) == ids(folder, "abc")
    assert not inputs.token_logprobs[0].HasField("value")
    assert inputs.token_logprobs[1].HasField("value")
    streamed = [v for r in chunks for v in r.chunk.output_logprobs.token_logprobs]
    assert streamed == list(outputs.token_logprobs)


async def test_parameters_arrive(server, folder):
    custom = Struct()
    custom.update({"a": 1.0})
    sampling = pb.SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.25,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        max_new_tokens=9,
        min_new_tokens=2,
        stop=["x"],
        stop_token_ids=[3],
        ignore_eos=True,
        no_stop_trim=True,
        stream_interval=4,
        logit_bias={"5": -1.0},
        custom_params=custom,
        json_schema='{"type": "object"}',
    )
    await server.all(request(folder, sampling=sampling))
    [got] = server.engine.control.requests
    taken = got.sampling
    assert (taken.temperature, taken.top_k, taken.min_p) == (0.5, 7, 0.25)
    assert taken.top_p == pytest.approx(0.9)
    assert (taken.frequency_penalty, taken.presence_penalty) == (0.5, -0.5)
    assert (taken.repetition_penalty, taken.max_new_tokens, taken.min_new_tokens) == (1.5, 9, 2)
    assert (taken.stop, taken.stop_token_ids, taken.ignore_eos) == (("x",), (3,), True)
    assert (taken.no_stop_trim, taken.stream_interval, taken.logit_bias) == (True, 4, {"5": -1.0})
    assert taken.json_schema == '{"type": "object"}'
    assert taken.custom_params == {"a": 1.0}


async def test_zero_is_not_given_where_it_is_out_of_range(server, folder):
    await server.all(request(folder, sampling=pb.SamplingParams()))
    [got] = server.engine.control.requests
    taken = got.sampling
    assert (taken.top_p, taken.top_k, taken.repetition_penalty, taken.n) == (1.0, -1, 1.0, 1)
    assert taken.temperature == 0.0


BAD = {
    "top_p": (pb.SamplingParams(top_p=1.5), "top_p"),
    "penalty": (pb.SamplingParams(frequency_penalty=9.0), "frequency_penalty"),
    "nan": (pb.SamplingParams(temperature=float("nan")), "temperature"),
    "grammar": (pb.SamplingParams(regex="a", min_new_tokens=9, max_new_tokens=3), "min_new_tokens"),
    "n": (pb.SamplingParams(n=100_000), "n"),
}


@pytest.mark.parametrize("case", BAD)
async def test_parameters_out_of_range_are_named(server, folder, case):
    sampling, field = BAD[case]
    error = await refused(server.all(request(folder, sampling=sampling)))
    assert error.code() is Code.INVALID_ARGUMENT
    assert field in error.details()
    assert server.engine.control.requests == []


ABSENT = {
    "return_hidden_states": True,
    "custom_logit_processor": "x",
    "input_embeds": [1.0],
    "disaggregated_params": pb.DisaggregatedParams(bootstrap_host="h"),
    "mm_inputs": pb.MultimodalInputs(),
    "data_parallel_rank": 1,
}


@pytest.mark.parametrize("name", ABSENT)
async def test_what_is_not_there_is_refused_by_name(server, folder, name):
    error = await refused(server.all(request(folder, **{name: ABSENT[name]})))
    assert error.code() is Code.UNIMPLEMENTED
    assert error.details().startswith(f"{name}: not supported")


async def test_a_grammar_waits_for_thinking(server, folder):
    marks = [pb.TokenIds(ids=[7, 8])]
    sampling = pb.SamplingParams(max_new_tokens=64, regex="[a-z]+")
    given = pb.Thinking(ends=marks, starts=marks, headers=marks, inside=True)
    await server.all(request(folder, sampling=sampling, thinking=given))
    await server.all(request(folder, sampling=sampling, require_reasoning=True))
    told, found = (r.thinking for r in server.engine.control.requests)
    assert told == ThinkingOptions(ends=((7, 8),), starts=((7, 8),), headers=((7, 8),), inside=True)
    assert found.inside
    assert found.ends[0] == tuple(ids(folder, "</think>"))


@pytest.mark.parametrize(
    ("thinking", "field"),
    [
        (pb.Thinking(), "thinking.ends"),
        (pb.Thinking(ends=[pb.TokenIds()]), "thinking.ends"),
        (pb.Thinking(ends=[pb.TokenIds(ids=[1] * 257)]), "thinking.ends"),
        (pb.Thinking(ends=[pb.TokenIds(ids=[1])] * 65), "thinking.ends"),
        (pb.Thinking(ends=[pb.TokenIds(ids=[1])], starts=[pb.TokenIds()]), "thinking.starts"),
        (pb.Thinking(ends=[pb.TokenIds(ids=[2**32 - 1])]), "thinking.ends"),
    ],
)
async def test_markers_of_thinking_are_checked(server, folder, thinking, field):
    error = await refused(server.all(request(folder, thinking=thinking)))
    assert error.code() is Code.INVALID_ARGUMENT
    assert field in error.details()
    assert server.engine.control.requests == []


async def test_prompts_are_checked(server, folder):
    empty = pb.GenerateRequest(request_id="e", tokenized=pb.TokenizedInput())
    assert (await refused(server.all(empty))).code() is Code.INVALID_ARGUMENT
    beyond = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[2**31]))
    error = await refused(server.all(beyond))
    assert error.code() is Code.INVALID_ARGUMENT
    assert "input_ids[0]" in error.details()


async def test_malformed_messages_are_the_clients_fault(server, folder):
    for name in ("GetLoads", "Abort", "Embed"):
        error = await refused(server.call(name, b"\xff\xff\xff"))
        assert error.code() is Code.INVALID_ARGUMENT
    assert await server.all(request(folder))


async def test_messages_that_are_too_large_are_refused(server, folder):
    big = pb.GenerateRequest(tokenized=pb.TokenizedInput(original_text="x" * (1 << 17)))
    error = await refused(server.all(big))
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert await server.all(request(folder))


async def test_a_client_that_leaves_aborts_its_request(server, folder):
    server.engine.control.hold = True
    call = server.generate(request(folder))
    reading = asyncio.ensure_future(call.read())
    await until(lambda: len(server.engine.control.requests) == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await until(lambda: len(server.engine.control.aborted) == 1)
    assert server.engine.manager.num_live == 0


async def test_a_deadline_ends_the_request(server, folder):
    server.engine.control.hold = True
    error = await refused(server.all(request(folder), timeout=0.3))
    assert error.code() is Code.DEADLINE_EXCEEDED
    await until(lambda: server.engine.manager.num_live == 0)


async def test_requests_are_aborted_by_name(server, folder):
    server.engine.control.hold = True
    call = server.generate(request(folder, rid="mine"))
    reading = asyncio.ensure_future(call.read())
    await until(lambda: server.engine.manager.num_live == 1)
    assert (await server.call("Abort", pb.AbortRequest(request_id="mine"))).success
    last = await reading
    assert last.complete.finish_reason == "abort"
    other = await server.call("Abort", pb.AbortRequest(request_id="other"))
    assert not other.success
    assert "'other'" in other.message


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, Code.INVALID_ARGUMENT), (503, Code.UNAVAILABLE), (500, Code.INTERNAL)],
)
async def test_failures_of_the_engine_are_statuses(server, folder, status, code):
    server.engine.control.fail = Finish(type="abort", message="no luck", status=status)
    error = await refused(server.all(request(folder)))
    assert error.code() is code
    assert error.details() == "no luck"


async def test_the_model_and_the_server_are_described(server):
    model = await server.call("GetModelInfo")
    facts = server.engine.manager.facts
    assert model.max_context_length == facts.context_len
    assert list(model.eos_token_ids) == list(facts.eos_ids)
    assert model.is_generation
    info = await server.call("GetServerInfo")
    assert info.max_total_num_tokens == facts.max_total_tokens
    assert info.scheduler_info["state"] == "up"
    loads = await server.call("GetLoads", pb.GetLoadsRequest())
    assert loads.dp_rank_count == len(loads.loads) == 1
    assert loads.loads[0].max_total_num_tokens == 4096
    error = await refused(server.call("GetLoads", pb.GetLoadsRequest(dp_rank=3)))
    assert error.code() is Code.INVALID_ARGUMENT


async def test_the_cache_is_flushed_or_waited_for(server):
    assert (await server.call("FlushCache")).success
    server.engine.control.busy = True
    assert not (await server.call("FlushCache")).success
    waiting = asyncio.ensure_future(
        server.call("FlushCache", common.FlushCacheRequest(timeout_s=30))
    )
    await until(lambda: len(server.engine.control.commands) >= 4)
    server.engine.control.busy = False
    assert (await waiting).success
    error = await refused(server.call("FlushCache", common.FlushCacheRequest(timeout_s=-1)))
    assert error.code() is Code.INVALID_ARGUMENT


async def test_the_tokenizer_is_fetched(server, folder, tmp_path):
    facts = server.engine.manager.facts
    assert facts.model_path == str(folder)
    chunks = await server.stream("GetTokenizer", common.GetTokenizerRequest())
    data = b"".join(chunk.data for chunk in chunks)
    assert hashlib.sha256(data).hexdigest() == chunks[-1].sha256
    zipfile.ZipFile(io.BytesIO(data)).extractall(tmp_path)
    assert Tokenizer.load(tmp_path).encode("caf\u00e9") == ids(folder, "caf\u00e9")


async def test_profiles_are_not_there_and_adapters_are_off(server, folder):
    assert (await server.call("ListLoadedLoRAAdapters")).loaded_adapters == []
    assert (await refused(server.call("StartProfile"))).code() is Code.UNIMPLEMENTED
    for name in ("LoadLoRAAdapter", "UnloadLoRAAdapter"):
        error = await refused(server.call(name))
        assert error.code() is Code.INVALID_ARGUMENT
        assert "--enable-lora" in error.details()
    error = await refused(server.all(request(folder, lora_id="a")))
    assert "there is no adapter called 'a'" in error.details()


async def test_keys_are_wanted_where_http_wants_them(folder):
    keys = {"api_key": Secret("k"), "admin_api_key": Secret("boss")}
    async with grpc_served(folder, **keys) as server:
        mine = {"metadata": (("authorization", "Bearer k"),)}
        assert (await server.call("HealthCheck")).healthy
        assert (await refused(server.all(request(folder)))).code() is Code.UNAUTHENTICATED
        assert await server.all(request(folder), **mine)
        assert (await refused(server.call("FlushCache", **mine))).code() is Code.PERMISSION_DENIED
        boss = {"metadata": (("authorization", "Bearer boss"),)}
        assert (await server.call("FlushCache", **boss)).success


async def test_gateways_speak_for_tenants(folder):
    async with grpc_served(folder, gateway_key=Secret("g")) as server:
        said = ("x-sylvan-tenant", "ann")
        await server.all(request(folder, rid="a"), metadata=(said, (KEY_HEADER, "g")))
        await server.all(request(folder, rid="b"), metadata=(said, (KEY_HEADER, "no")))
        assert [r.tenant for r in server.engine.control.requests] == ["ann", ""]


async def test_health_follows_the_standard_protocol(server):
    check = server.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    for name in ("", SERVICE):
        reply = await check(health_pb2.HealthCheckRequest(service=name).SerializeToString())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    error = await refused(check(health_pb2.HealthCheckRequest(service="x").SerializeToString()))
    assert error.code() is Code.NOT_FOUND
    watch = server.channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    seen = watch(b"")
    assert (await seen.read()).status == health_pb2.HealthCheckResponse.SERVING
    server.engine.manager.router.drain()
    assert (await seen.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    seen.cancel()


async def test_clients_without_our_protos_can_ask_for_them(server):
    def reflected():
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            pool = descriptor_pool.DescriptorPool(database)
            service = pool.FindServiceByName(SERVICE)
            field = service.methods_by_name["Generate"].input_type.fields_by_name["stream"]
            return set(database.get_services()), field.number

    services, number = await asyncio.to_thread(reflected)
    assert {SERVICE, "grpc.health.v1.Health"} <= services
    assert number == 17
