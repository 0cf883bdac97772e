"""Changes to PACMR-DPO, as weightings and outer objectives of one's own."""

from copy import deepcopy
from importlib import import_module

import pandas as pd
import pytest
import torch

from pacmr_lightning import cli
from pacmr_lightning.batch import PairBatch, Segment
from pacmr_lightning.datamodules.train_tokenizer import train_tokenizer
from pacmr_lightning.embedded_world import MOODS, TOPICS, World
from pacmr_lightning.errors import UserError
from pacmr_lightning.meta_gradient import CleanPreference, PromptAugmentationConsistency
from pacmr_lightning.meta_gradient.step_pairs import RecomputedStepPairs
from pacmr_lightning.meta_gradient.virtual_step import shifted
from pacmr_lightning.objectives import DPO
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.weighting import VNetWeighting

BETA, LEARNING_RATE = 2.0, 1e-2


def moved(policy, seed):
    """Its adapter elsewhere."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.adapter().values():
            parameter.add_(0.05 * torch.randn_like(parameter))


def rewards(policy, batch):
    with torch.no_grad():
        return Rewards(policy.log_probs(batch), policy.reference_log_probs(batch), BETA)


def adapters_at(policy, positions):
    """The adapters on a walk."""
    found = []
    for position in positions:
        moved(policy, position)
        found.append({name: value.detach().clone() for name, value in policy.adapter().items()})
    return found


def steps(policy, weighting, make_batch, positions=(1, 2, 3)):
    """Updates of a weighting while the adapter moves; the last step's pairs and meta pairs."""
    for position in positions:
        moved(policy, position)
        batch = make_batch(5, seed=position)
        batch = batch.with_reference(policy.reference_log_probs(batch))
        pairs = RecomputedStepPairs(policy, DPO(BETA), batch, 2)
        meta = make_batch(4, seed=10 + position, augmented=True)
        assert weighting.update(pairs, meta, LEARNING_RATE, LEARNING_RATE)
    return pairs, meta


def by_hand(policy, adapters, decay):
    """The policy with the average of adapters in the place of its own."""
    mean = adapters[0]
    for now in adapters[1:]:
        mean = {name: decay * mean[name] + (1 - decay) * now[name] for name in now}
    with torch.no_grad():
        for name, value in policy.adapter().items():
            value.copy_(mean[name])
    return mean


def test_an_average_of_one_adapter_is_the_paper(make_policy, make_batch):
    """With decay 0, and no virtual step before the labels, VNet and weights are those of VNetWeighting."""
    example = import_module("research.averaged_adapter")
    options = {"learning_rate": 0.01, "virtual_lr": 0.0}
    paper = VNetWeighting(PromptAugmentationConsistency(0.5), every=1, **options)
    average = example.AveragedAdapter(
        decay=0, learn_every=1, outer=example.AveragedPseudoLabels(0.5), **options
    )
    average.vnet.load_state_dict(paper.vnet.state_dict())
    before = [parameter.clone() for parameter in paper.vnet.parameters()]
    steps(make_policy(double=True), paper, make_batch)
    pairs, _ = steps(make_policy(double=True), average, make_batch)
    assert paper.updates == average.updates == 3
    for was, one, other in zip(before, paper.vnet.parameters(), average.vnet.parameters(), strict=True):
        assert not torch.equal(was, one)
        torch.testing.assert_close(one, other)
    found, wanted = average.weights(None, pairs.batch), paper.weights(pairs.rewards, pairs.batch)
    for name in ("g", "a", "b"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name))
    part = average.weights(None, pairs.batch[torch.tensor([3, 1])]).g
    torch.testing.assert_close(part, wanted.g[[3, 1]])


def test_an_averaged_adapter(make_policy, make_batch):
    """One VNet update from what a policy believes whose parameters were averaged by hand."""
    example = import_module("research.averaged_adapter")
    policy, other = make_policy(double=True), make_policy(double=True)
    outer, rate = example.AveragedPseudoLabels(0.5), 0.01
    weighting = example.AveragedAdapter(decay=0.75, learn_every=2, outer=outer, learning_rate=rate)
    vnet = deepcopy(weighting.vnet)
    steps(policy, weighting, make_batch, positions=(1,))
    weighting.vnet.load_state_dict(vnet.state_dict())  # what the first step taught does not matter here
    weighting.vnet_optimizer = torch.optim.SGD(weighting.vnet.parameters(), lr=rate)
    pairs, meta = steps(policy, weighting, make_batch, positions=(2, 3))
    mean = by_hand(other, adapters_at(other, (1, 2, 3)), 0.75)
    believed = rewards(other, pairs.batch)
    wanted = rewards(other, meta.longest_first()).u
    torch.testing.assert_close(outer.believed, wanted)
    kept, labels = outer.targets(torch.zeros(4))
    assert kept.tolist() == wanted.abs().ge(0).nonzero()[:, 0].tolist()
    assert labels.tolist() == (wanted > 0).double().tolist()

    # c of the policy's own adapter, along the gradient of the average's labels after the virtual step.
    g, _, _ = vnet(believed.delta, believed.u)
    size = len(pairs.batch)
    step = pairs.weighted(lambda seen: g.detach()[seen.place] / size)
    with shifted(policy, step, -LEARNING_RATE):
        direction = outer.gradient(policy, BETA, meta, 2).d_meta
    c = pairs.along(direction).clamp(-10, 10)  # the estimator's default
    gradients = torch.autograd.grad(-(c * g).sum() / size, list(vnet.parameters()))
    for was, gradient, now in zip(vnet.parameters(), gradients, weighting.vnet.parameters(), strict=True):
        torch.testing.assert_close(now, was - rate * gradient, rtol=1e-5, atol=1e-8)
    assert max(float(gradient.abs().max()) for gradient in gradients) > 1e-3

    again = example.AveragedAdapter(decay=0.75, learn_every=2)
    again.load_state_dict(weighting.state_dict())
    assert again.state_dict()["done"] == 3 and again.updates == weighting.updates == 2
    for name, value in again.state_dict()["mean"].items():
        torch.testing.assert_close(value, mean[name])


def test_what_the_averaged_adapter_refuses(make_policy, make_batch):
    example = import_module("research.averaged_adapter")
    with pytest.raises(UserError, match="decay is 1 and learn_every 10"):
        example.AveragedAdapter(decay=1)
    with pytest.raises(UserError, match="leave features out"):
        example.AveragedAdapter(features=["delta", "dpo_loss"])
    with pytest.raises(UserError, match="zero2"):
        example.AveragedAdapter().check_sharded()
    alone = VNetWeighting(example.AveragedPseudoLabels(), every=1)
    with pytest.raises(UserError, match="needs the weighting AveragedAdapter"):
        steps(make_policy(), alone, make_batch)


def test_held_out_pairs(make_policy, make_batch):
    """Over flips at the rate, the expected gradient is that of clean pairs; a rate of 0 is the clean loss."""
    example = import_module("research.held_out_pairs")
    policy, clean = make_policy(double=True), make_batch(5, seed=3)
    prompts, chosen, rejected = (
        [ids[kinds == kind].tolist() for ids, kinds in zip(clean.input_ids, clean.segment_ids, strict=True)]
        for kind in (Segment.PROMPT, Segment.CHOSEN, Segment.REJECTED)
    )
    flipped = PairBatch.collate(clean.ids, prompts, rejected, chosen)
    wanted = CleanPreference().gradient(policy, BETA, clean, None)
    for rate in (0.0, 0.3):
        outer = example.HeldOutPreference(rate)
        right, wrong = (outer.gradient(policy, BETA, pairs, 2) for pairs in (clean, flipped))
        assert right.retained == 5
        for name, value in wanted.d_meta.items():
            expected = (1 - rate) * right.d_meta[name] + rate * wrong.d_meta[name]
            torch.testing.assert_close(expected, value)
        loss = (1 - rate) * right.metrics["meta/loss"] + rate * wrong.metrics["meta/loss"]
        torch.testing.assert_close(loss, wanted.metrics["meta/loss"], check_dtype=False)
    with pytest.raises(UserError, match="pairs that are not trained on"):
        outer.gradient(policy, BETA, make_batch(3, augmented=True), None)
    with pytest.raises(UserError, match=r"label_noise is 0\.5"):
        example.HeldOutPreference(0.5)


def test_several_wordings(tmp_path, monkeypatch, tiny_llama):
    """All other prompts that mean the same, token by token, and a run with them."""
    monkeypatch.chdir(tmp_path)
    SeveralWordings = import_module("research.several_wordings").SeveralWordings

    tokenizer = train_tokenizer([row["prompt"] for row in World().preference_rows(200, 0)], vocab_size=400)
    tiny_llama("model", tokenizer, vocab_size=len(tokenizer), initializer_range=0.3)
    outer = SeveralWordings("model")
    for prompt in World().prompts():
        words = set(prompt.split())
        (topic,), (mood,) = ([pair for pair in known if words & set(pair)] for known in (TOPICS, MOODS))
        meant = {f"Describe the {t} in a {m} mood:" for t in topic for m in mood}
        others = outer._others(tokenizer(prompt)["input_ids"])
        assert {tokenizer.decode(other, skip_special_tokens=True) for other in others} == meant - {prompt}
        assert all(tokenizer(tokenizer.decode(o, skip_special_tokens=True))["input_ids"] == o for o in others)

    arguments = ["--config", "quickstart/preference", "--config", "methods/pacmr"]
    arguments += ["--model.weighting.outer", "research.several_wordings.SeveralWordings"]
    arguments += ["--model.policy.model", "model", "--model.weighting.outer.tokenizer", "model"]
    arguments += ["--model.weighting.outer.tau", "0.5"]  # a random model is sure of nothing
    arguments += ["--model.weighting.every", "1", "--trainer.max_steps", "2", "--data.meta_batch_size", "4"]
    arguments += ["--data.source.pairs", "64", "--data.source.validation_pairs", "8"]
    arguments += ["--trainer.callbacks.samples", "4", "--trainer.default_root_dir", "run"]
    arguments += ["--trainer.log_every_n_steps", "1"]
    asked, gradient = [], PromptAugmentationConsistency.gradient

    def watched(self, policy, beta, meta, micro_batch_size):
        asked.append(meta)
        return gradient(self, policy, beta, meta, micro_batch_size)

    monkeypatch.setattr(PromptAugmentationConsistency, "gradient", watched)
    cli.main(["fit", *arguments])
    assert len(asked) == 2 and all(len(meta) == len(meta.augmented) == 12 for meta in asked)
    for meta in asked:
        for row in range(12):
            (prompt, *responses), (other, *same) = (
                [part.input_ids[row][part.segment_ids[row] == kind].tolist() for kind in list(Segment)[1:]]
                for part in (meta, meta.augmented)
            )
            assert other in outer._others(prompt) and responses == same
    metrics = pd.read_csv("run/metrics.csv")
    assert (metrics["train/meta/coverage"].dropna() == 1).all()
