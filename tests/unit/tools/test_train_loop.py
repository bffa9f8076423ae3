"""An interrupted run continues as if it had not been interrupted."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import distributed

ROOT = Path(__file__).resolve().parents[3]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools.train.data import mix  # noqa: E402
from tools.train.loop import TrainConfig, Trainer  # noqa: E402
from tools.train.model import ModelConfig, Sapling, learnt_positions, rotary_tables  # noqa: E402
from tools.train.rows import LOOKAHEAD, WIDTHS, Batches  # noqa: E402

pytestmark = pytest.mark.slow

ASSETS = ROOT / "src" / "sylvan" / "assets" / "sapling"
CONFIG = TrainConfig(
    steps=4,
    batch_tokens=WIDTHS[-1],
    step_batches=1,
    check_every=2,
    check_per_class=1,
    save_every=2,
    recite_steps=2,
    workers=1,
    compiled=False,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ASSETS / "tokenizer.json"))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    threads = torch.get_num_threads()
    distributed.init_process_group("gloo", f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
    torch.set_num_threads(threads)


class Interrupted(Trainer):
    """Ends in the middle, right after a checkpoint."""

    def save(self, name: str) -> None:
        super().save(name)
        if self.step == 2:
            raise KeyboardInterrupt


@pytest.mark.usefixtures("alone")
def test_an_interrupted_run_continues_exactly(tokenizer: Tokenizer, tmp_path: Path) -> None:
    whole = Trainer(CONFIG, tokenizer, tmp_path)
    whole.run()
    first = Interrupted(CONFIG, tokenizer, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    second = Trainer(CONFIG, tokenizer, tmp_path)
    second.load(tmp_path / "last.pt")
    assert second.step == 2
    second.run()
    assert second.tokens == whole.tokens
    assert second.weights == whole.weights
    assert second.weights != dict(mix.WEIGHTS)  # the checks leant the mix
    for (name, mine), theirs in zip(
        second.average.named_parameters(), whole.average.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
def test_compiled_gradients_are_those_of_plain_torch(tokenizer: Tokenizer) -> None:
    torch.manual_seed(5)
    model = Sapling(ModelConfig(vocab_size=tokenizer.get_vocab_size(), num_layers=1))
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):  # zero at first: hides the rest
            torch.nn.init.normal_(parameter, std=0.05)
    stream = Batches(tokenizer, mix.WEIGHTS, seed=3, rank=0, batch_tokens=2048, step_batches=1)
    tokens, targets = stream.next_step(1.0)[0]
    found: list[dict[str, torch.Tensor]] = []
    for loss in (model.loss, torch.compile(model.loss)):
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            tables = rotary_tables(torch.arange(tokens.shape[1]), model.config)
            loss(tokens, tables, *learnt_positions(targets)).backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    plain, compiled = found
    assert plain.keys() == compiled.keys()
    for name, gradient in plain.items():
        off = (compiled[name] - gradient).norm() / gradient.norm()
        assert off < 0.05, name  # bfloat16, summed in another order


@pytest.mark.usefixtures("alone")
def test_a_loss_that_is_no_number_ends_the_run(tokenizer: Tokenizer, tmp_path: Path) -> None:
    trainer = Trainer(CONFIG, tokenizer, tmp_path)
    with torch.no_grad():
        trainer.model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="step 0"):
        trainer.run()


def test_workers_get_rows_of_their_own_and_widths_alike(tokenizer: Tokenizer) -> None:
    streams = [
        Batches(tokenizer, mix.WEIGHTS, seed=3, rank=rank, batch_tokens=2048, step_batches=2)
        for rank in (0, 1)
    ]
    steps = [[stream.next_step(0.0) for _ in range(2 * LOOKAHEAD)] for stream in streams]
    assert all(len(batches) == 2 for batches in (*steps[0], *steps[1]))
    assert not torch.equal(steps[0][0][0][0], steps[1][0][0][0])
    # a narrow batch comes with a wide one, so that every step is about as much work as the others
    partners = [
        batches[1][0].shape[1]
        for batches in sorted(steps[0][:LOOKAHEAD], key=lambda found: found[0][0].shape[1])
    ]
    assert partners == sorted(partners, reverse=True)
