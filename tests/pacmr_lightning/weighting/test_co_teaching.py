"""Co-teaching against two separate PEFT models in plain torch; its choice, its schedule, and resuming."""

import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, get_peft_model, load_peft_weights
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from pacmr_lightning import cli
from pacmr_lightning.batch import LogProbs, Segment
from pacmr_lightning.callbacks import WeightRecorder
from pacmr_lightning.datamodules import Files, PreferenceDataModule
from pacmr_lightning.embedded_world import World
from pacmr_lightning.errors import UserError
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.objectives import DPO
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.rewards import Rewards
from pacmr_lightning.runs.folder import read_weights
from pacmr_lightning.weighting import CoTeaching, PeerPrior, Unweighted, co_teaching, kept_gradients
from pacmr_lightning.weighting.train_pairs import RecomputedPairs

BETA, LEARNING_RATE, MAX_NORM = 0.7, 1e-2, 0.05  # which clips


class Watch(Callback):
    """Keeps the batches, and both adapters as they are before the first update."""

    def __init__(self):
        self.batches = []

    def on_train_start(self, trainer, pl_module):
        self.first = copied(pl_module.policy.adapter())

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        assert batch.meta is None
        if not self.batches and hasattr(pl_module.weighting, "_build"):
            pl_module.weighting._build(pl_module.policy)
            self.second = copied(pl_module.weighting.state_dict()["adapter"])
        self.batches.append(batch.train)


def copied(adapter):
    return {name: value.detach().clone() for name, value in adapter.items()}


@pytest.fixture
def model(save_model):
    return save_model("llama", vocab_size=512)


@pytest.fixture
def fit(tmp_path, model, tiny_tokenizer_folder, write_rows):
    """Trains with a weighting; returns the module and what ``Watch`` saw."""
    rows = write_rows(World().preference_rows(64, 0))

    def run(weighting, *, steps=4, name="run", ckpt=None, micro=None, precision="32-true"):
        seed_everything(0)
        module = PreferenceModule(
            PolicyModel(model, rank=4, alpha=8),
            DPO(BETA),
            weighting,
            learning_rate=LEARNING_RATE,
            weight_decay=0.1,
            warmup_ratio=0.0,
            min_lr_ratio=1.0,
            max_grad_norm=MAX_NORM,
            micro_batch_size=micro,
        )
        data = PreferenceDataModule(
            Files(rows, rows), tiny_tokenizer_folder, global_batch_size=8, noise_rate=0.3
        )
        watch = Watch()
        kept = ModelCheckpoint(tmp_path / name, every_n_train_steps=2, save_top_k=-1, filename="{step}")
        Trainer(
            default_root_dir=tmp_path / name,
            accelerator="cpu",
            precision=precision,
            max_epochs=1,
            limit_train_batches=steps,
            limit_val_batches=0,
            log_every_n_steps=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[watch, kept, WeightRecorder()],
        ).fit(module, data, ckpt_path=ckpt)
        return module, watch

    return run


def u_of(model, batch):
    """(N,) beta log pi(chosen) - beta log pi(rejected), each response in a row of its own."""
    rows, scored = [], []
    for part in (Segment.CHOSEN, Segment.REJECTED):
        for ids, segments in zip(batch.input_ids, batch.segment_ids, strict=True):
            prompt, response = ids[segments == Segment.PROMPT], ids[segments == part]
            rows.append(torch.cat([prompt, response]))
            scored.append(torch.cat([torch.zeros_like(prompt), torch.ones_like(response)]))
    tokens, scored = (pad_sequence(columns, batch_first=True) for columns in (rows, scored))
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    log_probs = model(tokens, attention_mask=mask).logits[:, :-1].double().log_softmax(-1)
    found = (log_probs.gather(2, tokens[:, 1:, None])[..., 0] * scored[:, 1:]).sum(1)
    chosen, rejected = found.chunk(2)
    return BETA * (chosen - rejected)


def side_by_side(model, starts, batches, weights_of):
    """Two PEFT models, each with AdamW of its own; returns their adapters and the first one's weights."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    models, optimizers = [], []
    for start in starts:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        peft = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")).double()
        trained = {f"peft.{name}": p for name, p in peft.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(start[name])
        models.append((peft, trained))
        optimizers.append(
            torch.optim.AdamW(trained.values(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
        )
    given = []
    for step, batch in enumerate(batches):
        with torch.no_grad():
            apart = u_of(reference, batch)
        us = [u_of(peft, batch) - apart for peft, _ in models]
        losses = [-logsigmoid(u) for u in us]
        for own, other in ((0, 1), (1, 0)):
            g = weights_of(losses[other].detach(), us[other].detach(), step)
            optimizers[own].zero_grad()
            (g * losses[own]).mean().backward()
            torch.nn.utils.clip_grad_norm_(models[own][1].values(), MAX_NORM)
            if own == 0:
                given.append(dict(zip(batch.ids, g.tolist(), strict=True)))
        for optimizer in optimizers:
            optimizer.step()
    return [trained for _, trained in models], given


def classical(losses, us, step):
    """Rate 0.6 after 2 updates: 8, 5 (of 5.6), 3 (of 3.2), 3 pairs, over whose mean the weights are."""
    kept = losses.argsort()[: (8, 5, 3, 3)[step]]
    return torch.zeros_like(losses).index_fill_(0, kept, len(losses) / len(kept))


@pytest.mark.parametrize(
    ("weighting", "weights_of", "micro", "affordable"),
    [
        (CoTeaching(0.6, warmup=2), classical, 2, False),
        (PeerPrior(), lambda losses, us, step: us.sigmoid(), 4, True),
    ],
)
def test_two_models_side_by_side(weighting, weights_of, micro, affordable, fit, model, tmp_path, monkeypatch):
    """Each picks, or weighs, the other's pairs: both adapters and the recorded weights after four updates."""
    monkeypatch.setattr(kept_gradients, "_affordable", lambda *_: affordable)
    module, watch = fit(weighting, micro=micro, precision="64-true")
    alike = [torch.equal(watch.first[name], watch.second[name]) for name in watch.first]
    assert sum(alike) * 2 == len(alike)  # B, which is 0, and no A
    found, given = side_by_side(model, (watch.first, watch.second), watch.batches, weights_of)
    ours = module.policy.adapter(), module.weighting.state_dict()["adapter"]
    for start, mine, theirs in zip((watch.first, watch.second), ours, found, strict=True):
        assert max(float((theirs[name].detach() - start[name]).abs().max()) for name in start) > 1e-2
        for name, value in mine.items():
            torch.testing.assert_close(value, theirs[name], atol=5e-5, rtol=1e-3)
    rows = read_weights(tmp_path / "run")
    for step, weights in enumerate(given):
        for row in rows[rows["step"] == step].itertuples():
            expected = weights[row.id] > 0 if isinstance(weighting, CoTeaching) else weights[row.id]
            assert row.weight == pytest.approx(float(expected), abs=1e-6)
    assert isinstance(weighting, PeerPrior) or 0 < rows["weight"].mean() < 1


def test_bit_for_bit_after_a_resume(fit, tmp_path):
    straight, _ = fit(CoTeaching(warmup=3), name="straight")
    checkpoint = next((tmp_path / "straight").glob("step=2.ckpt"))
    kept = torch.load(checkpoint, weights_only=True)
    assert kept["weighting"]["updates"] == 2 and kept["weighting"]["rate"] == 0.3
    assert not any("second" in name for name in kept["state_dict"])
    resumed, _ = fit(CoTeaching(warmup=3), name="resumed", ckpt=str(checkpoint))
    for name, value in straight.policy.adapter().items():
        assert torch.equal(value, resumed.policy.adapter()[name]), name
    a, b = (module.weighting.state_dict() for module in (straight, resumed))
    assert a["updates"] == b["updates"] == 4 and a["least_u"] == b["least_u"]
    assert all(torch.equal(value, b["adapter"][name]) for name, value in a["adapter"].items())
    assert any(value.any() for name, value in a["adapter"].items() if ".lora_B." in name)
    for i, state in a["optimizer"]["state"].items():
        assert all(torch.equal(value, b["optimizer"]["state"][i][key]) for key, value in state.items())


def test_before_a_pair_is_left_out_it_is_dpo(fit):
    together, _ = fit(CoTeaching(0.3, warmup=10**9), micro=4)
    alone, _ = fit(Unweighted(), micro=4)
    for name, value in together.policy.adapter().items():
        torch.testing.assert_close(value, alone.policy.adapter()[name], atol=1e-4, rtol=1e-4)


def test_keep_rate():
    """R(t) = 1 - rate min(t / warmup, 1)."""
    weighting = CoTeaching("auto", warmup=4)
    with pytest.raises(UserError, match="rate of CoTeaching is auto"):
        weighting.keep_rate()
    weighting.set_label_noise(0.4)
    found = []
    for weighting.updates in range(6):
        found.append(weighting.keep_rate())
    assert found == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.6])
    at_once = CoTeaching(0.4, warmup=0)
    assert at_once.keep_rate() == 0.6
    other = CoTeaching(warmup=10)
    other.load_state_dict(weighting.state_dict())
    assert other.keep_rate() == pytest.approx(0.8)  # the rate and where it stands; warmup is an option


def rewards_of(u):
    zeros = torch.zeros(len(u))
    return Rewards(LogProbs(torch.tensor(u), zeros), LogProbs(zeros, zeros), 1.0)


def test_the_choice_is_one_over_all_ranks(monkeypatch):
    """As many pairs of a rank as belong to the smallest losses of all; of equal ones those of smaller ids."""
    weighting = CoTeaching(0.5, warmup=0)
    kept = weighting.for_the_other(rewards_of([0.0, 1.0, 0.0, -1.0]), DPO(1.0), list("dbca"))
    assert kept.tolist() == [0, 1, 1, 0]  # b, and of c and d the first
    kept = weighting.for_the_other(rewards_of([-1.0, 0.0, 1.0, 0.0]), DPO(1.0), list("acbd"))
    assert kept.tolist() == [0, 1, 1, 0]  # whatever the order
    # -1 is no more kept where nothing else is asked; this rank's smallest kept u was 0.
    assert weighting.alone(rewards_of([-1.0, 0.0, 3.0])).tolist() == [0, 1, 1]
    elsewhere = [(0.01, f"other-{i}", 4.6) for i in range(4)]
    monkeypatch.setattr(co_teaching, "on_all_ranks", lambda values: values + elsewhere)
    assert not weighting.for_the_other(rewards_of([0.0, 1.0, 0.0, -1.0]), DPO(1.0), list("dbca")).any()
    monkeypatch.undo()
    assert CoTeaching(0.99, warmup=0).for_the_other(rewards_of([0.0, 1.0]), DPO(1.0), list("ab")).sum() == 1
    ten = rewards_of([float(i) for i in range(10)])
    assert CoTeaching(0.7, warmup=0).for_the_other(ten, DPO(1.0), list("abcdefghij")).sum() == 3


def test_bad_input(make_policy, make_batch):
    for rate in (-0.1, 1.0, 1.5, float("nan")):
        with pytest.raises(UserError, match=rf"rate is {rate}, but .* \[0, 1\)"):
            CoTeaching(rate)
    with pytest.raises(UserError, match="warmup is -1"):
        CoTeaching(0.2, warmup=-1)
    natural = CoTeaching()
    natural.set_label_noise(0.0)
    with pytest.raises(UserError, match=r"rate of CoTeaching is 0, .*--model\.weighting\.rate 0\.2"):
        natural.check_plan(10, 5)
    with pytest.raises(UserError, match=r"CoTeaching trains a second adapter.*zero2\.yaml"):
        CoTeaching().check_sharded()
    policy, batch = make_policy(), make_batch(4)
    batch = batch.with_reference(LogProbs(torch.full((4,), torch.nan), torch.zeros(4)))
    before = copied(policy.adapter())
    pairs = RecomputedPairs(policy, DPO(1.0), batch, None)
    with pytest.raises(UserError, match="second adapter is not a finite number"):
        CoTeaching(0.0).update(pairs, batch[:0], 1e-3)
    assert all(torch.equal(before[name], value) for name, value in policy.adapter().items())


def test_tools_see_the_first_adapter(tiny_llama, tmp_path, monkeypatch):
    """The export is the first adapter; the audit and the run's callbacks work on such a run."""
    monkeypatch.chdir(tmp_path)
    tiny_llama("model")
    configs = ["configs/quickstart/preference.yaml", "configs/methods/co_teaching.yaml"]
    root = Path(__file__).parents[3]
    words = [word for config in configs for word in ("--config", f"{root}/{config}")]
    words += [
        "--model.policy.model",
        "model",
        "--trainer.default_root_dir",
        "run",
        "--trainer.max_steps",
        "3",
    ]
    words += ["--data.source.pairs", "128", "--data.source.validation_pairs", "16"]
    words += ["--trainer.callbacks", "WeightGap", "--trainer.callbacks+=RunSummary"]
    cli.main(["fit", *words, "--model.weighting.rate", "0.5", "--model.weighting.warmup", "1"])
    kept = torch.load("run/checkpoints/last.ckpt", weights_only=True)
    cli.main(["export", "run", "out"])
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert not any(path.is_dir() for path in (tmp_path / "out").iterdir()), names
    exported = load_peft_weights("out", device="cpu")
    assert len(exported) == len(kept["state_dict"])
    for name, value in exported.items():
        first = name.replace(".weight", ".default.weight")
        assert torch.equal(value, kept["state_dict"][f"policy.peft.{first}"])
    assert "CoTeaching" in (tmp_path / "out" / "README.md").read_text()
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["method"] == "co_teaching" and summary["weight_mean_flipped"] < 1
    cli.main(["audit", "run", "--scorer", "policy", "--share", "0.3"])
    assert (tmp_path / "run/audit/pairs.parquet").is_file()
