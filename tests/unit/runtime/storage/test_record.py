"""Records of pages: what was changed, or is not the page, is found out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.storage.api import spread
from sylvan.runtime.storage.cipher import Cipher, derived, read_key
from sylvan.runtime.storage.manifest import decode_manifest
from sylvan.runtime.storage.record import HEADER_BYTES, RecordCodec, RecordError, check_record
from tests.support.stores import manifest, name_of

RECORDS = RecordCodec(manifest().identity)
SEALED = RecordCodec(manifest().identity, Cipher(b"k" * 32))


@given(payload=st.binary(max_size=300), sealed=st.booleans())
def test_a_record_gives_its_payload_back(payload, sealed):
    records = SEALED if sealed else RECORDS
    record = records.encode(name_of(1), payload)
    assert bytes(records.decode(name_of(1), record)) == payload
    assert (payload in record) or sealed or not payload
    check_record(name_of(1), record, manifest().identity)


@given(
    payload=st.binary(min_size=1, max_size=100),
    at=st.integers(0, 10**6),
    bit=st.integers(0, 7),
    sealed=st.booleans(),
)
def test_no_changed_bit_passes(payload, at, bit, sealed):
    records = SEALED if sealed else RECORDS
    record = bytearray(records.encode(name_of(1), payload))
    record[at % len(record)] ^= 1 << bit
    with pytest.raises(RecordError):
        records.decode(name_of(1), bytes(record))


@given(payload=st.binary(min_size=1, max_size=100), cut=st.integers(1, 200), grow=st.booleans())
def test_no_other_length_passes(payload, cut, grow):
    record = RECORDS.encode(name_of(1), payload)
    other = record + bytes(cut) if grow else record[:-cut]
    with pytest.raises(RecordError) as found:
        RECORDS.decode(name_of(1), other)
    assert found.value.fault == "torn"


def fault(records, name, record):
    with pytest.raises(RecordError) as found:
        records.decode(name, record)
    if not records.sealed:
        assert fault_of_parts(records, name, record) == found.value.fault
    return found.value.fault


def read_parts(records, name, record, num_bytes):
    """As a store fills a page's memory in place."""
    head, page = bytearray(HEADER_BYTES), bytearray(num_bytes)
    records.check(name, head, memoryview(page), spread(record, (head, page)))
    return bytes(page)


def fault_of_parts(records, name, record, num_bytes=4):
    with pytest.raises(RecordError) as found:
        read_parts(records, name, record, num_bytes)
    return found.value.fault


@given(payload=st.binary(min_size=1, max_size=100), at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_page_that_is_read_in_place_is_checked_too(payload, at, bit):
    record = bytearray(RECORDS.encode(name_of(1), payload))
    size = len(payload)
    assert read_parts(RECORDS, name_of(1), bytes(record), size) == payload
    assert fault_of_parts(RECORDS, name_of(1), bytes(record), size + 1) == "foreign"
    assert fault_of_parts(RECORDS, name_of(1), bytes(record[:-1]), size) == "torn"
    assert fault_of_parts(RECORDS, name_of(1), bytes([*record, 0]), size) == "torn"
    record[at % len(record)] ^= 1 << bit
    fault_of_parts(RECORDS, name_of(1), bytes(record), size)


def test_each_fault_has_a_name():
    record = RECORDS.encode(name_of(1), b"page")
    other = RecordCodec(manifest(weights="x").identity)
    assert fault(RECORDS, name_of(2), record) == "foreign"
    assert fault(RECORDS, name_of(1), b"GIF8" + record[4:]) == "foreign"
    assert fault(RECORDS, name_of(1), record[: HEADER_BYTES - 1]) == "torn"
    assert fault(other, name_of(1), record) == "stale"
    assert fault(SEALED, name_of(1), record) == "sealed"
    assert fault(RECORDS, name_of(1), SEALED.encode(name_of(1), b"page")) == "sealed"
    elsewhere = RecordCodec(manifest().identity, Cipher(b"l" * 32))
    assert fault(elsewhere, name_of(1), SEALED.encode(name_of(1), b"page")) == "sealed"


def test_two_seals_of_a_page_differ():
    assert SEALED.encode(name_of(1), b"page") != SEALED.encode(name_of(1), b"page")


def test_keys_are_files_that_no_other_user_reads(tmp_path):
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key(path)
    path.write_text("short")
    with pytest.raises(ConfigError, match="at least 32"):
        read_key(path)
    path.write_text("k" * 40 + "\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_key(path)
    path.chmod(0o600)
    assert read_key(path) == b"k" * 40
    assert derived(b"k" * 40, "pages") != derived(b"k" * 40, "tenants")


def test_a_manifest_says_what_differs():
    assert decode_manifest(manifest().encode()) == manifest()
    assert manifest().identity != manifest(runner="eager").identity
    found = manifest().differences(manifest(runner="eager", page_size=32))
    assert found == ["runner is eager, not program", "page_size is 32, not 16"]
    for data in (b"{}", b"\xff", b'{"format": 1}'):
        with pytest.raises(ConfigError, match="manifest"):
            decode_manifest(data)
