"""The contract of KV stores; none returns a wrong byte after a crash."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from importlib.metadata import EntryPoint

import pytest

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.storage.api import StoreError, StoreLimits
from sylvan.runtime.storage.backends import mooncake as mooncake_backend
from sylvan.runtime.storage.backends.file import FileStore
from sylvan.runtime.storage.backends.memory import MemoryStore
from sylvan.runtime.storage.find import check_url, open_store, shown, store_kind
from sylvan.runtime.storage.manifest import bind, manifest_of
from sylvan.runtime.storage.record import RecordCodec, RecordError
from sylvan.utils.clock import VirtualClock
from tests.support.stores import (
    MOONCAKE,
    MOTO,
    NIXL,
    REDIS,
    manifest,
    mooncake_master,
    name_of,
    redis_server,
    s3_server,
)

KINDS = ["memory", "file", "local", "redis", "s3", "nixl", "mooncake"]
FOREVER = StoreLimits()


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    if REDIS is None:
        pytest.skip("neither valkey-server nor redis-server is installed")
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture(scope="module")
def s3():
    """Answers where its files are; credentials are in the environment, as for any client of S3."""
    if not MOTO:
        pytest.skip("moto[server] and s3fs are not installed")
    with s3_server() as (endpoint, _), pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        importlib.import_module("s3fs").S3FileSystem().mkdir("pages")
        yield "s3://pages"


@pytest.fixture(scope="module")
def mooncake():
    if not MOONCAKE:
        pytest.skip("mooncake-transfer-engine is not installed")
    with mooncake_master() as (url, master):
        yield url, master


@pytest.fixture(params=KINDS)
def url(request, tmp_path):
    match request.param:
        case "memory":
            return f"memory:{tmp_path}"
        case "file":
            return str(tmp_path / "store")
        case "local":
            return f"local://{tmp_path}/objects"
        case "s3":
            return f"{request.getfixturevalue('s3')}/{tmp_path.name}"
        case "nixl":
            if not NIXL:
                pytest.skip("nixl is not installed")
            return f"nixl://{tmp_path}/store"
        case "mooncake":
            return request.getfixturevalue("mooncake")[0].replace("KEY", tmp_path.name)
        case _:
            return f"{request.getfixturevalue('redis_url')}?prefix={tmp_path.name}"


@pytest.fixture
def store(url):
    store = open_store(url, FOREVER)
    yield store
    store.close()


def test_what_was_written_is_read_and_counted(store):
    store.write(name_of(1), b"one")
    store.write(name_of(2, space=3, kind="w0"), b"two")

    assert store.read(name_of(1)) == b"one"
    assert store.read(name_of(2, space=3, kind="w0")) == b"two"
    assert store.read(name_of(3)) is None
    assert [*store.contains([name_of(1), name_of(9), name_of(2, 3, "w0")])] == [True, False, True]
    assert [*store.contains([])] == []
    sizes = {page.name: page.num_bytes for page in store.pages()}
    assert sizes == {name_of(1): 3, name_of(2, space=3, kind="w0"): 3}


def test_a_record_is_read_in_parts(store):
    store.write(name_of(1), b"headpage")
    for sizes, wanted in (((4, 4), b"headpage"), ((2, 3), b"headp"), ((4, 9), b"headpage")):
        parts = [bytearray(size) for size in sizes]
        assert store.read_into(name_of(1), [parts[0], memoryview(parts[1])]) == 8
        assert b"".join(parts)[: len(wanted)] == wanted
    assert store.read_into(name_of(2), [bytearray(4)]) is None


def test_a_page_is_replaced_and_removed(store):
    store.write(name_of(1), b"old")
    store.write(name_of(1), b"newer")
    assert store.read(name_of(1)) == b"newer"
    assert [page.num_bytes for page in store.pages()] == [5]

    store.remove([name_of(1), name_of(2)])
    assert store.read(name_of(1)) is None
    assert [*store.contains([name_of(1)])] == [False]
    assert [*store.pages()] == []


def test_another_server_sees_the_same_pages(store, url):
    other = open_store(url, FOREVER)
    store.write(name_of(1), b"shared")
    assert [*other.contains([name_of(1)])] == [True]
    assert other.read(name_of(1)) == b"shared"
    other.close()


def test_a_store_is_bound_to_the_first_manifest(store, url):
    bind(store, manifest(), url)
    bind(store, manifest(), url)
    assert manifest_of(store) == manifest()

    with pytest.raises(ConfigError, match=r"weights is w, not x.*sylvan cache prune --all"):
        bind(store, manifest(weights="x"), url)
    assert manifest_of(store) == manifest()


def test_clearing_forgets_pages_and_binding(store, url):
    bind(store, manifest(), url)
    store.write(name_of(1), b"one")
    store.clear()

    assert [*store.pages()] == []
    assert store.read(name_of(1)) is None
    assert manifest_of(store) is None
    bind(store, manifest(weights="x"), url)


def test_many_threads_use_one_store(store):
    def work(first: int) -> None:
        for number in range(first, first + 20):
            store.write(name_of(number), b"%d" % number)
            assert store.read(name_of(number)) == b"%d" % number

    threads = [threading.Thread(target=work, args=(20 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([*store.pages()]) == 80


@pytest.mark.parametrize("kind", ["memory", "file"])
class TestLimits:
    """Of stores that keep to a size themselves."""

    def make(self, kind, tmp_path, **limits):
        self.clock = VirtualClock(1000.0)
        limits = StoreLimits(**limits)
        if kind == "memory":
            return MemoryStore(limits, self.clock)
        return FileStore(tmp_path, limits, self.clock)

    def write(self, store, number, space=0):
        self.clock.advance(1)
        store.write(name_of(number, space), bytes(100))

    def there(self, store):
        return {int(page.name[17:81], 16) for page in store.pages()}

    def test_what_was_not_used_for_longest_goes_first(self, kind, tmp_path):
        store = self.make(kind, tmp_path, max_bytes=350)
        for number in range(3):
            self.write(store, number)
        self.clock.advance(1)
        assert store.contains([name_of(0)]) == [True]
        self.write(store, 3)
        assert self.there(store) == {0, 2, 3}

    def test_each_namespace_has_a_quota(self, kind, tmp_path):
        store = self.make(kind, tmp_path, space_bytes=200)
        for number in range(4):
            self.write(store, number, space=1)
        self.write(store, 9, space=2)
        assert self.there(store) == {2, 3, 9}

    def test_a_page_over_the_limit_is_refused(self, kind, tmp_path):
        store = self.make(kind, tmp_path, max_bytes=99)
        with pytest.raises(StoreError, match="100 bytes"):
            self.write(store, 1)

    def test_pages_not_used_for_long_are_forgotten(self, kind, tmp_path):
        store = self.make(kind, tmp_path, ttl_s=10)
        self.write(store, 1)
        self.clock.advance(6)
        self.write(store, 2)
        assert store.contains([name_of(2)]) == [True]
        self.clock.advance(6)
        assert store.contains([name_of(1), name_of(2)]) == [False, True]
        assert store.sweep() == 1
        assert self.there(store) == {2}


def test_redis_forgets_by_itself(redis_url):
    store = open_store(redis_url + "?prefix=ttl", StoreLimits(ttl_s=0.05))
    store.write(name_of(1), b"one")
    until = time.monotonic() + 10
    while store.read(name_of(1)) is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert store.read(name_of(1)) is None


def test_a_server_that_is_gone_is_named(tmp_path):
    with pytest.raises(StoreError, match="Redis"):
        open_store("redis://127.0.0.1:1/0", StoreLimits(timeout_s=0.5))


@pytest.mark.skipif(not MOONCAKE, reason="mooncake-transfer-engine is not installed")
def test_a_mooncake_master_that_is_gone_is_named():
    with pytest.raises(StoreError, match="cannot be reached"):
        open_store("mooncake://127.0.0.1:1", StoreLimits(timeout_s=0.5))
    with mooncake_master() as (url, master):
        store = open_store(url.replace("64MiB", "16MiB"), FOREVER)
        store.write(name_of(1), b"one")

        def fill() -> None:
            for number in range(2, 20):
                store.write(name_of(number), bytes(2 << 20))

        with pytest.raises(StoreError, match="no room"):
            fill()
        master.kill()
        master.wait()
        for call in (lambda: store.read(name_of(1)), lambda: store.write(name_of(3), b"three")):
            with pytest.raises(StoreError, match="Mooncake store cannot"):
                call()
        with pytest.raises(StoreError, match="Mooncake store cannot ask"):
            store.contains([name_of(1)])
        with pytest.raises(StoreError, match="admin=HOST:PORT"):
            [*store.pages()]
        store.close()


@pytest.mark.skipif(not MOTO, reason="moto[server] and s3fs are not installed")
def test_s3_that_hangs_is_not_waited_for_long(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with s3_server() as (endpoint, server):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        limits = StoreLimits(timeout_s=0.5)
        importlib.import_module("s3fs").S3FileSystem(skip_instance_cache=True).mkdir("hung")
        store = open_store("s3://hung/x", limits)
        store.write(name_of(1), b"one")
        server.send_signal(signal.SIGSTOP)
        for call in (store.read, lambda name: store.write(name, b"two")):
            began = time.monotonic()
            with pytest.raises(StoreError, match="object store"):
                call(name_of(1))
            assert time.monotonic() - began < 45, "not the five minutes that its client takes"
        with pytest.raises(StoreError, match="object store"):
            open_store("s3://hung/y", limits)
        server.send_signal(signal.SIGCONT)
        store.close()


@pytest.mark.skipif(not MOONCAKE, reason="mooncake-transfer-engine is not installed")
def test_a_mooncake_master_that_hangs_stops_no_request(monkeypatch):
    monkeypatch.setattr(mooncake_backend, "_JOIN_S", 5.0)
    limits = StoreLimits(timeout_s=1.0)
    with mooncake_master() as (url, master):
        store = open_store(url, limits)
        store.write(name_of(1), b"one")
        master.send_signal(signal.SIGSTOP)
        with pytest.raises(StoreError, match="does not answer"):
            open_store(url, limits)
        store.close()  # returns without an answer
        master.send_signal(signal.SIGCONT)


@pytest.mark.skipif(NIXL or MOONCAKE, reason="nixl or mooncake is installed")
@pytest.mark.parametrize("url", ["nixl:///x", "mooncake://host"])
def test_a_package_that_is_missing_is_named(url):
    with pytest.raises(ConfigError, match=r"pip install (nixl|mooncake)"):
        check_url(url, FOREVER)


@pytest.mark.skipif(not NIXL, reason="nixl is not installed")
def test_a_directory_is_the_same_store_through_nixl(tmp_path):
    plain = open_store(str(tmp_path), FOREVER)
    through = open_store(f"nixl://{tmp_path}", FOREVER)
    plain.write(name_of(1), b"one")
    through.write(name_of(2), bytes(range(250)) * 1000)
    assert through.read(name_of(1)) == b"one"
    assert plain.read(name_of(2)) == through.read(name_of(2)) == bytes(range(250)) * 1000
    page, head = bytearray(249_990), bytearray(10)
    assert through.read_into(name_of(2), [head, page]) == 250_000
    assert head + page == bytes(range(250)) * 1000
    assert [*through.contains([name_of(1), name_of(3)])] == [True, False]


@pytest.mark.parametrize(
    ("url", "limits", "message"),
    [
        ("redis://localhost", {"max_bytes": 1}, "maxmemory"),
        ("s3://bucket/x", {"ttl_s": 1.0}, "lifecycle"),
        ("nosuch://x", {}, "nosuch"),
        ("file://elsewhere/x", {}, "absolute/path"),
        ("nixl://elsewhere/x", {}, "absolute/path"),
        ("nixl:///x?plugin=TAPE", {}, "POSIX, GDS"),
        ("nixl:///x?other=1", {}, "one option is plugin"),
        ("mooncake:///x", {}, "MASTER:PORT"),
        ("mooncake://host/x?sgment=1", {}, "no option 'sgment'"),
        ("mooncake://host/x?segment=much", {}, "segment is a size"),
        ("mooncake://host/x?protocol=udp", {}, "tcp or rdma"),
        ("mooncake://host/x?admin=host", {}, "HOST:PORT"),
        ("mooncake://host/x", {"ttl_s": 1.0}, "master evicts"),
    ],
)
def test_what_cannot_be_served_is_refused(url, limits, message):
    with pytest.raises(ConfigError, match=message):
        check_url(url, StoreLimits(**limits))


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not a directory"):
        check_url(str(tmp_path / "file"), FOREVER)
    with pytest.raises(StoreError, match="cannot be used"):
        open_store(str(tmp_path / "file" / "below"), FOREVER)


def test_passwords_are_not_shown():
    assert shown("redis://user:secret@host/0") == "redis://host/0"


def test_other_packages_offer_stores():
    entry = EntryPoint("far", "sylvan.runtime.storage.backends.memory:STORE", "sylvan.kv_stores")
    store = store_kind("far:x", [entry]).open("far:x", FOREVER)
    assert store.read(name_of(1)) is None

    broken = EntryPoint("bad", "sylvan.nothing:STORE", "sylvan.kv_stores")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        store_kind("bad:x", [broken])


# ---- a directory whose writers die

WRITER = """
import sys, itertools
from pathlib import Path
from sylvan.runtime.storage.api import StoreLimits
from sylvan.runtime.storage.backends import mooncake as mooncake_backend
from sylvan.runtime.storage.backends.file import FileStore
from sylvan.runtime.storage.record import RecordCodec
from tests.support.stores import name_of
records = RecordCodec(b"i" * 32)
store = FileStore(Path(sys.argv[1]), StoreLimits(max_bytes=2_000_000))
for number in itertools.count(int(sys.argv[2])):
    store.write(name_of(number), records.encode(name_of(number), bytes([number % 251]) * 50_000))
    if number == int(sys.argv[2]) + 5: print("going", flush=True)
"""


def test_killed_writers_leave_no_wrong_byte(tmp_path):
    records, good = RecordCodec(b"i" * 32), 0
    for turn in range(3):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(tmp_path), str(1000 * turn + 100 * i)],
                stdout=subprocess.PIPE,
                cwd=os.getcwd(),
            )
            for i in range(2)
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"going\n"
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            writer.stdout.close()
        store = FileStore(tmp_path, StoreLimits(max_bytes=2_000_000))
        store.sweep()
        assert not [*(tmp_path / "incoming").iterdir()]
        for page in [*store.pages()]:
            record = store.read(page.name)
            assert record is not None
            number = int(page.name[17:81], 16)
            assert records.decode(page.name, record) == bytes([number % 251]) * 50_000
            good += 1
        files = sum(path.stat().st_size for path in (tmp_path / "pages").glob("*/*/*"))
        assert files <= 2_000_000 + 3 * 2 * 51_000, "more than the limit and what was in flight"
        store.close()
    assert good > 10


def test_a_page_that_was_cut_short_is_found_out(tmp_path):
    store, records = FileStore(tmp_path, FOREVER), RecordCodec(b"i" * 32)
    store.write(name_of(1), records.encode(name_of(1), b"x" * 1000))
    path = next((tmp_path / "pages").glob("*/*/*"))
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(RecordError) as found:
        records.decode(name_of(1), store.read(name_of(1)))
    assert found.value.fault == "torn"


def test_a_page_whose_file_is_gone_is_forgotten(tmp_path):
    store = FileStore(tmp_path, FOREVER)
    store.write(name_of(1), b"one")
    next((tmp_path / "pages").glob("*/*/*")).unlink()
    assert store.read(name_of(1)) is None
    assert store.contains([name_of(1)]) == [False]


def test_a_damaged_index_is_named(tmp_path):
    FileStore(tmp_path, FOREVER).close()
    (tmp_path / "index.sqlite3").write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreError, match="index"):
        FileStore(tmp_path, FOREVER)
