"""A callback: what a run shows and writes down."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class LeastTrusted(Callback):
    """Writes the ids of the pairs that counted least at their last visit to ``least_trusted.txt``.

    Args:
        pairs: how many.
    """

    def __init__(self, pairs: int = 20):
        self.pairs = pairs
        self.weights: dict[str, float] = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Remembers this rank's weights."""
        record = outputs["record"]
        self.weights.update(zip(record.ids, record.weight.tolist(), strict=True))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the file into the run's folder."""
        if trainer.is_global_zero:
            least = sorted(self.weights, key=self.weights.get)[: self.pairs]
            Path(trainer.default_root_dir, "least_trusted.txt").write_text("\n".join(least) + "\n")

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"weights": self.weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a checkpoint."""
        self.weights = state_dict["weights"]
