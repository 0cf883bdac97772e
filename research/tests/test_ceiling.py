"""The exact ceiling against policies that are tilted by hand, and against samples."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import logsumexp
from transformers import AutoModelForCausalLM, AutoTokenizer

from pacmr_lightning import cli
from pacmr_lightning.embedded_world import ATTRIBUTES, World
from research.ceiling import NONE, best_of_n, ceiling, gold_rewards, kinds_of_responses, main

RNG = np.random.default_rng(0)
LOG_PROBS = np.log(RNG.dirichlet(np.ones(40), size=3)) - 0.1
REWARDS = RNG.normal(size=(3, 40)).round(1)  # some are equal


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Of a short SFT in the world, so that it mostly writes attributes."""
    folder = tmp_path_factory.mktemp("ceiling")
    cli.main(
        [
            *("fit", "--config", "configs/quickstart/sft.yaml", "--data.source.rows", "1600"),
            *("--trainer.default_root_dir", str(folder), "--trainer.accelerator", "cpu"),
            *("--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"),
        ]
    )
    return folder / "model"


@pytest.fixture(scope="module")
def loaded(reference):
    return AutoModelForCausalLM.from_pretrained(reference).eval(), AutoTokenizer.from_pretrained(reference)


def test_no_policy_is_above_the_ceiling():
    """Random policies, and the tilted one itself, at their own KLs."""
    found = ceiling(LOG_PROBS, REWARDS, np.geomspace(0.02, 500, 400))
    reference = LOG_PROBS - logsumexp(LOG_PROBS, axis=1, keepdims=True)
    assert (np.diff(found["kl"]) < 0).all()
    for size in (0.3, 1.0, 3.0):
        for _ in range(100):
            policy = reference + RNG.normal(scale=size, size=reference.shape) + RNG.normal() * REWARDS
            policy -= logsumexp(policy, axis=1, keepdims=True)
            kl = (np.exp(policy) * (policy - reference)).sum(1).mean()
            reward = (np.exp(policy) * REWARDS).sum(1).mean()
            if kl < found["kl"].max():
                assert reward <= np.interp(kl, found["kl"][::-1], found["reward"][::-1]) + 1e-3
    tilted = reference + REWARDS / 0.7
    tilted -= logsumexp(tilted, axis=1, keepdims=True)
    (row,) = ceiling(LOG_PROBS, REWARDS, [0.7]).itertuples()
    assert row.reward == pytest.approx((np.exp(tilted) * REWARDS).sum(1).mean(), abs=1e-12)
    assert row.kl == pytest.approx((np.exp(tilted) * (tilted - reference)).sum(1).mean(), abs=1e-12)


def test_best_of_n_against_samples():
    found = best_of_n(LOG_PROBS[:1], REWARDS[:1], [1, 2, 5]).set_index("n")
    p = np.exp(LOG_PROBS[0] - logsumexp(LOG_PROBS[0]))
    for n in (1, 2, 5):
        draws = RNG.choice(40, size=(200_000, n), p=p)
        best = draws[np.arange(len(draws)), REWARDS[0][draws].argmax(1)]
        reward = REWARDS[0][best]
        assert found.loc[n, "reward"] == pytest.approx(reward.mean(), abs=5 * reward.std() / 200_000**0.5)
        shares = np.bincount(best, minlength=40) / len(best)
        seen = shares > 0
        assert found.loc[n, "kl"] == pytest.approx(
            (shares[seen] * np.log(shares[seen] / p[seen])).sum(), abs=2e-3
        )
    # With distinct responses only, less than the bound that is usually given.
    assert 0 < found.loc[5, "kl"] < np.log(5) - 4 / 5


def test_kinds_and_their_probabilities(loaded):
    """Against the model's own whole forward pass, kind by kind; together they are all responses."""
    model, tokenizer = loaded
    world = World()
    prompt = world.prompts()[5]
    kinds, log_probs = kinds_of_responses(model, tokenizer, prompt)
    assert kinds.shape == (1 + 16 + 256 + 4096 + 65536, 4) and len(np.unique(kinds, axis=0)) == len(kinds)
    assert 0.5 < np.exp(log_probs).sum() <= 1 + 1e-9
    rewards = gold_rewards(world, prompt, kinds)
    for i in [0, 3, 100, 300, 4000, 4369, *RNG.integers(len(kinds), size=20)]:
        words = [ATTRIBUTES[word] for word in kinds[i] if word != NONE]
        text = prompt + "".join(f" {word}" for word in words)
        assert rewards[i] == pytest.approx(world.gold_reward(prompt, text[len(prompt) :]), abs=1e-12)
        ids = tokenizer(text)["input_ids"] + ([tokenizer.eos_token_id] if len(words) < 4 else [])
        start = len(tokenizer(prompt)["input_ids"])
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, start - 1 : -1].double().log_softmax(-1)
        expected = logits.gather(1, torch.tensor(ids[start:])[:, None]).sum()
        assert log_probs[i] == pytest.approx(float(expected), abs=1e-4)


def test_the_command(reference, tmp_path, capsys, monkeypatch):
    """The whole command, on two of the prompts."""
    prompts = World().prompts()[:2]
    monkeypatch.setattr(World, "prompts", lambda self: prompts)
    file = tmp_path / "ceiling.csv"
    main([str(reference), "--output", str(file)])
    table = pd.read_csv(file)
    optimal, best = (table[table["curve"].eq(name)] for name in ("optimal", "best of n"))
    for row in best.itertuples():
        limit = np.interp(row.kl, optimal["kl"][::-1], optimal["reward"][::-1])
        assert row.reward <= limit + 0.01
    assert f"the reference has {best['reward'].iloc[0]:.2f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "--output", "x.csv"], "There is no model in nowhere"),
        (["nowhere", "--output", "x.txt"], "output is x.txt, but its name must end in .csv"),
        (["nowhere", "--output", "/dev/null/x.csv"], "/dev/null is a file and no folder"),
        (["{half}", "--output", "x.csv"], "cannot be loaded: "),
    ],
)
def test_bad_input(words, message, tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(SystemExit) as stop:
        main([word.format(half=tmp_path) for word in words])
    assert stop.value.code == 2 and message in capsys.readouterr().err
