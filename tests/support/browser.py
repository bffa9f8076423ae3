"""Runs an installed headless Chromium; downloads nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
WAIT_MS = 90_000


def chromium() -> str | None:
    """Return the path of Chromium; None: it is not installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def browser() -> Iterator[Any]:
    """Start a browser with Playwright; skip the test without one."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    path = chromium()
    if path is None:
        pytest.skip("needs Chromium")
    sandbox = [] if os.geteuid() else ["--no-sandbox"]  # it has none for root
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=path, args=[*sandbox, "--disable-gpu"])
        yield made
        made.close()
