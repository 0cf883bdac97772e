"""Every objective with every weighting: an update whose gradient is autograd's, or a refusal in one sentence.

The list in docs/methods.md is what this finds; PACMR_WRITE_DOCS=1 writes it anew.
"""

import inspect
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch.nn.utils import get_total_norm as norm

from pacmr_lightning import objectives, weighting
from pacmr_lightning.batch import LogProbs
from pacmr_lightning.errors import UserError
from pacmr_lightning.meta_gradient import CentralDifference, GhostDotProduct, SoftPromptConsistency
from pacmr_lightning.meta_gradient.step_pairs import StepPairs
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.weighting.algorithm_1 import weighted_gradient

DOCS = Path(__file__).parents[3] / "docs" / "methods.md"
BEGIN, END = "<!-- combinations -->\n", "<!-- end of combinations -->"
PAIRS, MICRO_BATCH = 6, 4
BETA = 0.7
OPTIONS = {"CDPO": {"label_noise": 0.2}, "RDPO": {"label_noise": 0.2}, "DPO": {"sft_weight": 0.5}}
OPTIONS |= {"IPO": {"length_normalize": True}, "DrDPO": {"beta_prime": 0.6}}
OBJECTIVES = {
    name: partial(getattr(objectives, name), BETA, **OPTIONS.get(name, {}))
    for name in ["DPO", "CDPO", "RDPO", "IPO", "DrDPO", "ROPO", "R3M", "HolderDPO", "RPOEM", "AnnotatorRPOEM"]
}
VNET = partial(weighting.VNetWeighting, SoftPromptConsistency(), every=1)
WEIGHTINGS = {
    "Unweighted": weighting.Unweighted,
    "SigmoidPrior": weighting.SigmoidPrior,
    "VNetWeighting": lambda: VNET(GhostDotProduct()),
    "VNetWeighting, CentralDifference": lambda: VNET(CentralDifference(epsilon=0.05, relative=True)),
    "AuditedWeights": partial(weighting.AuditedWeights, "audit.parquet"),
    "AuditedWeights, soft labels": partial(weighting.AuditedWeights, "audit.parquet", soft_labels=True),
    "OracleWeights": partial(weighting.OracleWeights, 0.3),
    "DropFlipped": weighting.DropFlipped,
}


@pytest.mark.parametrize(
    ("package", "base", "listed"),
    [(objectives, objectives.Objective, OBJECTIVES), (weighting, weighting.Weighting, WEIGHTINGS)],
)
def test_every_class_is_in_the_table(package, base, listed):
    classes = [kind for kind in vars(package).values() if inspect.isclass(kind) and issubclass(kind, base)]
    ready = {found.__name__ for found in classes if not inspect.isabstract(found)}
    assert ready == {name for name in listed if name in vars(package)}


def one_update(policy, batch, meta, objective, weighting):
    """The gradient of a step as the module computes it, and the pairs with what the step has told of them."""
    module = PreferenceModule(policy, objective, weighting, micro_batch_size=MICRO_BATCH)
    objective, weighting = module.objective, module.weighting
    keep = bool(weighting.every) and "auto"
    pairs = StepPairs(policy, objective, batch, MICRO_BATCH, keep=keep)
    if weighting.every:
        weighting.update(pairs, meta if weighting.needs_meta else batch[:0], 1e-2, 1e-2)
        assert weighting.updates == 1 and any(p.grad.any() for p in weighting.vnet.parameters())
    return weighted_gradient(pairs, weighting).gradient, pairs.batch


def expected(policy, batch, objective, weighting):
    rewards = Rewards.of(policy.log_probs(batch), batch, objective.beta)
    losses = objective(rewards)
    if objective.grouped:
        loss = -0.6 * (-losses / 0.6).exp().mean().log()
    else:
        g = weighting.weights(rewards.detach(), batch).g.double()
        if weighting.soft_labels:
            sides = (LogProbs(one.rejected, one.chosen) for one in (rewards.policy, rewards.reference))
            other = Rewards(*sides, BETA, rewards.rejected_tokens, rewards.chosen_tokens)
            losses = g * losses + (1 - g) * objective(other)
        else:
            losses = g * losses
        loss = losses.mean()
    parameters = policy.adapter()
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def test_every_objective_with_every_weighting(make_policy, make_batch, inside):
    policy, meta = make_policy(double=True), make_batch(4, seed=1, augmented=True)
    eta = torch.linspace(0.1, 0.9, PAIRS)
    batch = replace(make_batch(PAIRS), eta=eta, annotators=["a", "b", None] * (PAIRS // 3))
    audit = {"id": batch.ids, "p": 0.5, "p_majority": eta.tolist(), "observed": "chosen", "texts": ""}
    pd.DataFrame(audit).to_parquet("audit.parquet")
    batch = batch.with_reference(policy.reference_log_probs(batch))
    refused = {}
    for objective_name, make_objective in OBJECTIVES.items():
        for weighting_name, make_weighting in WEIGHTINGS.items():
            objective, weighting = make_objective(), make_weighting()
            try:
                found, pairs = one_update(policy, batch, meta, objective, weighting)
            except UserError as error:
                said = str(error)
                assert said.endswith(".") and "\n" not in said
                # One reason for all objectives and weightings that it names.
                for name in (type(objective).__name__, type(weighting).__name__):
                    said = said.replace(name, "...")
                refused.setdefault(said, {}).setdefault(objective_name, []).append(weighting_name)
                continue
            truth = expected(policy, pairs, objective, weighting)
            # VNet and its weights are float32.
            error = norm(found[name] - truth[name] for name in truth) / norm(truth.values())
            assert error < 1e-6, f"{objective_name} with {weighting_name} is {error:.1e} off"
    of = [f"All of {', '.join(OBJECTIVES)} go with all of {'; '.join(WEIGHTINGS)}, but for:", ""]
    for said, found in refused.items():
        for names in dict.fromkeys(map(tuple, found.values())):
            objectives_of = ", ".join(name for name, cells in found.items() if tuple(cells) == names)
            of.append(f"- {objectives_of} with {'; '.join(names)}: *{said}*")
    of.append("")
    text = DOCS.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    written, _, after = rest.partition(END)
    if os.environ.get("PACMR_WRITE_DOCS"):
        DOCS.write_text(before + BEGIN + "\n".join(of) + END + after, encoding="utf-8")
    else:
        assert written == "\n".join(of), "PACMR_WRITE_DOCS=1 writes the list anew"
