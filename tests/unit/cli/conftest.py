from __future__ import annotations

import pytest

from tests.support.tiny import write_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")
