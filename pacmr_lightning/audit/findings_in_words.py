"""What an audit found, in sentences: how the threshold was chosen, the expected share, and their limits."""

from __future__ import annotations

from math import isnan

import numpy as np

from .findings import Findings
from .scorers import NAMES, Scorer
from .wrong_label_share import Share

_UNSEEN: dict[Scorer, str] = {
    "dpo": "u is that of two DPO policies, each of them trained on half of the prompts, about the half that "
    "it has not seen.",
    "first_visit": "u is that of the run's own policy at the pair's first visit, before it learned from it: "
    "small for the pairs that came first, when the policy knew little.",
    "probe": "u is the log-odds of the label by a linear reward on what the untouched model's layers hold "
    "of the responses, fitted to the labels of other prompts.",
}
"""Who was asked, where it has not learned the labels that it judges."""
COIN_FLIPS = (
    "Without the share that is told these scores fit labels that are coin flips as well, so P(wrong) may say "
    "nothing of a pair."
)
"""Where the share is known, and nothing else is."""
_LEARNED = "u is that of a policy that has learned these labels, wrong ones among them"


def share_in_words(share: Share) -> str:
    """The expected share of wrong labels with its uncertainty, or why there is none."""
    if share.identified and share.known:
        return f"{_percent(share.rate)}, {_source(share)}"
    if share.identified:
        return (
            f"{_percent(share.rate)} ± {_percent(share.stderr)} (95% interval {_percent(share.low)} to "
            f"{_percent(share.high)})"
        )
    if not share.separates:
        return "not identified: the scores do not separate, they fit labels that are coin flips as well"
    return (
        f"not identified: the scores fit no wrong labels at all as well (95% of resamples of the prompts "
        f"give {_percent(share.low)} to {_percent(share.high)})"
    )


def holder_in_words(share: Share) -> str:
    """What Hölder-DPO's estimator makes of the same u, and what it takes for granted."""
    return (
        f"Hölder-DPO's estimator, a second opinion on the same u, gives {_percent(share.holder)}. It takes "
        "sigmoid(u) to be near 1 for right labels and near 0 for wrong ones, and so it is too low where the "
        "policy is unsure and wrong labels are many, and too high where they are few."
    )


def fit_in_words(share: Share) -> str:
    """Whether labels are against the policy as often as the curve has it, and what a refusal means."""
    p = share.fit.p
    if isnan(p):
        return "Whether the curve fits cannot be tested: too little is known of these labels."
    chance = f"p = {p:.2f}" if p >= 0.01 else f"p = {p:.1g}" if p >= 1e-4 else "p < 0.0001"
    if not share.fit.refused:
        return (
            f"The labels do not contradict the curve (score test over parts by |u|, {chance}). That does not "
            "prove flips that are independent of the pair: a rule of thumb of the labellers that the policy "
            "has learned, or flips at near ties, can give the same curve."
        )
    fitted, pairs = share.tenths["fitted"], share.tenths["pairs"]
    # Where no label of a part is against the policy, its own error is 0 and would make any gap the largest.
    error = np.maximum(share.tenths["stderr"].fillna(0), np.sqrt(fitted * (1 - fitted) / pairs))
    worst = share.tenths.iloc[int(((share.tenths["against"] - fitted) / error).abs().fillna(0).argmax())]
    said = (
        f"The labels contradict the curve (score test over parts by |u|, {chance}), most where |u| is about "
        f"{worst['size']:.2g}: {_percent(worst['against'])} are against the policy, by the curve "
        f"{_percent(worst['fitted'])}."
    )
    if share.known and share.tenths["against"].iloc[-1] < share.rate:
        return (
            f"{said} Where the policy is sure, fewer labels are against it than if the given share of them "
            "were flipped independently of the pair: the share is lower, or flips gather at near ties, or "
            "policy and labellers follow one rule of thumb. P(wrong) is too high."
        )
    return (
        f"{said} So flips are not independent of the pair (at near ties they gather at small |u|), or "
        "the policy's sureness does not grow in proportion to |u|. Take the expected share and P(wrong) for "
        "rough figures; the ranks do not need the curve."
    )


def _source(share: Share) -> str:
    return "assumed" if share.assumed else "as given"


def sentences(findings: Findings) -> list[str]:
    """How the scorer's threshold and expected share came about, and how far to trust them."""
    share, scorer = findings.share, findings.scorer
    top = share.tenths.iloc[-1]
    told = [_UNSEEN[scorer] if scorer in _UNSEEN else _learned(findings)]
    fit = (
        f"With eps = {share.rate:.3f}, {_source(share)}, the fit has k = {share.slope:.3g} per nat."
        if share.known
        else f"The fit has eps = {share.rate:.3f} and k = {share.slope:.3g} per nat; without wrong labels "
        f"(eps = 0) its BIC is {abs(share.gain):.1f} {'worse' if share.gain > 0 else 'better'}. "
        "The errors come from resampling prompts."
    )
    told.append(
        "u changes sign with the label, so wrong labels mirror right ones: of pairs with |u| = m a share "
        f"eps + (1 - 2 eps) sigmoid(-k m) is labelled against the policy. {fit}"
    )
    told.append(fit_in_words(share))
    if share.known and not share.separates:
        told.append(COIN_FLIPS)
    told.append(holder_in_words(share))
    if share.identified:
        said = "P(wrong) = sigmoid(logit(eps) - k u)"
        if scorer == "vnet":
            said += ", made a falling function of the weight by isotonic regression"
        cut = "" if findings.cut is None else f", which is a {_score(scorer)} under {findings.cut:.3g}"
        told.append(
            f"{said}. A label is suspect where P(wrong) is above {findings.threshold:g}{cut}: "
            f"{findings.suspects:,} of {len(findings.pairs):,}. That is not the expected share: a threshold "
            "leaves wrong labels unnoticed where the policy is unsure."
        )
    else:
        told.append("So there is no threshold and no label is suspect; the ranks say which to look at first.")
    told.append(
        f"Of the tenth of the pairs that the policy is surest of, {_percent(top['against'])} ± "
        f"{_percent(top['stderr'])} are labelled against it."
        + (
            " Where flips are independent of the pair, the true share is no higher, apart from that error: a "
            "sure policy can be wrong, which only adds."
            if scorer in _UNSEEN
            else ""
        )
    )
    gain = share.mixture.gain
    told.append(
        f"A mixture of two Gaussians fits u {'better' if gain > 0 else 'worse'} than one Gaussian (BIC "
        f"{abs(gain):.1f} {'lower' if gain > 0 else 'higher'}), so the shape of its distribution alone "
        + (
            f"would put {_percent(share.mixture.lower)} into a lower component; that asks for Gaussians and "
            "not for the symmetry, and is no estimate of the share."
            if gain > 0
            else "does not tell wrong labels from right ones; the symmetry does."
            if share.identified
            else "does not tell wrong labels from right ones either."
        )
    )
    for other, found in findings.shares.items():
        if other != scorer:
            told.append(f"By the {NAMES[other]} the expected share is {share_in_words(found)}.")
    return told


def _learned(findings: Findings) -> str:
    size = float((findings.pairs["u"] - findings.pairs["unpulled_u"]).mean())
    if not size:
        return (
            f"{_LEARNED}, so the share is likely to be higher; the scorers dpo, first_visit and probe "
            "of pacmr audit ask judges that have not seen them."
        )
    return (
        f"{_LEARNED}. What each label itself has added to its pair's u, {size:.2g} nats on average to first "
        "order, is taken off."
    )


def _score(scorer: Scorer) -> str:
    return "weight" if scorer == "vnet" else "u"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
