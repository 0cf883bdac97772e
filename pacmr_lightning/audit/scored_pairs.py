"""Scores of all training pairs, by a finished run or by a model."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from datasets import Dataset
from lightning.fabric import Fabric
from peft.utils.constants import DUMMY_TARGET_MODULES
from scipy.special import log_expit

from ..analysis.last_pass import last_pass
from ..batch import UNKNOWN
from ..datamodules.token_report import summary_line, token_warnings
from ..datamodules.tokenization import tokenize_pairs
from ..datamodules.tokenized_pairs import TokenizedPairs
from ..datamodules.tokenizer import load_tokenizer
from ..errors import UserError
from ..files import local_path
from ..modules import PreferenceModule
from ..policy import PolicyModel
from ..policy.base_model import adapter_base, is_adapter
from ..runs.finished_run import PreferenceData, find_run, load_run, ready
from ..runs.folder import AUDIT, AUDITED_PAIRS, read_weights, weight_parts
from ..waiting import waiting
from . import linear_probe
from .agreement import Votes
from .annotators import votes_on_pairs
from .combination import views
from .cross_fit import FOLDER, CrossFit
from .options import MAX_LENGTH, OF_A_MODEL, OF_A_RUN, AuditOptions
from .scorers import NAMES, Scorer

SEEN = (
    "u comes from a policy that was trained on these labels, wrong ones included. As far as it has memorised "
    "them, p is too high; --scorer probe scores labels that it has not seen, as dpo does for a run."
)
BETA = 0.1
"""Scale of u for a model whose training is not known; neither ranks nor p depend on it."""


@dataclass
class ScoredPairs:
    """N training pairs with their scores by a scorer, and by others that were computed."""

    pairs: pd.DataFrame
    """``last_pass``, ``cross_fit_u``, and perhaps ``probe_u``."""
    scorer: Scorer
    rows: Dataset
    source: Any
    """A ``datamodules.Source``."""
    noise_flips: dict[str, bool] | None = None
    """True for labels that the run's injected noise has flipped, by id."""
    notes: list[str] = field(default_factory=list)

    @property
    def votes(self) -> Votes:
        """Votes of annotators on the pairs, the labels included."""
        right, wrong = (self.pairs[f"votes_{side}"].to_numpy() for side in ("for", "against"))
        return Votes(right, wrong, np.zeros((len(right), 0)), self.pairs["once"].to_numpy())


def score_run(run: str, options: AuditOptions) -> ScoredPairs:
    """Score all training pairs of a finished run as trained; model outputs are cached in its ``audit``."""
    options.refuse(OF_A_MODEL, f"{run} is a run, whose configuration has it")
    finished = find_run(run, options.checkpoint)
    module, data, updates = load_run(finished, as_trained=True)
    refuse_own(module, data, Path(run), options)
    with waiting("Reading the run's pairs"):
        data.setup("fit")
    groups, grouped = linear_probe.text_groups(data.train_pairs.rows)
    folder, by_responses = Path(run) / AUDIT / FOLDER, groups if grouped else None
    cross_fit = CrossFit(finished, data, updates, module.objective.beta, folder, by_responses)
    if options.score == "dpo":
        cross_fit.check()
    scored = score_fit(module, data, Path(run), options, finished.noise)
    del module  # frees memory for the other policies
    u = cross_fit.u() if scored.scorer == "dpo" else cross_fit.kept()
    if u is not None:
        scored.pairs["cross_fit_u"] = u.to_numpy()
    return scored


def refuse_own(module: PreferenceModule, data: PreferenceData, run: Path, options: AuditOptions) -> None:
    """Raise UserError if the audit would replace the one that the module was trained with."""
    used = [p for p in (getattr(module.weighting, "audit", None), vars(data).get("curriculum")) if p]
    if Path(options.output or "", AUDITED_PAIRS).resolve() in [local_path(path).resolve() for path in used]:
        raise UserError(f"{run} was trained with the audit in its folder; name another one as output.")


def score_fit(
    module: PreferenceModule, data: PreferenceData, run: Path, options: AuditOptions, noise: str
) -> ScoredPairs:
    """Score the training pairs of a trained module; ``noise`` names the injected label noise in a note."""
    scorer: Scorer | None = options.score
    recorded = scorer is None and bool(weight_parts(str(run)))
    visits = read_weights(str(run)) if recorded and not module.began_trained else None
    notes = _check_pairs(options, data.source, data.train_pairs)
    if recorded and module.began_trained:
        notes.append("The policy was already trained when the fit began, so no label counts as unseen.")
    groups, grouped = linear_probe.text_groups(data.train_pairs.rows)
    if scorer == "probe":
        linear_probe.check_groups(groups)
    data.fill_train_reference(ready(module))
    pairs = last_pass(module, data.train_pairs).assign(prompt=groups, cross_fit_u=np.nan)
    pairs, several = _completed(pairs, data.train_pairs)
    if scorer == "probe" or (visits is not None and groups.max() + 1 >= linear_probe.FOLDS):
        states, shares = data.train_state_differences(module.policy), data.train_pairs.vote_shares
        pairs["probe_u"] = linear_probe.probe_log_odds(states, groups, shares)
    notes += [*_notes(noise, data), *grouped, *several]
    if visits is not None and "probe_u" in pairs:
        scorer, why = _probe_or_policy(pairs, visits, data.train_pairs.vote_shares)
        notes.append(why)
    scorer = scorer or "policy"
    if scorer == "policy":
        notes.append(SEEN)
    return ScoredPairs(pairs, scorer, data.source.load("train"), data.source, data.noise_flips, notes)


def score_model(model: str, source: Any, options: AuditOptions) -> ScoredPairs:
    """Score all pairs of a source by a model: u by policy and reference, or log-odds by a linear probe."""
    why = f"{model} is a model and no run"
    options.refuse(OF_A_RUN, why)
    trained = options.reference is not None or is_adapter(model)
    scorer: Scorer = options.score or ("policy" if trained else "probe")
    if scorer not in ("policy", "probe"):
        raise UserError(f"scorer is {scorer}, but {why}; use --scorer policy or probe.")
    if scorer == "probe":
        options.refuse(("reference",), "a linear probe has none")
    reference = options.reference
    if scorer == "policy" and reference is None:
        if not is_adapter(model):
            raise UserError(
                f"{model} is a whole model, not an adapter, so its reference is unknown; give the model that "
                "its training started from with --reference, or leave out --scorer policy to audit with a "
                "linear probe."
            )
        reference = adapter_base(model)
    names = [model] if reference is None else [model, reference]
    with waiting("Reading and tokenizing the pairs"):
        length = MAX_LENGTH if options.max_length is None else options.max_length
        data = _tokenized(source, names, length)
    tokens = data.rows
    notes = _check_pairs(options, source, data)
    groups, grouped = linear_probe.text_groups(tokens)
    if reference is None:
        linear_probe.check_groups(groups)
        base_model = adapter_base(model) if is_adapter(model) else model
        placed = _placed(base_model, options)
        u = linear_probe.probe_log_odds(data.state_differences(placed), groups, data.vote_shares)
        if options.decided is not None:
            data.reference = data.reference_log_probs(placed)
        delta = np.full(len(u), np.nan)
        note = f"Scores are those of a linear probe on hidden states of {base_model}."
    else:
        ours, data.reference = (
            data.reference_log_probs(_placed(name, options), f"{title} log-probabilities")
            for name, title in ((model, "Policy"), (reference, "Reference"))
        )
        chosen, rejected = BETA * (ours - data.reference).astype(np.float64).T
        u, delta = chosen - rejected, chosen + rejected
        note = f"Scores are u of {model} against its reference {reference}."
    known = np.array(data.flipped)
    pairs = pd.DataFrame(
        {
            **{name: tokens[name][:] for name in ("id", "category", "texts")},
            "prompt": groups,
            "observed": "chosen",
            "weight": 1.0,
            "u": u,
            "delta": delta,
            **dict.fromkeys(("a", "b", "cross_fit_u"), np.nan),
            "loss": -log_expit(u),
            "flipped": pd.Series(known == 1, dtype="boolean").mask(known == UNKNOWN),
            "probe_u": u if scorer == "probe" else np.nan,
        }
    )
    pairs, several = _completed(pairs, data)
    notes = [note, *grouped, *([SEEN] if scorer == "policy" else []), *notes, *several]
    return ScoredPairs(pairs, scorer, source.load_all(), source, notes=notes)


def _tokenized(source: Any, models: list[str], max_length: int) -> TokenizedPairs:
    """Return all training pairs, labels as found, by the tokenizer of the first model that has one."""
    for name in models:
        try:
            tokenizer = load_tokenizer(name)
            break
        except UserError:  # a model saved without one, or an adapter's base moved
            if name == models[-1]:
                raise
    print(f"Tokenizer and chat template: {tokenizer.name_or_path}")
    rows = source.load_all()
    tokens, counts = tokenize_pairs(rows, tokenizer, max_length)
    print(summary_line(source.name, "audited", counts))
    for sentence in token_warnings(tokenizer, rows, tokens, source.name):
        print(sentence)
    annotators = dict(zip(rows["id"][:], rows["annotator"][:], strict=True))
    who = [annotators[pair] for pair in tokens["id"][:]] if any(annotators.values()) else None
    return TokenizedPairs(tokens, tokenizer.pad_token_id, annotators=who)


def _completed(pairs: pd.DataFrame, data: Any) -> tuple[pd.DataFrame, list[str]]:
    """Return scored pairs with ``VIEWS`` if known, annotators and ``votes_on_pairs``, and notes on votes."""
    if data.reference is not None:
        pairs = pairs.join(views(data, data.reference))
    if data.annotators is not None:
        pairs["annotator"] = data.annotators
    votes = votes_on_pairs(data)
    several, ties = (votes["votes_for"] + votes["votes_against"] > 1).sum(), int(votes["tie"].sum())
    notes = []
    if several:
        notes.append(f"{several:,} of {len(votes):,} labels are of pairs with several votes, which p uses.")
    if ties:
        notes.append(f'{ties:,} labels are ties (label "tie", or as many votes for each), never suspected.')
    return pairs.join(votes), notes


def _placed(name: str, options: AuditOptions) -> PolicyModel:
    model = PolicyModel(name, target_modules=DUMMY_TARGET_MODULES, dtype=options.dtype or "float32")
    model.build(announce=False)  # without adapters, since PEFT has none for some layers
    Fabric(accelerator="auto", devices=1).to_device(model)
    return model


def _check_pairs(options: AuditOptions, source: Any, pairs: Any) -> list[str]:
    """Return notes on the decisions; raise if these, the sample or the files to write do not fit."""
    ids = pairs.rows["id"][:]
    if options.sample > (number := int((~pairs.ties).sum())):
        raise UserError(f"sample is {options.sample}, but there are {number} pairs without ties; lower it.")
    table = Path(options.output or "", AUDITED_PAIRS)
    for written in (table, table.with_name(source.cleaned_name)):
        source.refuse_own("output", written)
    cleaned = source.check_output(options.cleaned or str(table.with_name(source.cleaned_name)))
    if cleaned.resolve() == table.resolve():
        raise UserError(f"cleaned is {options.cleaned}, the audit's own table; name another file.")
    if options.decided is None:
        return []
    return options.decided.check(ids, pairs.swapped, pairs.rows["texts"][:])


def _probe_or_policy(pairs: pd.DataFrame, visits: pd.DataFrame, share: np.ndarray) -> tuple[Scorer, str]:
    """Return the scorer that agrees with more unseen labels, by (N,) shares of the votes, and the reason.

    A policy has not seen a label before its first update on any row of the pair; its u then is in ``visits``.
    """
    first = visits.drop_duplicates("id").reset_index(drop=True)
    rows = pairs.assign(share=share, visit=pairs["id"].map(pd.Series(first.index, first["id"])))
    rows = rows.sort_values("visit", kind="stable").drop_duplicates("pair")
    # A pair without a visit was never trained on.
    unseen = rows["visit"].map(first["u"]).astype(float).fillna(rows["u"])
    share, scores = rows["share"].to_numpy(), (rows["probe_u"].to_numpy(), unseen.to_numpy())
    probe, policy = (linear_probe.signed_rank_agreement(score, share) for score in scores)
    scorer: Scorer = "probe" if probe > policy + linear_probe.agreement_error(share) else "policy"
    return scorer, (
        f"Scorer: {NAMES[scorer]}. Agreement with unseen labels: linear probe {probe:.0%}, policy before its "
        f"first update on each pair {policy:.0%} (signed ranks; 50% by chance)."
    )


def _notes(noise: str, data: PreferenceData) -> list[str]:
    notes = []
    if noise:
        notes.append(
            f"The run injected label noise ({noise}). Labels are as trained, so a suggestion to swap can "
            "undo an injected flip."
        )
    rows = len(data.source.load_all())
    if out := rows - len(data.train_pairs):
        notes.append(
            f"{out:,} of {rows:,} rows were dropped or held out, also for validation, and are not audited: a "
            "cleaned file keeps them."
        )
    return notes
