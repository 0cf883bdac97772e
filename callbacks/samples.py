"""Callbacks that sample responses: texts, their KL to the reference, and their gold reward."""

import math
import re
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import move_data_to_device, rank_zero_info
from torch import Tensor

from pacmr_lightning.batch import PairBatch
from pacmr_lightning.errors import UserError, check_at_least
from pacmr_lightning.evaluation import generation
from pacmr_lightning.evaluation.prompt_batch import PromptBatch
from pacmr_lightning.files import read_json_lines, write_json_lines
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.modules.metrics import last_update, log_numbers, name_with_step
from pacmr_lightning.modules.schedule import datamodule, planned_updates
from pacmr_lightning.runs.folder import RESPONSES, SAMPLES
from pacmr_lightning.waiting import waiting

from .recurring import Recurring, check_module

Tokens = list[int]
Prompt = tuple[str, str, Tokens]
"""Id, text and tokens."""

FEW, MANY = 0.3, 1.0
"""Tokens that take a tenth of the time of training on one pair: in batches of 4 responses, and of 32.

Measured with a tiny Llama on two CPU cores: training on one pair took as long as sampling 2.9 or 11 tokens.
"""

SAMPLED_TOKENS = 16_384
"""Tokens of the prompts and responses that are sampled at a time; a batch of longer ones is smaller."""


class SampleResponses(Recurring):
    """Greedy responses of reference and policy to a few fixed prompts.

    Tags: the text ``responses``, one table each time. Files: ``responses.jsonl``, with ``step``, ``id``,
    ``prompt``, ``reference`` and ``response`` per prompt and step. Cost: one batch of generation each time.

    Args:
        prompts: number of prompts, the first of ``predict``; None for 4, or for none in a run so short that
            they would take more than about a tenth of its time.
        every: updates between two times, or a share of the run; see ``Recurring``. It also samples at the
            start and at the end.
        max_new_tokens: maximum length of a response in tokens; None for the module's.

    Raises:
        UserError: a number is below 1, or the datamodule has no prompt.
    """

    _batch: PromptBatch
    """On the ranks that generate: rank 0, or all ranks under ZeRO-3."""

    def __init__(
        self, prompts: int | None = None, every: int | float = 500, max_new_tokens: int | None = None
    ):
        super().__init__(every)
        check_at_least(1, prompts=prompts, max_new_tokens=max_new_tokens)
        self.prompts = prompts
        self.max_new_tokens = max_new_tokens
        self._generates = False
        self._reference: list[str] = []
        self._rows: list[dict[str, Any]] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Generate with the reference, the only time, and with the policy."""
        check_module(self, pl_module)
        self._generates = trainer.is_global_zero or pl_module.policy.is_sharded
        count = self.prompts or 4
        tokens = 3 * count * (self.max_new_tokens or pl_module.max_new_tokens)
        if self.prompts is None and tokens > FEW * trained_pairs(trainer):
            rank_zero_info(
                f"SampleResponses is off in a run of {trained_pairs(trainer):,} pairs; prompts turns it on."
            )
            self._generates = False
        if not self._generates:
            return
        batch = collated(trainer, first_prompts(trainer, count, "SampleResponses"))
        self._batch = move_data_to_device(batch, trainer.strategy.root_device)
        with pl_module.policy.reference():
            self._reference = self._responses(trainer, pl_module)
        step, path = trainer.global_step, Path(trainer.default_root_dir) / RESPONSES
        self._rows = []
        if step and path.exists():
            self._rows = [row for _, row in read_json_lines(path) if row["step"] <= step]
        if not self._rows:
            self.look(trainer, pl_module)

    def look(self, trainer: Trainer, pl_module: PreferenceModule) -> None:
        """Generate with the policy; write and log on rank 0."""
        if not self._generates:
            return
        responses = self._responses(trainer, pl_module)
        columns = ("id", "prompt", "reference", "response")
        answered = [*zip(self._batch.ids, self._batch.prompts, self._reference, responses, strict=True)]
        step: dict[str, Any] = {"step": trainer.global_step}
        new = [step | dict(zip(columns, row, strict=True)) for row in answered]
        before = [row for row in self._rows if row["step"] != trainer.global_step]
        self._rows = before + new  # a run may be continued here
        if trainer.is_global_zero:
            write_json_lines(Path(trainer.default_root_dir) / RESPONSES, self._rows)
            log_responses(trainer, answered)

    def _responses(self, trainer: Trainer, pl_module: PreferenceModule) -> list[str]:
        limit = self.max_new_tokens or pl_module.max_new_tokens
        policy, tokenizer = pl_module.policy, datamodule(trainer).tokenizer
        with waiting(f"Sampling {len(self._batch)} responses"):
            answered = generation.respond(policy, tokenizer, self._batch, limit, generation.Decoding())
            return [response.text for response in answered]


class SequenceKL(Recurring):
    """KL(pi || pi_ref) of whole responses, in nats, from responses that the policy samples at temperature 1.

    It is the mean over samples of sum_t KL(pi(. | x, y_<t) || pi_ref(. | x, y_<t)) over the whole vocabulary,
    which has less variance than that of log(pi / pi_ref). Compare rewards of runs at similar KL only.

    Tags: ``val/sequence_kl``, ``val/sequence_kl_stderr`` (of the mean), ``val/response_tokens`` (mean length
    with EOS), and signs of degeneration: ``val/response_perplexity`` (under the reference) and
    ``val/response_repetition``. Files: none. Cost, each time: the generation, and one forward pass of policy
    and reference over the responses.

    Prompts are the first of ``predict``, repeated if too few. All ranks sample the same responses, as sharded
    models need.

    Args:
        samples: number of responses, at least 2; None for 64, or for as many as take about a tenth of the
            training time, and for none if those are fewer than 8.
        max_new_tokens: length in tokens at which a response is truncated.
        batch_size: responses at a time; fewer of long prompts.
        seed: of the sampling.
        every: updates between two times before the end, or a share of the run; see ``Recurring``. None for
            the end only.

    Raises:
        UserError: an option is out of range, the data has no prompt, or the model too few positions for one.
    """

    def __init__(
        self,
        samples: int | None = None,
        max_new_tokens: int = 64,
        batch_size: int = 32,
        seed: int = 0,
        every: int | float | None = None,
    ):
        super().__init__(every)
        check_at_least(2, samples=samples)
        check_at_least(1, max_new_tokens=max_new_tokens, batch_size=batch_size)
        self.samples = samples
        self.max_new_tokens = max_new_tokens
        self.batch_size = batch_size
        self.seed = seed
        self._count = 0
        """Responses to sample in this fit."""

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Check the prompts before the reference or the training take time."""
        check_module(self, pl_module)
        pairs = trained_pairs(trainer)
        affordable = int(min(64, MANY * pairs / self.max_new_tokens))
        self._count = self.samples or (affordable if affordable >= 8 else 0)
        if self.samples is None and affordable < 64:
            what = f"samples {affordable} responses" if self._count else "is off"
            rank_zero_info(f"{type(self).__name__} {what} in a run of {pairs:,} pairs; samples sets it.")
        if self._count:
            batch = collated(trainer, self._prompts(trainer))
            generation.check_room(pl_module.policy, batch, self.max_new_tokens)

    def look(self, trainer: Trainer, pl_module: PreferenceModule) -> None:
        """Sample and log; all ranks do the same."""
        if self._count:
            with waiting(f"Sampling {self._count} responses for {type(self).__name__}"):
                self._sample(trainer, pl_module)

    def _prompts(self, trainer: Trainer) -> list[Prompt]:
        """Return the id, text and tokens of each response's prompt."""
        return list(islice(cycle(first_prompts(trainer, self._count, type(self).__name__)), self._count))

    def _sample(self, trainer: Trainer, pl_module: PreferenceModule) -> tuple[list[Prompt], list[Tokens]]:
        """Return prompts and sampled responses, and log their KL."""
        prompts = self._prompts(trainer)
        tokenizer, policy = datamodule(trainer).tokenizer, pl_module.policy
        device, pad = trainer.strategy.root_device, tokenizer.pad_token_id
        sampling = generation.Decoding(temperature=1.0)
        responses: list[Tokens] = []
        kl, reference = [], []
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            while len(responses) < len(prompts):
                part = self._next_part(prompts[len(responses) :])
                batch = move_data_to_device(collated(trainer, part), device)
                answered = generation.generated(policy, tokenizer, batch, self.max_new_tokens, sampling)
                # A pair needs two responses; the second is as short as possible and ignored.
                second = [[tokenizer.eos_token_id]] * len(part)
                asked = [tokens for *_, tokens in part]
                pairs = PairBatch.collate(batch.ids, asked, answered, second, pad_id=pad)
                judged = policy.judged(move_data_to_device(pairs, device))
                kl.append(judged.chosen_kl)
                reference.append(judged.reference.chosen)
                responses += answered
        tokens = sum(map(len, responses))
        perplexity = torch.exp(-torch.cat(reference).cpu().double().sum() / tokens)
        numbers = {
            **mean_and_error("sequence_kl", torch.cat(kl)),
            "val/response_tokens": tokens / len(responses),
            "val/response_perplexity": float(perplexity),
            "val/response_repetition": generation.repeated_bigrams(responses),
        }
        log_numbers(trainer, numbers)
        return prompts, responses

    def _next_part(self, prompts: list[Prompt]) -> list[Prompt]:
        """Return the first prompts: as many as may be sampled at a time, but at least one."""
        part = prompts[: self.batch_size]
        room = SAMPLED_TOKENS // (max(len(tokens) for *_, tokens in part) + self.max_new_tokens)
        return part[: max(1, room)]


class GoldReward(SequenceKL):
    """Mean gold reward of responses that the policy samples at temperature 1, and their KL.

    Tags: those of ``SequenceKL``, ``val/gold_reward`` and ``val/gold_reward_stderr`` (of the mean). Files:
    ``samples.jsonl``, with ``prompt``, ``response`` and ``gold_reward``, of the last time. Cost: that of
    ``SequenceKL`` and the reward's own.

    Args:
        samples: number of responses, at least 2.
        batch_size: responses at a time; fewer of long prompts.
        second_reward: another reward, which nothing was trained on, logged as ``val/second_reward`` with its
            standard error. A policy that exploits the gold reward raises only that one.
        options: ``max_new_tokens``, ``seed`` and ``every`` of ``SequenceKL``.

    Raises:
        UserError: as ``SequenceKL``; or the data has no gold reward.
    """

    def __init__(
        self,
        samples: int = 512,
        batch_size: int = 128,
        second_reward: Callable[[str, str], float] | None = None,
        **options: Any,
    ):
        super().__init__(samples, batch_size=batch_size, **options)
        self.second_reward = second_reward

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that the data has a gold reward before the training takes time."""
        data = datamodule(trainer)
        if stage != "fit":
            return
        check_module(self, pl_module)
        if getattr(data, "gold_reward", None) is None:
            task = "of this run" if data is None else f"of task {data.task}"
            raise UserError(
                f"The data {task} has no gold reward; remove GoldReward from trainer.callbacks, or give a "
                "reward with --data.source.reward, or train on the synthetic benchmark."
            )

    def _sample(self, trainer: Trainer, pl_module: PreferenceModule) -> tuple[list[Prompt], list[Tokens]]:
        """As ``SequenceKL``; also log the rewards, and write the samples on rank 0."""
        prompts, tokens = super()._sample(trainer, pl_module)
        data = datamodule(trainer)
        answered = [
            (text, generation.decode_response(data.tokenizer, asked, response))
            for (_, text, asked), response in zip(prompts, tokens, strict=True)
        ]
        scores = [float(data.gold_reward(*pair)) for pair in answered]
        numbers = mean_and_error("gold_reward", torch.tensor(scores, dtype=torch.double))
        if self.second_reward is not None:
            others = [self.second_reward(*pair) for pair in answered]
            numbers |= mean_and_error("second_reward", torch.tensor(others, dtype=torch.double))
        log_numbers(trainer, numbers)
        if trainer.is_global_zero:
            rows = [
                {"prompt": prompt, "response": response, "gold_reward": score}
                for (prompt, response), score in zip(answered, scores, strict=True)
            ]
            write_json_lines(Path(trainer.default_root_dir) / SAMPLES, rows)
        return prompts, tokens


def trained_pairs(trainer: Trainer) -> float:
    """Return the pairs of all epochs of a fit; infinity if the data has no ``global_batch_size``."""
    return planned_updates(trainer) * getattr(datamodule(trainer), "global_batch_size", math.inf)


def first_prompts(trainer: Trainer, count: int, asker: str) -> list[Prompt]:
    """Return the first ``count`` prompts of ``predict``, or all; UserError if there is none."""
    with torch.random.fork_rng(devices=[]):  # a loader draws a seed
        rows = [
            (batch.ids[i], batch.prompts[i], batch.input_ids[i][batch.attention_mask[i] == 1].tolist())
            for batch in islice(datamodule(trainer).predict_dataloader(), count)
            for i in range(len(batch))
        ]
    if not rows:
        raise UserError(f"{asker} needs prompts, but the data has none; remove it from trainer.callbacks.")
    return rows[:count]


def collated(trainer: Trainer, prompts: list[Prompt]) -> PromptBatch:
    """Return prompts as one CPU batch."""
    return PromptBatch.collate(*zip(*prompts, strict=True), pad_id=datamodule(trainer).tokenizer.pad_token_id)


def mean_and_error(name: str, values: Tensor) -> dict[str, float]:
    """Return the mean of (N,) values as ``val/NAME``, and its standard error as ``val/NAME_stderr``."""
    values = values.cpu().double()
    error = values.std() / len(values) ** 0.5
    return {f"val/{name}": float(values.mean()), f"val/{name}_stderr": float(error)}


def log_responses(trainer: Trainer, rows: Sequence[Sequence[str]]) -> None:
    """Log ids, prompts and responses as one table; in MLflow as the artifact ``responses-step-NNNNN.md``."""
    headings = ["Prompt", "Reference", "Policy"]
    cells = [[verbatim(text) for text in row] for row in rows]
    lines = [["", *headings], ["---"] * (1 + len(headings)), *cells]
    page = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    file = f"{name_with_step(trainer, 'responses')}.md"
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text("responses", page, last_update(trainer))
        elif isinstance(logger, WandbLogger):
            logger.log_text("responses", ["id", *headings], [*map(list, rows)], step=last_update(trainer))
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_text(logger.run_id, f"{page}\n", file)


def verbatim(text: str) -> str:
    """Return Markdown that shows a text as it is in a table's cell."""
    marks = re.sub(r"[^\w\s.,;:?'\"()/+=-]|_", lambda match: f"&#{ord(match[0])};", text)
    return "<br>".join(marks.splitlines())
