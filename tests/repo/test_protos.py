"""Modules generated from .proto files, and the numbers that gateways rely on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sylvan.rpc import scheduler_pb2 as pb

ROOT = Path(__file__).parents[2]

NUMBERS = {
    "SamplingParams": {"temperature": 1, "max_new_tokens": 8, "structural_tag": 16, "n": 17},
    "GenerateRequest": {"request_id": 1, "tokenized": 2, "sampling_params": 4, "stream": 17},
    "GenerateStreamChunk": {"token_ids": 1, "output_logprobs": 5, "index": 8},
    "GenerateComplete": {"output_ids": 1, "finish_reason": 2, "matched_stop_str": 9, "index": 11},
    "EmbedResponse": {"embedding_dim": 4, "embedding": 5, "prompt_tokens": 6},
    "GetModelInfoResponse": {"eos_token_ids": 11, "default_sampling_params_json": 20},
    "SchedulerLoad": {"num_waiting_uncached_tokens": 17, "memory": 12},
}


def test_modules_are_up_to_date():
    script = ROOT / "scripts" / "generate_protos.py"
    subprocess.run([sys.executable, str(script), "--check"], check=True)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_those_of_the_reference(name):
    message = pb.DESCRIPTOR.message_types_by_name[name]
    found = {field: message.fields_by_name[field].number for field in NUMBERS[name]}
    assert found == NUMBERS[name]
