"""Names the labels of a run's training pairs that look wrong, and writes the pairs without them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from lightning.fabric import Fabric

from ..audit.scorers import NAMES, Scorer
from ..command_line.parser import run_tool
from ..datamodules.cleaned import check_output
from ..errors import UserError
from ..modules import PreferenceModule
from ..objectives import AnnotatorRPOEM
from ..runs.finished_run import PreferenceData, find_run, load
from ..runs.folder import read_weights, weight_parts
from ..weighting import AuditedWeights, DropFlipped, OracleWeights
from .audit_conclusion import Judged, conclude
from .audit_options import Action, Wanted
from .audit_upload import Upload, words_of


def audit(
    run: str,
    scorer: Scorer | None = None,
    output: str | None = None,
    checkpoint: str = "last",
    top: int = 50,
    threshold: float = 0.5,
    share: float | None = None,
    fallback_share: float | None = None,
    cleaned: str | None = None,
    action: Action | None = None,
    sample: int = 0,
    decisions: str | None = None,
    label_studio: str | None = None,
    micro_batch_size: int | None = None,
    push_cleaned: str | None = None,
    private: bool = False,
) -> pd.DataFrame:
    """Looks at all training pairs of a finished run once more, labels as trained.

    Writes ``pairs.parquet`` and ``pairs.csv`` (one row a pair, the most suspect first), ``methods.csv`` (what
    each score found), ``groups.csv`` (how reliable each category's and annotator's labels are),
    ``suspect_traits.csv`` (what suspects have in common) and ``report.html``. What a model computed or
    learned stays in ``audit`` inside the run's folder, so that a second call goes on where the first was
    killed.

    Args:
        run: folder of a preference run.
        scorer: who judges: "vnet" is the run's own weights, "dpo" two DPO policies, trained for it on half of
            the prompts each, about the half that they have not seen, "policy" the run's own policy,
            "first_visit" the same as it was before it learned from the pair for the first time, by the
            records of WeightRecorder, "probe" a linear reward on what the untouched model's layers hold of
            the responses, learned from the labels of other prompts. Default: the probe where it agrees
            with more labels, which it has not seen, than the run's policy before it learned from each pair,
            by more than a standard error; else the weights where they differ, and the policy where they do
            not.
        output: folder to write to; default: ``audit`` inside the run's folder.
        checkpoint: which of the folder ``checkpoints``, by its name without .ckpt.
        top: pairs in the report.
        threshold: a label is suspect where it is wrong with a probability above this.
        share: of wrong labels, where it is known, say from a sample read by hand; default: estimated, which
            fails where the policy has learned too little.
        fallback_share: of wrong labels, where the estimate fails or would be too low, since the policy has
            learned its labels by heart; less where so few labels are against the policy on the pairs that it
            is surest of that no such share of independent flips can be among them, and none where scores fit
            labels that are coin flips as well: ``share`` tells these, too, how many are wrong.
        cleaned: file to write the training pairs to, in the format of the run's data; it is replaced where it
            exists.
        action: what is done there with suspects: "drop" them, or "flip" their label; with ``decisions`` it
            may be left out, and then only what is decided changes.
        sample: number of pairs drawn at random that the report lists first, without a word of what the audit
            makes of them, so that the share of wrong labels can be told from decisions on them.
        decisions: file of decisions on pairs, as the report's page saves it or Label Studio exports it.
            Decided labels are wrong with probability 0 or 1, ``cleaned`` follows them, and those on the
            random sample tell the share of wrong labels where ``share`` does not.
        label_studio: file to write the listed pairs to, as tasks of Label Studio (.json).
        micro_batch_size: pairs in one forward pass; default: as in training, at most 32 of a whole batch.
        push_cleaned: repository at the Hugging Face Hub, OWNER/NAME, to upload ``cleaned`` to as a dataset,
            with a card; made where it does not exist. The token is that of HF_TOKEN, or of hf auth login.
        private: make a private repository.

    Returns:
        The rows of ``pairs.parquet``.

    Raises:
        UserError: an option is out of range, the run's files are missing or do not fit, or the run has no
            scorer of the kind; or the Hub refuses the upload.
    """
    run = str(run)
    upload = Upload(push_cleaned, private, words_of(audit, locals()))
    by_hand = (sample, decisions, label_studio)
    wanted = Wanted(top, threshold, share, fallback_share, cleaned, action, *by_hand, upload, output)
    if micro_batch_size is not None and micro_batch_size < 1:
        raise UserError(f"micro_batch_size is {micro_batch_size}, but it must be at least 1.")
    # scikit-learn and matplotlib are loaded here so that pacmr --help stays quick.
    from ..analysis.last_pass import last_pass
    from ..audit.cross_fit import FOLDER, CrossFit
    from ..audit.linear_probe import FOLDS, probe_log_odds
    from ..audit.own_pull import own_pull

    found = find_run(run, checkpoint)
    choose = scorer is None and bool(weight_parts(run))
    visits = read_weights(run) if choose or scorer == "first_visit" else None
    module, data, updates = load(found, as_trained=True)
    micro_batch_size = micro_batch_size or module.micro_batch_size  # cross-fitting's policies too
    data.setup("fit")
    wanted.check_pairs(data.train_pairs.rows["id"][:], data.train_pairs.swapped)
    if cleaned is not None:
        check_output(data.source, cleaned)
    kept = Path(run) / "audit"
    Fabric(accelerator="auto", devices=1).to_device(module.policy)
    data.fill_train_reference(module.policy)
    pairs = last_pass(module, data.train_pairs, kept / "answers.sqlite", micro_batch_size=micro_batch_size)
    who = data.annotators
    if who is not None:
        pairs.insert(list(pairs.columns).index("category") + 1, "annotator", pairs["id"].map(who))
    if isinstance(module.objective, AnnotatorRPOEM):
        pairs["learned_rate"] = [module.objective.rate_of((who or {}).get(name)) for name in pairs["id"]]
    varies = _varies(module, pairs)
    if scorer == "vnet" and not varies:
        raise UserError(
            f"scorer is vnet, but the weights of {type(module.weighting).__name__} say nothing that it has "
            "found out of labels; use --scorer policy."
        )
    if visits is not None:
        # A pair that no update has seen has no visit, and its u is that of a policy that has not seen it.
        first = visits.drop_duplicates("id").set_index("id")["u"].reindex(pairs["id"])
        pairs["first_visit_u"] = first.astype(float).fillna(pairs.set_index("id")["u"]).to_numpy()
    if scorer == "probe" or (choose and pairs["prompt"].nunique() >= FOLDS):
        differences = data.train_state_differences(module.policy)
        pairs["probe_u"] = probe_log_odds(differences, pairs["prompt"].to_numpy())
    notes = _notes(found.noise, data)
    if scorer is None:
        scorer = "vnet" if varies else "policy"
        if "probe_u" in pairs:
            scorer, why = _probe_or(scorer, pairs)
            notes.append(why)
    unit = None if scorer in ("first_visit", "probe") else own_pull(module, data, found, updates)
    pairs["unpulled_u"] = pairs["u"] - (unit or 0) * pairs.pop("pull")
    beta = module.objective.beta
    del module  # the other policies need its memory
    cross_fit = CrossFit(found, data, updates, beta, kept / FOLDER, micro_batch_size)
    u = cross_fit.u() if scorer == "dpo" else cross_fit.kept()
    pairs.insert(list(pairs.columns).index("loss"), "cross_fit_u", np.nan if u is None else u.to_numpy())
    by_heart = scorer in ("vnet", "policy") and unit is None
    judged = Judged(pairs, scorer, varies, by_heart, data.noise_flips)
    folder = Path(output) if output else kept
    return conclude(judged, data.source.load("train"), data.source, run, folder, notes, wanted)


def _probe_or(own: Scorer, pairs: pd.DataFrame) -> tuple[Scorer, str]:
    """The probe where it agrees with more unseen labels than the policy did, else the run's own; and why."""
    from ..audit.linear_probe import agreement, agreement_error

    probe, policy = (agreement(pairs[name].to_numpy()) for name in ("probe_u", "first_visit_u"))
    judge: Scorer = "probe" if probe > policy + agreement_error(len(pairs)) else own
    return judge, (
        f"Judged by {NAMES[judge]}: of labels that they have not seen the probe agrees with {probe:.0%}, and "
        f"the policy, before it learned from each pair, with {policy:.0%} (signed ranks; 50% by chance)."
    )


def _varies(module: PreferenceModule, pairs: pd.DataFrame) -> bool:
    """Whether the weights are an opinion of labels that ranks them.

    Those that a weighting is told beforehand are none.
    """
    none = (AuditedWeights, DropFlipped, OracleWeights)
    return not isinstance(module.weighting, none) and bool(np.ptp(pairs["weight"]) > 1e-6)


def _notes(noise: str, data: PreferenceData) -> list[str]:
    """What a reader has to know of the pairs."""
    notes = []
    if noise:
        notes.append(
            f"The run flipped labels on purpose ({noise}). Labels are those it was trained on: where the "
            "noise was at work, the suggestion to flip undoes it."
        )
    counts = data.counts["train"]
    if out := counts["rows"] - len(data.train_pairs):
        notes.append(
            f"{out:,} of {counts['rows']:,} rows were not trained on (dropped, or held out) and not audited."
        )
    return notes


def main(arguments: list[str]) -> None:
    """``pacmr audit RUN`` and the options of ``audit``."""
    run_tool("audit", audit, arguments, positional=True)
