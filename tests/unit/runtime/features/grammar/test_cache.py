"""The cache of compiled grammars."""

from __future__ import annotations

from sylvan.runtime.features.grammar.cache import GrammarCache, GrammarStore, store_folder
from sylvan.runtime.features.grammar.work import CompileResult
from tests.support.grammar import vocabulary


def test_the_least_recently_used_make_room() -> None:
    cache = GrammarCache(max_bytes=40_000)
    for name in "abc":
        cache.put(name, name, 8_000)
    cache.get("a")
    cache.put("d", "d", 8_000)

    assert [cache.get(n) for n in "abcd"] == ["a", None, "c", "d"]
    assert cache.num_bytes <= 40_000


def test_an_entry_that_is_replaced_counts_once() -> None:
    cache = GrammarCache(max_bytes=100_000)
    for _ in range(50):
        cache.put("a", "a", 8_000)

    assert len(cache) == 1
    assert cache.num_bytes < 20_000


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    cache = GrammarCache(max_bytes=10_000)
    cache.put("a", "a", 50_000)

    assert len(cache) == cache.num_bytes == 0


def test_a_store_gives_back_what_was_written(tmp_path) -> None:
    store = GrammarStore(tmp_path / "deep" / "folder")
    result = CompileResult(id=3, data=b"abc", memory_bytes=7, seconds=0.5)

    assert store.read("x") is None
    store.write("x", result)
    assert store.read("x") == result


def test_a_store_that_cannot_be_written_is_only_a_warning(tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("in the way")
    GrammarStore(tmp_path / "file").write("x", CompileResult(id=1))

    assert "cannot be kept" in caplog.text


def test_libraries_and_vocabularies_have_folders_of_their_own(tmp_path) -> None:
    words = vocabulary()
    folders = {store_folder(tmp_path, name, words) for name in ("a-1", "a-2")}

    assert len(folders) == 2
    assert store_folder(tmp_path, "a-1", vocabulary()) in folders
