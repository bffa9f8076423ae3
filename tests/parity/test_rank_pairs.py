"""Ways to divide a model, and pairs of them: each native family in one of them, all in turn.

`test_ranks.py`, `test_stages.py`, `test_rank_experts.py` and `test_attention_dp.py` say more of
each way. All ranks are threads of this process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.registry import load_config
from tests.parity.checkpoints import write
from tests.parity.serving import Serving
from tests.parity.test_attention_dp import grouped
from tests.parity.test_rank_experts import served
from tests.parity.test_ranks import CLOSE, NATIVE, answers
from tests.support.stages import build_stages


def staged(path: Path, tp: int = 1, ep: int = 1) -> Serving:
    return Serving(path, build=build_stages(2, tp, ep=ep), overlap=True)


WAYS: dict[str, Callable[[Path], Serving]] = {
    "pp": staged,
    "attention-dp": grouped,
    "pp with tp": lambda path: staged(path, 2),
}
WAYS_OF_EXPERTS: dict[str, Callable[[Path], Serving]] = {
    **WAYS,
    "ep": lambda path: served(path, 2, 2),
    "attention-dp with ep": lambda path: grouped(path, ep=2),
    "pp with ep": lambda path: staged(path, 2, 2),
}
SEVERAL_STREAMS = {"deepseek-v32", "deepseek-v4", "glm-moe-dsa", "longcat-flash", "zamba"}
STATES = {
    *("bamba", "falcon-mamba", "granite4", "jamba", "lfm2", "lfm2-moe", "mamba", "mamba2"),
    *("kimi-linear", "minimax", "qwen3-next", "qwen3.5", "qwen3.5-moe", "recurrent-gemma"),
    *("rwkv", "zamba"),
}
WINDOWS = {
    *("cohere2", "cwm", "exaone4", "gemma2", "gemma3", "gemma3-images", "gpt-neo", "gpt-oss"),
    *("granite-swa", "granitemoe-swa", "ministral", "olmo3", "qwen2", "vaultgemma"),
}
"""With one layer of a kind among three, stages would lack it."""
REFUSED = {
    "pp": (SEVERAL_STREAMS, "more than one stream"),
    "attention-dp": ({*STATES, "deepseek-v32", "glm-moe-dsa", "gemma3-images"}, "attention_dp=1"),
}
TOO_FEW = WINDOWS | STATES - {"falcon-mamba", "mamba", "mamba2", "rwkv", "zamba"}


@pytest.mark.slow
@pytest.mark.parametrize(("turn", "family"), list(enumerate(sorted(NATIVE))))
def test_a_family_is_divided_in_this_way(turn: int, family: str, tmp_path: Path) -> None:
    write(NATIVE[family](), len(family), tmp_path)
    ways = WAYS if load_config(tmp_path).moe is None else WAYS_OF_EXPERTS
    name = [*ways][turn % len(ways)]
    kind = name.partition(" ")[0]
    refused, why = REFUSED.get(kind, ((), ""))
    if kind == "pp" and family in TOO_FEW:
        refused, why = TOO_FEW, "use fewer"
    if family in refused:
        with pytest.raises(ConfigError, match=rf"^parallel\.\w+=2: .*{why}"):
            ways[name](tmp_path)
        return
    one, several = Serving(tmp_path), ways[name](tmp_path)
    (tokens, rows), (found, found_rows) = answers(one), answers(several)
    one.close()
    several.close()

    assert found == tokens, name
    assert np.abs(found_rows - rows).max() < CLOSE
