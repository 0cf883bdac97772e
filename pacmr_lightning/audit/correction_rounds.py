"""PerpCorrect's rounds: DPO on a few clean pairs, and how unlikely its policy finds all other responses."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from ..analysis.pair_log_probs import pair_log_probs
from ..errors import UserError
from ..files import replacing
from ..runs.finished_run import NO_NOISE, PreferenceData, Run, find_run, load
from ..runs.folder import CONFIG
from .perplexity import mean_nll
from .symmetric_mixture import SymmetricMixture, fit_mixture, selection

_FITTED = ("mu", "sigma", "alpha", "threshold", "separation")
"""What the table says of a round's mixture."""


@dataclass(frozen=True)
class Rounds:
    """How PerpCorrect's rounds are trained; the defaults are those of its code.

    Args:
        count: how many.
        share: of the training pairs, which each round learns from beyond those of the round before.
        beta: of DPO.
        learning_rate: at its peak.
        batch_size: pairs of an update.
        epochs: passes over a round's pairs.

    Raises:
        UserError: a number is not above 0, or the shares add up to more than all pairs.
    """

    count: int = 6
    share: float = 0.02
    beta: float = 0.1
    learning_rate: float = 1e-3
    batch_size: int = 4
    epochs: int = 3

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (value > 0 and math.isfinite(value)):
                raise UserError(f"rounds.{name} is {value}, but it must be above 0.")
        if (self.count - 1) * self.share > 1:
            raise UserError(
                f"rounds.share is {self.share}, but the last of {self.count} rounds would then learn from "
                f"more than all training pairs; give at most {1 / (self.count - 1):.3g}."
            )

    def config(self, first: Run, folder: Path, rows: Path) -> dict[str, Any]:
        """Of one round: the first run's model and machine, and DPO on rows of its own.

        Args:
            first: the run whose labels are to be corrected.
            folder: of the round.
            rows: file with its pairs.
        """
        found = yaml.safe_load((Path(first.folder) / CONFIG).read_text(encoding="utf-8"))
        model, data, trainer = (found[section] for section in ("model", "data", "trainer"))
        micro = model["init_args"].get("micro_batch_size")
        model["init_args"] |= {
            "objective": {"class_path": "pacmr_lightning.objectives.DPO", "init_args": {"beta": self.beta}},
            "weighting": {"class_path": "pacmr_lightning.weighting.Unweighted"},
            "method": "perp-correct",
            "learning_rate": self.learning_rate,
            "micro_batch_size": micro and math.gcd(micro, self.batch_size),
        }
        # Nothing is validated, but without a file for it some of the prompts would be set aside.
        files = {"train": str(rows), "validation": str(rows)}
        ignored = (*NO_NOISE, "clean_meta", "hold_out_clean_meta", "augmentations")
        ignored += ("curriculum", "curriculum_share")
        data["init_args"] = {name: value for name, value in data["init_args"].items() if name not in ignored}
        data["init_args"] |= {
            "source": {"class_path": "pacmr_lightning.datamodules.Files", "init_args": files},
            "global_batch_size": self.batch_size,
            "reference": "live",
        }
        kept = ("accelerator", "precision", "deterministic", "enable_progress_bar")
        found["trainer"] = {name: trainer[name] for name in kept} | {
            "devices": 1,
            "max_epochs": self.epochs,
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
            "enable_model_summary": False,
            "default_root_dir": str(folder),
        }
        return {name: found[name] for name in ("seed_everything", "model", "data", "trainer")}

    def run(
        self,
        first: Run,
        data: PreferenceData,
        folder: Path,
        write: Callable[[Path, list[int], list[int]], object],
        fit: Callable[[Path, list[str]], object],
        micro_batch_size: int | None = None,
    ) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Trains the rounds that are not on disk yet.

        Args:
            first: the run whose labels are to be corrected.
            data: its datamodule, with all N training pairs under their labels as trained.
            folder: where the rounds lie.
            write: writes the pairs of a round to a file: the clean ones, training pairs under their label,
                and others under the opposite one.
            fit: trains in a folder, with the words of a command line.
            micro_batch_size: pairs in one forward pass that scores; None is that of training.

        Returns:
            N rows of labels by the best round: ``id``, ``observed``, ``suggested``, ``p_wrong`` (1 from the
            threshold on, else 0), ``posterior`` (by the fitted mixture) and ``d``. And one row a round.

        Raises:
            UserError: in no round the differences tell right labels from wrong ones.
        """
        pairs, number = data.train_pairs, len(data.train_pairs)
        learned: tuple[list[int], list[int]] = ([], [])
        rows, found = [], []
        for i in range(1, self.count + 1):
            place = folder / str(i)
            if not (place / _SCORES).exists():
                print(
                    f"Round {i} of {self.count}: {len(learned[0])} labels kept, {len(learned[1])} exchanged."
                )
                # Written on every start, and the same each time.
                write(folder / f"{i}.jsonl", *learned)
                config = self.config(first, place, folder / f"{i}.jsonl")
                with replacing(folder / f"{i}.yaml") as temporary:
                    temporary.write_text(yaml.safe_dump(config), encoding="utf-8")
                fit(place, ["--config", str(folder / f"{i}.yaml")])
                _score(place, pairs, micro_batch_size)
            d = pd.read_parquet(place / _SCORES)["d"].to_numpy()
            mixture = fit_mixture(d)
            found.append((mixture, d))
            fitted = {name: getattr(mixture, name) for name in _FITTED}
            fitted |= {"changed": int((d >= mixture.threshold).sum()), "problem": mixture.problem or ""}
            rows.append({"round": i, "kept": len(learned[0]), "exchanged": len(learned[1]), **fitted})
            learned = selection(d, mixture.alpha, min(i * round(self.share * number), number))
        table = pd.DataFrame(rows)
        best = _best(found)
        table["best"] = table["round"] == best + 1
        mixture, d = found[best]
        wrong = d >= mixture.threshold
        labels = {
            "id": pairs.rows["id"][:],
            "observed": np.where(pairs.swapped, "rejected", "chosen"),
            "suggested": np.where(wrong, "flip", "keep"),
            "p_wrong": wrong.astype(float),  # PerpCorrect decides; the next is what it decides by
            "posterior": mixture.wrong(d),
            "d": d,
        }
        return pd.DataFrame(labels), table


_SCORES = "scores.parquet"
"""Inside a round's folder: it is complete."""


def _score(folder: Path, pairs: Any, micro_batch_size: int | None) -> None:
    """Writes d = log PPL(chosen) - log PPL(rejected) of N pairs by a round's policy."""
    module, *_ = load(find_run(str(folder), "last"), as_trained=True)
    nll = pair_log_probs(
        module,
        pairs,
        list(range(len(pairs))),
        folder / "answers.sqlite",
        name=f"Round {folder.name}",
        micro_batch_size=micro_batch_size,
        ask=mean_nll,
    ).squeeze(1)
    with replacing(folder / _SCORES) as temporary:
        pd.DataFrame({"d": (nll[:, 0] - nll[:, 1]).double().numpy()}).to_parquet(temporary)
    del module
    gc.collect()  # the next round's model needs its memory


def _best(found: list[tuple[SymmetricMixture, np.ndarray]]) -> int:
    good = [i for i, (mixture, _) in enumerate(found) if mixture.problem is None]
    if not good:
        reasons = "; ".join(f"{i} {mixture.problem}" for i, (mixture, _) in enumerate(found, start=1))
        raise UserError(
            f"In no round the perplexity differences tell right labels from wrong ones (the fit of round "
            f"{reasons}); give more clean pairs, or other --rounds.learning_rate, --rounds.epochs or "
            "--rounds.beta, with another --output."
        )
    return max(good, key=lambda i: found[i][0].separation)
