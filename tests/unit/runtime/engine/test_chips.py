"""The table of devices says what a server would start with: asked of the rules themselves."""

from __future__ import annotations

import pytest

from sylvan.cli.check import check_devices
from sylvan.runtime.engine.chips import ATTENTION_COLUMNS, COLUMNS, attention_rows, chip_rows
from sylvan.runtime.platform.find import load_kinds


@pytest.fixture(scope="module")
def rows():
    return {row.name: row for row in chip_rows(load_kinds(()))}


def test_every_kind_of_device_has_a_row(rows):
    assert set(rows) == set(load_kinds(()))
    assert next(iter(rows)) == "cpu"
    for row in rows.values():
        assert set(row.cells) == set(COLUMNS)
        assert row.state
        assert row.how
        assert row.cells["dtypes"], row.name
        assert row.cells["attention"], row.name


@pytest.mark.parametrize(
    ("device", "column", "cell"),
    [
        ("cpu", "formats", "w8a8, w4a8, w4a16, fp8"),
        ("cpu", "KV dtypes", "model, int8, int4, fp8_e4m3"),
        ("cpu", "parallel", "ranks, groups"),
        ("cpu", "speculation", "ngram, eagle3"),
        ("cpu", "LoRA", "yes"),
        ("cuda", "formats", "w4a16, fp8"),
        ("cuda", "runner", "graph, eager"),
        ("cuda", "speculation", "ngram"),
        ("jax", "dtypes", "float32, bfloat16"),
        ("jax", "KV dtypes", "model"),
        ("jax", "attention", "pallas, jnp"),
        ("jax", "runner", "program"),
        ("jax", "parallel", "devices, groups"),
        ("jax", "LoRA", "yes"),
        ("tpu", "parallel", "devices, groups"),
        ("mps", "parallel", ""),
    ],
)
def test_cells_say_what_is_taken(rows, device, column, cell):
    assert rows[device].cells[column] == cell


@pytest.mark.parametrize(
    ("backend", "column", "cell"),
    [
        ("native", "page sizes", "16, 32, ... 256"),
        ("native", "KV dtypes", "model, int8, int4, fp8_e4m3"),
        ("native", "same bits in any batch", "yes"),
        ("triton", "devices", "cuda, rocm"),
        ("triton", "MLA", "yes"),
        ("triton", "runners", "graph, eager"),
        ("flashinfer", "dtypes", "bfloat16, float16"),
        ("flashinfer", "MLA", ""),
        ("flashinfer", "runners", "eager"),
        ("pallas", "devices", "jax, tpu"),
        ("pallas", "speculation", "yes"),
        ("pallas", "same bits in any batch", ""),
    ],
)
def test_backends_say_what_they_take(backend, column, cell):
    found = {row.name: row for row in attention_rows(load_kinds(()))}

    assert set(found[backend].cells) == set(ATTENTION_COLUMNS)
    assert found[backend].cells[column] == cell


def test_check_tells_of_this_machine_first_and_how_to_get_the_others():
    found = list(check_devices())
    here = [finding for finding in found if not finding.detail.startswith("not here")]

    assert here == found[: len(here)]
    assert here[0].what == "device cpu"
    assert "formats: w8a8" in here[0].detail
    assert all("(" in finding.detail for finding in found[len(here) :])
    assert {finding.status for finding in found} == {"ok"}
