from __future__ import annotations

import pytest

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.attention import triton
from sylvan.runtime.attention.triton import TritonAttention
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.options import LocalOptions
from tests.support.delayed import DelayedPlatform
from tests.support.random_model import write_random_model


def test_a_missing_triton_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(triton, "triton_installed", lambda: False)

    with pytest.raises(ConfigError, match=r"^attention=triton: .* pip install 'sylvan\[gpu\]', or"):
        TritonAttention()


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_a_backend_of_other_devices_is_refused_before_anything_is_loaded(tmp_path, name):
    path = write_random_model(tmp_path, context_len=64)
    (path / "model.safetensors").unlink()

    options = LocalOptions(
        page_size=16, num_pages=9, max_batch_tokens=32, max_running_reqs=2, attention=name
    )

    with pytest.raises(ConfigError, match=f"'{name}' does not run on delayed"):
        build_executor(path, options, platform=DelayedPlatform())
