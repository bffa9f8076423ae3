"""Sampling parameters that cross once: what arrives is what was sent."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sylvan.protocol.messages import Abort, Params, Submit, ToScheduler
from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.protocol.shared_params import SLOTS, ParamsReceiver, ParamsSender
from sylvan.transport.codec import MessageDecoder, MessageEncoder

IDS = np.arange(3, dtype=np.int32)
samplings = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(0, 9) | st.none(),
    sampling_seed=st.integers(0, 9) | st.none(),
    temperature=st.sampled_from([0.0, 1.0]),
    json_schema=st.none() | st.sampled_from(["{}", '{"a": "' + "x" * 2000 + '"}']),
    stop=st.sampled_from([(), ("a",), ("b", "c")]),
    logit_bias=st.sampled_from([{}, {"1": 2.0}, {"3": 4.0}]),
    custom_params=st.sampled_from([None, {"k": 1}, {"k": "v" * 3000}]),
)


def request(sampling: SamplingParams, rid: str = "r") -> GenerateRequest:
    return GenerateRequest(rid=rid, input_ids=IDS, output_ids=IDS, sampling=sampling)


class Wire:
    """Both ends, with the bytes between them."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.sender = ParamsSender(self._cross)
        self.receiver = ParamsReceiver()
        self.arrived: list[object] = []
        self._encoder, self._decoder = MessageEncoder(), MessageDecoder(ToScheduler)

    def _cross(self, message: ToScheduler) -> None:
        data = self._encoder.encode(message)
        self.num_bytes += len(data)
        match self._decoder.decode(data):
            case Params() as params:
                self.receiver.keep(params)
            case Submit() as submit:
                self.arrived.append(self.receiver.request(submit))
            case other:
                self.arrived.append(other)


@given(st.lists(samplings, max_size=3 * SLOTS))
def test_requests_arrive_as_they_were_sent(sent: list[SamplingParams]) -> None:
    wire = Wire()

    for sampling in sent:
        wire.sender.send(Submit(request=request(sampling)))

    assert [found.sampling for found in wire.arrived] == sent
    assert {found.rid for found in wire.arrived} <= {"r"}


def test_other_messages_pass() -> None:
    wire = Wire()
    embed = EmbedRequest(rid="e", input_ids=IDS)

    wire.sender.send(Abort(rid="a"))
    wire.sender.send(Submit(request=embed))

    assert wire.arrived[0] == Abort(rid="a")
    assert wire.arrived[1].rid == "e"


def test_a_grammar_of_many_prompts_crosses_once() -> None:
    wire = Wire()
    schema = '{"description": "' + "x" * 1_000_000 + '"}'
    sampling = SamplingParams(json_schema=schema, custom_params={"k": "v" * 1_000_000})

    for i in range(1000):
        own = msgspec.structs.replace(sampling, sampling_seed=i)
        wire.sender.send(Submit(request=request(own, f"r{i}")))

    assert wire.num_bytes < 3_000_000
    assert [found.sampling.sampling_seed for found in wire.arrived] == list(range(1000))
    assert len({id(found.sampling.json_schema) for found in wire.arrived}) == 1


def test_parameters_that_could_not_be_sent_are_sent_again() -> None:
    wire = Wire()
    cross, wire.sender._send = wire.sender._send, None
    sampling = SamplingParams(stop=("x",))
    try:
        wire.sender.send(Submit(request=request(sampling)))
    except TypeError:
        wire.sender._send = cross
    wire.sender.send(Submit(request=request(sampling)))

    assert [found.sampling for found in wire.arrived] == [sampling]
