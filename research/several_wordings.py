"""Consistency over three augmented prompts of the synthetic benchmark, not one: does it help VNet?

    PYTHONPATH=. pacmr fit --config quickstart/preference --config methods/pacmr \\
      --model.policy.model MODEL \\
      --model.weighting.estimator GhostDotProduct --model.objective.beta 2 \\
      --model.weighting.outer research.several_wordings.SeveralWordings \\
      --model.weighting.outer.tokenizer MODEL

A custom outer objective (docs/extending.md), evaluated in research/notebook/changes-to-pacmr.md.
"""

from __future__ import annotations

from lightning.fabric.utilities import move_data_to_device

from pacmr_lightning.batch import PairBatch, Segment
from pacmr_lightning.datamodules.tokenizer import load_tokenizer
from pacmr_lightning.embedded_world import World
from pacmr_lightning.meta_gradient.outer_objectives import OuterGradient, PromptAugmentationConsistency
from pacmr_lightning.policy import PolicyModel


class SeveralWordings(PromptAugmentationConsistency):
    """Qu et al.'s outer objective, with three augmented prompts per pair of the meta-batch.

    Args:
        tokenizer: the policy's, a folder.
        tau: see ``PromptAugmentationConsistency``.
    """

    def __init__(self, tokenizer: str, tau: float = 0.6):
        super().__init__(tau)
        self.tokenizer = load_tokenizer(tokenizer)

    def gradient(
        self, policy: PolicyModel, beta: float, meta: PairBatch, micro_batch_size: int | None
    ) -> OuterGradient:
        """Return the gradient of 3 M pairs: each original three times, with one augmented prompt each."""
        if meta.augmented is None:  # clean pairs; the parent raises
            return super().gradient(policy, beta, meta, micro_batch_size)
        rows = list(zip(meta.input_ids, meta.segment_ids, strict=True))
        prompts, chosen, rejected = (
            [ids[segments == part].tolist() for ids, segments in rows]
            for part in (Segment.PROMPT, Segment.CHOSEN, Segment.REJECTED)
        )
        others = zip(*map(self._others, prompts), strict=True)

        def collate(rows: list[list[int]]) -> PairBatch:
            known = meta.flipped.tolist() * 3
            batch = PairBatch.collate(meta.ids * 3, rows, chosen * 3, rejected * 3, flipped=known)
            return move_data_to_device(batch, meta.input_ids.device)

        pairs = collate(prompts * 3)
        pairs.augmented = collate([ids for wording in others for ids in wording])
        return super().gradient(policy, beta, pairs, micro_batch_size)

    def _others(self, prompt: list[int]) -> list[list[int]]:
        """Return token ids with another word for the topic, for the mood, and for both."""
        text = self.tokenizer.decode(prompt, skip_special_tokens=True)
        words, both = text.split(), World().reword(text).split()
        topic, mood = (i for i, (word, other) in enumerate(zip(words, both, strict=True)) if word != other)

        def encode(text: str) -> list[int]:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]

        start = prompt[: len(prompt) - len(encode(text))]  # BOS, where there is one
        found = []
        for changed in ((topic,), (mood,), (topic, mood)):
            other = " ".join(both[i] if i in changed else word for i, word in enumerate(words))
            found.append(start + encode(text.replace(text.strip(), other)))
        return found
