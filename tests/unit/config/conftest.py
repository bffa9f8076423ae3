from __future__ import annotations

import pytest

from tests.support.config_facts import make_facts


@pytest.fixture
def facts():
    return make_facts()
