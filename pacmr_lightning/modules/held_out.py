"""What a preference module does with held-out pairs and prompts: metrics and responses."""

from __future__ import annotations

from ..batch import PairBatch
from ..evaluation.generation import Decoding, respond
from ..evaluation.prompt_batch import PromptBatch, Response
from ..metrics import REWARDS, Means, gold_accuracy, reward_values
from ..objectives import Objective
from ..policy import PolicyModel
from ..rewards import Rewards
from .datamodule import datamodule
from .trained_only import TrainedOnly


class HeldOutSteps(TrainedOnly):
    """Validation, test and prediction of a policy; the base of ``PreferenceModule``, which sets these:"""

    policy: PolicyModel
    objective: Objective
    micro_batch_size: int | None
    max_new_tokens: int

    def __init__(self) -> None:
        super().__init__()
        self.held_out_means = Means((*REWARDS, "kl", "gold_accuracy"))
        self.decoding = Decoding()

    def validation_step(self, batch: PairBatch, batch_idx: int) -> None:
        """Adds N held-out pairs to the means: the unweighted loss, rewards, KL to the reference."""
        self._held_out_step(batch)

    def test_step(self, batch: PairBatch, batch_idx: int) -> None:
        """As ``validation_step``."""
        self._held_out_step(batch)

    def _held_out_step(self, batch: PairBatch) -> None:
        parts = batch.micro_batches(self.micro_batch_size)
        for part, counts in self.policy.in_step(parts, batch[:1]):
            judged = self.policy.judged(part)
            rewards = Rewards.of(judged.policy, part.with_reference(judged.reference), self.objective.beta)
            values = {**reward_values(rewards, self.objective(rewards)), "kl": judged.token_kl}
            if part.eta is not None:
                values["gold_accuracy"] = gold_accuracy(rewards, part.eta)
            if counts:
                self.held_out_means.update(values)

    def on_validation_epoch_end(self) -> None:
        """Logs the means as ``val/...``."""
        self._log_held_out("val")

    def on_test_epoch_end(self) -> None:
        """Logs the means as ``test/...``."""
        self._log_held_out("test")

    def _log_held_out(self, split: str) -> None:
        for name, value in self.held_out_means.compute().items():
            shown = name in ("loss", "rewards/accuracies")
            self.log(f"{split}/{name}", value, prog_bar=shown)

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[Response]:
        """Responses to N prompts, decoded as ``decoding`` says; the answers that the batch brings, if any."""
        if batch.answers is not None:
            return batch.answers
        tokenizer = datamodule(self.trainer).tokenizer
        return respond(self.policy, tokenizer, batch, self.max_new_tokens, self.decoding)
