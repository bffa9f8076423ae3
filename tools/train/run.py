"""Runs all stages: tokenizer, training, export and evaluation."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch.multiprocessing
from tokenizers import Tokenizer
from torch import distributed

from tools.train import evaluate
from tools.train.export import export_checkpoint
from tools.train.loop import TrainConfig, Trainer
from tools.train.tokenizer import save_tokenizer, train_tokenizer


def work(rank: int, config: TrainConfig, output: Path, folder: Path, resume: Path | None) -> None:
    """Run one training process."""
    meeting = f"file://{(folder / 'meeting').resolve()}"
    distributed.init_process_group("gloo", meeting, rank=rank, world_size=config.workers)
    tokenizer = Tokenizer.from_file(str(output / "tokenizer.json"))
    trainer = Trainer(config, tokenizer, folder, rank)
    if resume:
        trainer.load(resume)
    trainer.run()
    distributed.destroy_process_group()


def train(config: TrainConfig, output: Path, folder: Path, resume: Path | None) -> None:
    """Train with all workers; leave the checkpoint in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meeting").unlink(missing_ok=True)
    torch.multiprocessing.spawn(work, (config, output, folder, resume), config.workers)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Train sapling from nothing.")
    parser.add_argument("--steps", type=int, default=TrainConfig.steps, help="about 0.6 s each")
    parser.add_argument("--seed", type=int, default=TrainConfig.seed)
    parser.add_argument("--workers", type=int, default=TrainConfig.workers)
    parser.add_argument("--check-every", type=int, default=TrainConfig.check_every)
    parser.add_argument("--output", type=Path, default=evaluate.ASSETS, help="model directory")
    parser.add_argument("--work", type=Path, default=Path("build/sapling"), help="checkpoints")
    parser.add_argument("--resume", type=Path, help="continue exactly from this checkpoint")
    chosen = parser.parse_args(arguments)
    if not chosen.resume:
        save_tokenizer(train_tokenizer(chosen.seed), chosen.output)
    config = TrainConfig(
        seed=chosen.seed,
        steps=chosen.steps,
        workers=chosen.workers,
        check_every=chosen.check_every,
    )
    train(config, chosen.output, chosen.work, chosen.resume)
    tokenizer = Tokenizer.from_file(str(chosen.output / "tokenizer.json"))
    count = export_checkpoint(chosen.work / "last.pt", tokenizer, chosen.output)
    print(f"exported {count} parameters to {chosen.output}")
    evaluate.main(["--model", str(chosen.output)])


if __name__ == "__main__":
    main()
