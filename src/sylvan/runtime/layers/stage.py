"""Pipeline stages: ranks that hold consecutive layers, and the links between them.

Shapes: T rows of a step, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sylvan.kernels.api import Communicator


@dataclass(frozen=True, slots=True)
class Stage:
    """This rank's stage of the pipeline.

    Links are groups of two ranks, the sender first; steps pass them in the same order.

    Attributes:
        number: Number of the stage, from 0.
        count: Number of stages; 1: there is no pipeline.
        num_layers: Layers of the model.
        num_last: Layers of the last stage; 0: as many as the others.
        dim: D.
        before: Link from the previous stage; None: this is the first.
        after: Link to the next stage; None: this is the last.
    """

    number: int = 0
    count: int = 1
    num_layers: int = 0
    num_last: int = 0
    dim: int = 0
    before: Communicator | None = None
    after: Communicator | None = None

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it samples."""
        return self.number == self.count - 1

    @property
    def layers(self) -> range:
        """The layers of this stage; the first stages hold the remainder of the division."""
        last = self.num_last or self.num_layers // self.count
        if self.is_last:
            return range(self.num_layers - last, self.num_layers)
        each, left = divmod(self.num_layers - last, self.count - 1)
        start = self.number * each + min(self.number, left)
        return range(start, start + each + (self.number < left))

    @property
    def last_layer(self) -> int | None:
        """The layer after which the residual stream is sent on; None: this is the last stage."""
        return None if self.is_last else self.layers[-1]

    def receive(self, num_rows: int) -> torch.Tensor:
        """Receive the residual stream of a step's rows from the previous stage: float32 (T, D).

        Raises:
            RankLostError: That stage has exited, or timed out.
        """
        assert self.before is not None
        return self.before.all_gather(torch.empty(num_rows, self.dim, dtype=torch.float32))[0]

    def send(self, stream_TD: torch.Tensor) -> None:
        """Send the residual stream of a step's rows to the next stage; wait until it is received.

        Raises:
            RankLostError: That stage has exited, or timed out.
        """
        assert self.after is not None
        self.after.all_gather(stream_TD.float().contiguous())

    def check(self) -> None:
        """Raise RankLostError if a link has failed."""
        for link in (self.before, self.after):
            if link is not None:
                link.check()

    def close(self) -> None:
        """Close the links; stages that wait for this one get RankLostError."""
        for link in (self.before, self.after):
            if link is not None:
                link.close()


WHOLE_MODEL = Stage()
