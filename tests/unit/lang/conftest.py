from __future__ import annotations

from collections.abc import Iterator

import pytest

from sylvan.lang.settings import global_config


@pytest.fixture(autouse=True)
def _no_default_backend() -> Iterator[None]:
    global_config.default_backend = None
    yield
    global_config.default_backend = None
