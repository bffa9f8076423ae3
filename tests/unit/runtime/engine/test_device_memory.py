"""A device's KV cache holds what fits, and no more than the plan has use for."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from sylvan.cli.banner import decisions_text
from sylvan.cli.settings import resolve_settings
from sylvan.config.sources import from_keywords, gather
from sylvan.runtime.engine.build import build_scheduler
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.options import LocalOptions
from sylvan.runtime.platform import find
from tests.support.delayed import DelayedPlatform
from tests.support.random_model import write_random_model

CONTEXT, RUNNING = 64, 5


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"), context_len=CONTEXT)


@pytest.fixture
def delayed(monkeypatch):
    entry = EntryPoint("delayed", "tests.support.delayed:KIND", find.GROUP)
    monkeypatch.setattr(find, "entry_points", lambda group: [entry])


def settings_of(model_dir, **flags):
    known = {"model": str(model_dir), "device": "delayed", "attention": "dense", "runner": "eager"}
    return resolve_settings(gather(from_keywords(known | flags)))


@pytest.mark.usefixtures("delayed")
def test_the_summary_and_the_server_tell_the_same_size(model_dir):
    settings = settings_of(model_dir, max_running_requests=RUNNING)

    built = build_scheduler(settings.resolved.config, lambda outputs: None)

    try:
        assert built.facts["max_total_tokens"] == CONTEXT * RUNNING
        assert built.facts["kv_bytes"] == settings.resolved.plan.kv_bytes
        assert f", {CONTEXT * RUNNING:,} tokens; measured" in decisions_text(settings)
    finally:
        built.close()


@pytest.mark.usefixtures("delayed")
def test_a_size_that_somebody_chose_is_what_there_is(model_dir):
    chosen = CONTEXT * RUNNING * 7
    settings = settings_of(model_dir, max_running_requests=RUNNING, max_total_tokens=chosen)

    built = build_scheduler(settings.resolved.config, lambda outputs: None)

    try:
        assert built.facts["max_total_tokens"] == chosen
        assert decisions_text(settings).endswith(f", {chosen:,} tokens")
    finally:
        built.close()


def test_less_than_is_of_use_fits(model_dir):
    def pages(most: int | None) -> int:
        options = LocalOptions(
            page_size=16,
            num_pages=9,
            max_batch_tokens=32,
            max_running_reqs=2,
            attention="dense",
            runner="eager",
            fill=True,
            max_pages=most,
        )
        platform = DelayedPlatform(memory_bytes=100 << 20)
        executor, facts = build_executor(model_dir, options, platform=platform)
        executor.close()
        return facts.num_pages

    whole = pages(None)

    assert whole > 1000
    assert pages(whole + 1) == whole
    assert pages(40) == 40
