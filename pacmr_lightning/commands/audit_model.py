"""An audit without a run: by a policy that was trained elsewhere, or before training by a linear probe."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from lightning.fabric import Fabric
from scipy.special import log_expit

from ..batch import UNKNOWN
from ..command_line.parser import run_tool
from ..datamodules.cleaned import check_output
from ..datamodules.pairs import Pairs
from ..datamodules.reference_cache import cached_log_probs, cached_state_differences
from ..datamodules.sources import Source
from ..datamodules.tokenization import summary_line, token_warnings, tokenize_pairs
from ..datamodules.tokenizer import load_tokenizer
from ..errors import UserError
from ..numerics import AskedDtype
from ..policy import PolicyModel
from ..policy.base_model import adapter_base, is_adapter
from .audit_conclusion import Judged, conclude
from .audit_options import Action, Wanted
from .audit_upload import Upload, words_of


def audit_model(
    policy: str,
    *,
    source: Source,
    output: str,
    scorer: Literal["policy", "probe"] = "policy",
    reference: str | None = None,
    beta: float = 0.1,
    max_length: int = 1024,
    top: int = 50,
    threshold: float = 0.5,
    share: float | None = None,
    fallback_share: float | None = None,
    cleaned: str | None = None,
    action: Action | None = None,
    sample: int = 0,
    decisions: str | None = None,
    label_studio: str | None = None,
    dtype: AskedDtype = "float32",
    push_cleaned: str | None = None,
    private: bool = False,
) -> pd.DataFrame:
    """Audits preference pairs by a policy that was trained elsewhere, or by a model that is to be trained.

    The policy's u = beta log-ratio difference to its reference says which labels it is against; the files are
    those of pacmr audit. Where it was trained on these very labels it agrees with them too much, so that the
    share of wrong ones is likely to be higher than estimated; the ranking is still of use. A linear probe
    needs no training: it learns from what the model's layers hold of the responses and from the labels of
    other prompts, and its u is the log-odds of a label. ``AuditedWeights`` can learn from the table at once.

    Args:
        policy: folder or Hub id of a PEFT adapter or of a whole model.
        source: of the pairs, as in pacmr fit; all that it trains on, so that Files needs train alone.
        output: folder to write to.
        scorer: who judges: "policy" is the policy against its reference, "probe" a linear reward on what the
            policy's layers hold of the responses; give it the model that training is to begin with.
        reference: the model that its training began with; default: what an adapter names as its base. A probe
            has none. The tokenizer and its chat template are the policy's, or the base's of an adapter that
            has none.
        beta: DPO's temperature in the policy's training, which scales u; the ranking does not depend on it,
            nor does a probe.
        max_length: tokens of prompt + longer response; longer pairs are left out.
        top: pairs in the report.
        threshold: a label is suspect where it is wrong with a probability above this.
        share: of wrong labels, where it is known; default: estimated.
        fallback_share: of wrong labels, taken where none is told, since the estimate would be too low
            for a policy that was trained on these labels; with a probe, where the estimate fails. Not where
            scores fit labels that are coin flips as well: ``share`` tells these, too, how many are wrong.
        cleaned: file to write the pairs to, in the format of the source; it is replaced where it exists.
        action: what is done there with suspects: "drop" them, or "flip" their label; with ``decisions`` it
            may be left out, and then only what is decided changes.
        sample: number of pairs drawn at random that the report lists first, without a word of what the audit
            makes of them, so that the share of wrong labels can be told from decisions on them.
        decisions: file of decisions on pairs, as the report's page saves it or Label Studio exports it.
            Decided labels are wrong with probability 0 or 1, ``cleaned`` follows them, and those on the
            random sample tell the share of wrong labels where ``share`` does not.
        label_studio: file to write the listed pairs to, as tasks of Label Studio (.json).
        dtype: of both models; an adapter is added to its base, where bfloat16 rounds small changes away.
        push_cleaned: repository at the Hugging Face Hub, OWNER/NAME, to upload ``cleaned`` to as a dataset,
            with a card; made where it does not exist. The token is that of HF_TOKEN, or of hf auth login.
        private: make a private repository.

    Returns:
        The rows of ``pairs.parquet``.

    Raises:
        UserError: an option is out of range, or a model or the pairs cannot be read; or the Hub refuses the
            upload.
    """
    policy, reference = str(policy), None if reference is None else str(reference)
    upload = Upload(push_cleaned, private, words_of(audit_model, locals()))
    by_hand = (sample, decisions, label_studio)
    wanted = Wanted(top, threshold, share, fallback_share, cleaned, action, *by_hand, upload, output)
    if not beta > 0:
        raise UserError(f"beta is {beta}, but it must be above 0 (DPO's is usually 0.1).")
    if cleaned is not None:
        check_output(source, cleaned)
    if scorer == "probe" and beta != 0.1:
        raise UserError(
            f"beta is {beta}, but a probe compares a model with none and has no beta; leave it out."
        )
    if scorer == "probe" and reference is not None:
        raise UserError(f"reference is {reference}, but a probe compares a model with none; leave it out.")
    if scorer == "policy" and reference is None:
        reference = _base(policy)
    try:
        tokenizer = load_tokenizer(policy)
    except UserError:  # a whole model may have been saved without one, or an adapter's base moved
        if reference is None:
            raise
        tokenizer = load_tokenizer(reference)
    print(f"Tokenizer and chat template: {tokenizer.name_or_path}")
    rows = source.load_all()
    tokens, counts = tokenize_pairs(rows, tokenizer, max_length)
    print(summary_line(source.name, "audited", counts))
    for sentence in token_warnings(tokenizer, rows, counts, source.name):
        print(sentence)
    wanted.check_pairs(tokens["id"][:], [False] * len(tokens))
    pairs = Pairs(tokens, tokenizer.pad_token_id)
    prompts = pd.factorize(np.array(tokens["prompt"][:], dtype=object))[0]
    u, delta = (
        _by_probe(policy, dtype, pairs, prompts)
        if reference is None
        else _by_policy(policy, reference, beta, dtype, pairs)
    )
    known = np.array(pairs.flipped)
    frame = pd.DataFrame(
        {
            "id": tokens["id"][:],
            "prompt": prompts,
            "category": tokens["category"][:],
            "observed": "chosen",
            "weight": 1.0,
            "u": u,
            "delta": delta,
            "a": np.nan,
            "b": np.nan,
            "cross_fit_u": np.nan,
            "loss": -log_expit(u),
            "flipped": pd.array(known == 1, dtype="boolean"),
            "unpulled_u": u,
            "probe_u": u if scorer == "probe" else np.nan,
        }
    )
    frame.loc[known == UNKNOWN, "flipped"] = pd.NA
    names = dict(zip(rows["id"][:], rows["annotator"][:], strict=True))
    if any(name is not None for name in names.values()):
        frame.insert(3, "annotator", frame["id"].map(names))
    judged = Judged(frame, scorer, varies=False, by_heart=scorer == "policy", noise_flips=None)
    note = (
        f"A linear probe has read the states of {policy}; nothing was trained but the probe."
        if reference is None
        else f"The policy {policy} was trained elsewhere; its reference is {reference}."
    )
    return conclude(judged, rows, source, policy, Path(output), [note], wanted)


def _base(policy: str) -> str:
    """What an adapter was trained on.

    Raises:
        UserError: the policy is not there or no adapter, or its base is not named.
    """
    if not is_adapter(policy):
        raise UserError(
            f"policy is {policy}, which is no adapter that names its base model; name another, or give the "
            "model that its training began with, by --reference."
        )
    return adapter_base(policy)


def _by_policy(
    policy: str, reference: str, beta: float, dtype: AskedDtype, pairs: Pairs
) -> tuple[np.ndarray, np.ndarray]:
    """(N,) implicit reward differences and sums in nats."""
    ours, base = (
        cached_log_probs(
            _model(model, dtype, pairs), pairs, rank=0, world_size=1, barrier=lambda: None, title=title
        )
        for model, title in (
            (policy, "Policy log-probabilities"),
            (reference, "Reference log-probabilities"),
        )
    )
    chosen, rejected = beta * (ours - base).astype(np.float64).T
    return chosen - rejected, chosen + rejected


def _by_probe(
    model: str, dtype: AskedDtype, pairs: Pairs, prompts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(N,) log-odds of the labels in nats; their sum over both responses is not known."""
    # scikit-learn is loaded when it is needed.
    from ..audit.linear_probe import probe_log_odds

    u = probe_log_odds(cached_state_differences(_model(model, dtype, pairs), pairs), prompts)
    return u, np.full(len(u), np.nan)


def _model(name: str, dtype: AskedDtype, pairs: Pairs) -> PolicyModel:
    """A model as it is, where it is to run."""
    model = PolicyModel(name, rank=1, dtype=dtype)
    model.build(announce=False, pair=pairs.batch([0]))  # it is neither trained nor, maybe, a reference
    Fabric(accelerator="auto", devices=1).to_device(model)
    return model


def main(arguments: list[str]) -> None:
    """``pacmr audit-model POLICY`` and the options of ``audit_model``."""
    run_tool("audit-model", audit_model, arguments, positional=True)
