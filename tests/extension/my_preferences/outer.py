"""An outer objective for VNetWeighting: what the policy should be good at after the virtual step."""

import torch
from torch import Tensor

from pacmr_lightning.batch import MicroBatchSize, PairBatch
from pacmr_lightning.errors import UserError
from pacmr_lightning.meta_gradient import OuterGradient, OuterObjective
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.strategies.ranks import sum_over_ranks


class BrierConsistency(OuterObjective):
    """Mean squared distance of sigma(u) under the augmented prompt from sigma(u) under the original one."""

    def gradient(
        self, policy: PolicyModel, beta: float, meta: PairBatch, micro_batch_size: MicroBatchSize
    ) -> OuterGradient:
        """See ``OuterObjective``."""
        if meta.augmented is None:
            raise UserError("BrierConsistency needs augmented prompts; remove clean_meta.")
        counts = torch.tensor([float(len(meta)), 0.0], device=meta.input_ids.device)
        total = counts[0].clone()
        sum_over_ranks([total])

        def belief(part: PairBatch) -> Tensor:
            return Rewards(policy.log_probs(part), policy.reference_log_probs(part), beta).u.sigmoid()

        direction = policy.zeros()
        for part in meta.micro_batches(micro_batch_size):
            with torch.no_grad():
                target = belief(part)
            loss = (belief(part.augmented) - target).square().sum()
            counts[1] += loss.detach()
            policy.add_gradient(direction, loss / total)
        sum_over_ranks([counts, *direction.values()])
        return OuterGradient(direction, int(counts[0]), {"meta/loss": counts[1] / counts[0]})
