"""Callback that writes the responses of ``predict``."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import rank_zero_info

from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.answer_store import AnswerStore, content_key
from pacmr_lightning.evaluation.generation import Decoding, generation_key
from pacmr_lightning.evaluation.prompt_batch import PromptBatch, Response
from pacmr_lightning.evaluation.response_files import answers_path, output_path
from pacmr_lightning.files import write_json_lines
from pacmr_lightning.modules.schedule import datamodule
from pacmr_lightning.runs.folder import GENERATIONS
from pacmr_lightning.strategies.ranks import on_all_ranks


class GenerationWriter(BasePredictionWriter):
    """Writer of the responses that ``predict`` generates, as JSON Lines in the order of the data.

    Tags: none. Files, by default in the run's folder, none with ``fast_dev_run``:

    - ``generations.jsonl``, one row per prompt: ``id``, ``prompt`` (a text, or chat messages), ``response``,
      ``finish_reason`` (``stop``, or ``length`` if truncated), ``prompt_tokens`` and ``response_tokens``.
    - ``generations.jsonl.answers.sqlite``, each response as soon as it is generated. It stays after the run:
      the same command then reuses its responses, also after a kill. Delete it to free the space.

    Cost: one write per batch, and the disk space of the responses twice.

    Args:
        output: file to write, ending in .jsonl; None for ``generations.jsonl`` in the run's folder.
        temperature: of the sampling; 0 for greedy responses.
        top_p: sample from the most likely tokens that together have this probability, in (0, 1].
        seed: of the sampling; samples also depend on the batch size.

    Raises:
        UserError: an option is out of range, or the file cannot be written, or would lose rows.
    """

    def __init__(
        self, output: str | None = None, temperature: float = 0.0, top_p: float = 1.0, seed: int = 42
    ):
        super().__init__(write_interval="batch")
        self.output = output
        self.decoding = Decoding(temperature, top_p, seed)
        self._store: AnswerStore | None = None
        self._rows: dict[int, dict[str, Any]] = {}
        self._stored = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that the file can be written before any model is loaded."""
        self._path = output_path(self.output or Path(trainer.default_root_dir) / GENERATIONS)
        if refuse := getattr(getattr(datamodule(trainer), "source", None), "refuse_own", None):
            refuse("generation.output", self._path)
        self._answers = answers_path(self._path)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the stored responses of an earlier run."""
        if pl_module.policy.is_sharded:
            raise UserError(
                "predict needs the whole model on each device, but trainer.strategy shards it; set "
                "trainer.strategy to auto or ddp."
            )
        tokenizer, limit = datamodule(trainer).tokenizer, pl_module.max_new_tokens
        self._key = generation_key(pl_module.policy, tokenizer, limit, self.decoding)
        stored = self._answers.exists() and not trainer.fast_dev_run
        self._store = AnswerStore(self._answers) if stored else None
        self._rows, self._stored = {}, 0
        if not pl_module.policy.is_trained:
            rank_zero_info(
                "The adapter is untrained, so these are the reference's responses; --ckpt_path names a "
                "trained policy."
            )

    def on_predict_batch_start(self, trainer: Trainer, pl_module: Any, batch: PromptBatch, *_: Any) -> None:
        """Set the batch's decoding; take its responses from the store if it has all."""
        batch.decoding = self.decoding
        if self._store is not None:
            answers = self._store.get(keys := self._keys(batch))
            if all(key in answers for key in keys):
                batch.answers = [Response(**answers[key]) for key in keys]

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: list[Response], at: Any, batch: PromptBatch, *_: Any
    ) -> None:
        """Store a batch's responses, all or none."""
        if trainer.fast_dev_run:
            return
        if batch.answers is None:
            self._store = self._store or AnswerStore(self._answers)
            self._store.put(dict(zip(self._keys(batch), map(asdict, prediction), strict=True)))
        else:
            self._stored += len(batch)
        rows = zip(batch.places, batch.ids, batch.asked, prediction, batch.columns, strict=True)
        self._rows |= {
            place: response.row(name, asked) | columns for place, name, asked, response, columns in rows
        }

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the ranks' rows and write the file."""
        if self._store is None:  # fast_dev_run; else every rank has had a batch, which opened it
            return
        self._store.close()
        parts = on_all_ranks([(self._rows, self._stored)])
        by_place = {place: row for rows, _ in parts for place, row in rows.items()}
        stored = sum(count for _, count in parts)
        if not trainer.is_global_zero:
            return
        rows = [by_place[place] for place in sorted(by_place)]
        there = self._path.read_bytes().splitlines() if self._path.exists() else []
        limited = trainer.limit_predict_batches
        if (isinstance(limited, int) or limited < 1) and len(rows) < len(there):  # 1 is a batch, 1.0 all
            raise UserError(
                f"trainer.limit_predict_batches would leave {len(rows)} of {len(there)} responses in "
                f"{self._path}; leave it out, or name another file with --generation.output."
            )
        write_json_lines(self._path, rows)
        cut = sum(row["finish_reason"] == "length" for row in rows)
        earlier = f"; {stored} came from an earlier run" if stored else ""
        limit = pl_module.max_new_tokens
        rank_zero_info(
            f"{len(rows)} responses are in {self._path}, {cut} of them truncated at {limit} tokens{earlier}."
        )

    def _keys(self, batch: PromptBatch) -> list[str]:
        rows = zip(batch.input_ids, batch.attention_mask, strict=True)
        return [content_key(self._key, tokens[mask == 1].tolist()) for tokens, mask in rows]
