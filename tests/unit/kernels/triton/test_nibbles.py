"""The instructions that make numbers of codes, carried out one by one."""

from __future__ import annotations

import re
from typing import get_args

import pytest
import torch

from sylvan.kernels.matmul.codes import Code, bits_of, table_of
from sylvan.kernels.matmul.triton_nibbles import TYPES, assembly

FOUR = [code for code in get_args(Code) if bits_of(code) == 4]


def carried_out(text: str, given: dict[str, int], dtype: torch.dtype) -> dict[str, int]:
    """Registers after PTX; only what these texts use (PTX ISA 8.5, sections 9.7)."""
    held = dict(given)

    def value(word: str) -> int:
        return held[word] if word in held else int(word, 0)

    for line in re.findall(r"[^;{}]+", text):
        name, _, rest = line.strip().partition(" ")
        if not rest or name.startswith(".reg"):
            continue
        out, *words = (word.strip() for word in rest.split(","))
        x = [value(word) for word in words]
        match name.split(".")[0]:
            case "mov":
                held[out] = x[0]
            case "and":
                held[out] = x[0] & x[1]
            case "shr":
                held[out] = x[0] >> x[1]
            case "lop3":
                held[out] = _by_table(x[:3], x[3])
            case "prmt":
                held[out] = _permuted(*x)
            case "fma":
                a, b, c = (numbers(word, dtype).double() for word in x)
                held[out] = word_of((a * b + c).to(dtype))
            case other:
                raise AssertionError(other)
    return held


def _by_table(words: list[int], table: int) -> int:
    found = 0
    for bit in range(32):
        index = sum((word >> bit & 1) << 2 - i for i, word in enumerate(words))
        found |= (table >> index & 1) << bit
    return found


def _permuted(low: int, high: int, selector: int) -> int:
    picked = (low | high << 32).to_bytes(8, "little")
    chosen = [selector >> 4 * i & 15 for i in range(4)]
    assert max(chosen) < 8  # no copies of signs
    return int.from_bytes(bytes(picked[i] for i in chosen), "little")


def numbers(word: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([word & 0xFFFF, word >> 16]).to(torch.int16).view(dtype)


def word_of(pair: torch.Tensor) -> int:
    low, high = (x & 0xFFFF for x in pair.view(torch.int16).tolist())
    return low | high << 16


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("code", FOUR)
def test_bytes_become_the_numbers_of_their_halves(code: Code, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    table, base = table_of(code, torch.device("cpu")), 128 if dtype == torch.bfloat16 else 1024
    integers = code in ("int4", "uint4")
    for _ in range(40):
        four = torch.randint(0, 256, (4,), generator=generator)
        zero = torch.randint(0, 16, (4,), generator=generator) * integers
        less = (-base - zero).to(dtype)
        given = {"$4": int.from_bytes(bytes(four.tolist()), "little")}
        given |= {"$5": word_of(less[:2]), "$6": word_of(less[2:])}

        held = carried_out(assembly(code, dtype), given, dtype)

        low = torch.cat([numbers(held[name], dtype) for name in ("$0", "$1")])
        high = torch.cat([numbers(held[name], dtype) for name in ("$2", "$3")])
        assert torch.equal(low, (table[four & 15] - zero).to(dtype))
        assert torch.equal(high, (table[four >> 4] - zero).to(dtype))
