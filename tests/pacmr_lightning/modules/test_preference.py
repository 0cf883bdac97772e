"""PreferenceModule under a real Trainer: the step's gradient, determinism, resuming, checkpoints."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.tuner import Tuner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from torchmetrics import Metric
from transformers import AutoModelForCausalLM

from pacmr_lightning.batch import LogProbs
from pacmr_lightning.callbacks import RunSummary, Throughput, WeightRecorder
from pacmr_lightning.datamodules import Files, PreferenceDataModule, SFTDataModule, WorldCompletions
from pacmr_lightning.embedded_world import World
from pacmr_lightning.errors import UserError
from pacmr_lightning.meta_gradient import CentralDifference, GhostDotProduct, PromptAugmentationConsistency
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.modules.resumed_options import check_options, flat_options
from pacmr_lightning.modules.schedule import warmup_cosine
from pacmr_lightning.objectives import DPO, RDPO, RPOEM, AnnotatorRPOEM
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.rewards import Rewards, Weights
from pacmr_lightning.runs.folder import read_weights
from pacmr_lightning.runs.loggers import ContinuedCSVLogger
from pacmr_lightning.weighting import AuditedWeights, SigmoidPrior, Unweighted, VNetWeighting

from ...conftest import quiet_trainer, read_lines, write_lines

WEIGHTINGS = {
    "dpo": Unweighted,
    "fixed": lambda: SigmoidPrior(0.8, 0.3),
    "pacmr": lambda: VNetWeighting(PromptAugmentationConsistency(0.5), GhostDotProduct(), every=2),
    "pacmr-central": lambda: VNetWeighting(PromptAugmentationConsistency(0.5), CentralDifference(), every=2),
}


@pytest.fixture(scope="session")
def world_files(tmp_path_factory) -> tuple[str, str]:
    """96 and 16 pairs of the synthetic benchmark as files, two thirds with an annotator."""
    folder = tmp_path_factory.mktemp("pairs")
    train, validation = (list(World().preference_rows(count, seed)) for count, seed in ((96, 0), (16, 1)))
    for i, row in (*enumerate(train), *enumerate(validation)):
        row["annotator"] = ("ann", "bob", None)[i % 3]
    return write_lines(folder / "train.jsonl", train), write_lines(folder / "validation.jsonl", validation)


@pytest.fixture
def make_run(tmp_path, save_model, tiny_tokenizer_folder, world_files):
    base = save_model("llama", vocab_size=2048)

    def run(method, name="run", *, steps=6, ckpt=None, model=base, more=(), meta_every=0, **options):
        seed_everything(0)
        weighting = WEIGHTINGS[method]()
        module_options = {"objective": DPO(1.0), "method": method, "learning_rate": 1e-2}
        module = PreferenceModule(
            PolicyModel(model, rank=4, **options.pop("policy", {})),
            **{**module_options, "weighting": weighting, **options.pop("module", {})},
        )
        sizes = {"global_batch_size": 8, "meta_batch_size": 6, "noise_rate": 0.3}
        sizes["meta_every"] = weighting.every if meta_every == 0 else meta_every
        sizes |= options.pop("data", {})
        data = PreferenceDataModule(Files(*world_files), tiny_tokenizer_folder, **sizes)
        root = tmp_path / name
        place = root / "checkpoints"
        saving = ModelCheckpoint(place, every_n_train_steps=5, save_top_k=-1, filename="{step}")
        options = {"max_epochs": 1, "val_check_interval": 3, "log_every_n_steps": 2} | options
        trainer = quiet_trainer(
            root,
            max_steps=steps,
            enable_model_summary=options.pop("summary", False),
            logger=[TensorBoardLogger(root, "tensorboard", ""), ContinuedCSVLogger(root, "", "")],
            callbacks=[WeightRecorder(), RunSummary(window=40), Throughput(window_size=2), saving, *more],
            **options,
        )
        if steps:
            trainer.fit(module, data, ckpt_path=ckpt)
        else:
            trainer.validate(module, data, verbose=False)
        return trainer, module

    return run


@pytest.fixture
def checkpoint(tmp_path):
    return lambda name="run": str(tmp_path / name / "checkpoints" / "step=5.ckpt")


@pytest.mark.parametrize("method", ["dpo", "fixed", "pacmr"])
def test_curves(method, make_run, tmp_path):
    trainer, module = make_run(method)
    assert trainer.global_step == 6
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    tags = set(events.Tags()["scalars"])
    wanted = {"loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"}
    wanted |= {"logps/chosen", "logps/rejected"}
    assert {f"train/{t}" for t in wanted} <= tags and {f"val/{t}" for t in wanted | {"kl"}} <= tags
    assert {"train/grad_norm", "train/weights/mean", "train/weights/std", "train/weights/gap"} <= tags
    assert {"train/weights/effective_sample_size", "wall_clock/train/device/items_per_sec"} <= tags
    if method == "pacmr":
        names = ("coverage", "d_norm", "coefficient_mean", "clipped_share", "skipped_updates")
        assert {f"train/meta/{name}" for name in names} <= tags
        assert [event.value for event in events.Scalars("lr-VNet-updates")] == [1, 2, 3]
        assert events.Scalars("lr-VNet")[-1].value == pytest.approx(1e-3)
    else:
        assert not any("VNet" in tag for tag in tags)
    assert read_weights(tmp_path / "run")["a"].isna().all() == (method == "dpo")
    trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = 2, 12
    trainer.fit(module, trainer.datamodule)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3)  # the end of all updates


def test_curves_show_only_what_was_measured(make_run, tmp_path):
    """Lightning would log the values of updates 0 and 4 at each step until the epoch ends."""
    weighting = VNetWeighting(PromptAugmentationConsistency(0.5), every=4)
    make_run("pacmr", module={"weighting": weighting}, meta_every=4)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/meta/d_norm")] == [1, 5]
    before = {path: path.read_bytes() for path in tmp_path.rglob("run/**/*.*")}
    make_run("pacmr", fast_dev_run=True)  # a trial leaves the run's files alone
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("run/**/*.*")}


def test_the_model_summary_is_followed_by_vnet(make_run, caplog):
    """Its parameters are no submodule's, so the line counts what the table lacks; and nothing is logged."""
    options = {"summary": True, "more": [ModelSummary()], "log_every_n_steps": 0, "meta_every": 4}
    trainer, module = make_run("pacmr", steps=3, module={"weighting": VNetWeighting(every=4)}, **options)
    assert trainer.global_step == 3 and "train/loss" not in trainer.callback_metrics
    table, line = caplog.text.index("Trainable params"), caplog.text.index("VNet: 1,266 parameters beside")
    assert table < line and "module.vnet_optimizer (Adam, 0.001)" in caplog.text
    assert "every 4 policy updates, so only at the first of this run's 3" in caplog.text
    assert not any("vnet" in name for name, _ in module.named_modules())


def test_the_margin_starts_at_zero(make_run):
    """Before any update policy and reference agree to the last bit, with the same code for both."""
    trainer, module = make_run("dpo", steps=0)
    metrics = trainer.callback_metrics
    assert metrics["val/rewards/margins"] == 0 and metrics["val/kl"] == 0
    assert metrics["val/rewards/accuracies"] == 0.5
    assert metrics["val/loss"] == pytest.approx(0.693147, abs=1e-6)
    for _ in range(2):
        quiet_trainer(None, max_steps=1).fit(module, trainer.datamodule)
    assert {float(mean.weight) for mean in module.train_means.means.values()} == {8}  # of one fit's window


def _without_timing(run: Path):
    frame = pd.read_csv(run / "metrics.csv")
    frame = frame.drop(columns=[c for c in frame if c.endswith("_per_sec")])
    frame = frame.dropna(how="all", subset=[c for c in frame if c not in ("epoch", "step")])
    return frame.reset_index(drop=True)


def test_micro_batches_of_tokens_in_packed_rows(make_run, packed, checkpoint, tmp_path, monkeypatch):
    """They change nothing, and a resume repeats their bits. By pairs: test_same_numerics.py, tests/kills."""
    passes, lay_out = [], PolicyModel.rows

    def counted(policy, batch):
        passes.append(batch.token_count)
        return lay_out(policy, batch)

    monkeypatch.setattr(PolicyModel, "rows", counted)
    trainer, whole = make_run("pacmr", "whole", steps=8)
    budget = 2 * trainer.datamodule.train_pairs.longest(1, augmented=True).token_count
    assert max(passes) > budget
    packed()
    passes.clear()
    options = {"steps": 8, "module": {"micro_batch_tokens": budget}}
    _, straight = make_run("pacmr", "straight", **options)
    assert max(passes) <= budget
    shutil.copytree(tmp_path / "straight", tmp_path / "again")
    _, again = make_run("pacmr", "again", ckpt=checkpoint("straight"), **options)
    learned = ([*one.policy.adapter().values(), *one.vnet.parameters()] for one in (whole, straight, again))
    for a, b, c in zip(*learned, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-3)
        assert torch.equal(b, c)
    for read in (read_weights, _without_timing):
        pd.testing.assert_frame_equal(read(tmp_path / "again"), read(tmp_path / "straight"))
    rows = [read_weights(tmp_path / name) for name in ("whole", "straight")]
    pd.testing.assert_frame_equal(*rows, atol=1e-3, rtol=1e-3)


def test_a_resumed_fit_uses_its_own_optimizer_options(make_run, checkpoint, caplog):
    make_run("pacmr")
    caplog.clear()
    trainer, module = make_run("pacmr", "same", ckpt=checkpoint())
    assert "instead of" not in caplog.text
    group = trainer.optimizers[0].param_groups[0]
    assert group["initial_lr"] == 1e-2 and group["lr"] == pytest.approx(1e-3)  # min_lr_ratio at the end

    more = {"policy": {"lora_compute_dtype": "float32"}}
    make_run("pacmr", "lora", ckpt=checkpoint(), **more)
    assert "policy.lora_compute_dtype float32 instead of base" in caplog.text

    changed = {"learning_rate": 3e-3, "betas": (0.8, 0.9), "weight_decay": 0.1, "max_grad_norm": 0.5}
    groups, watch = [], Callback()
    watch.on_train_batch_start = lambda t, *_: groups.append(dict(t.optimizers[0].param_groups[0]))
    trainer, _ = make_run("pacmr", "other", steps=8, ckpt=checkpoint(), module=changed, more=[watch])
    for text in (
        "learning_rate 0.003 instead of 0.01",
        "betas [0.8, 0.9] instead of [0.9, 0.95]",
        "weight_decay 0.1 instead of 0.0",
        "max_grad_norm 0.5 instead of 1.0",
        "planned updates 8 instead of 6",
    ):
        assert text in caplog.text
    fresh = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=3e-3)
    schedule = warmup_cosine(fresh, 8, module.warmup_ratio, module.min_lr_ratio)["scheduler"]
    assert groups[0]["lr"] == pytest.approx(3e-3 * schedule.lr_lambdas[0](5))
    assert groups[0]["betas"] == (0.8, 0.9) and groups[0]["weight_decay"] == 0.1
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(3e-4)


OUTER, GHOST = PromptAugmentationConsistency(0.6), GhostDotProduct()
OTHERS = [
    ("dpo", {"policy": {"target_modules": ["q_proj"]}}, r"\['q_proj'\] instead of all-linear"),
    ("dpo", {"policy": {"alpha": 64}}, r"policy\.alpha 64 instead of 32"),
    ("dpo", {"policy": {"lora_options": {"use_rslora": True}}}, "use_rslora True instead of None"),
    ("dpo", {"policy": {"dtype": "bfloat16"}}, "policy.dtype bfloat16 instead of float32"),
    ("dpo", {"data": {"noise_rate": 0.2}}, r"data\.noise_rate 0\.2 instead of 0\.3, flipped labels"),
    ("dpo", {"limit_train_batches": 7}, "batches of an epoch 7 instead of 12"),
    ("dpo", {"module": {"objective": DPO(0.5)}}, r"objective\.beta 0\.5 instead of 1\.0"),
    ("dpo", {"module": {"objective": RDPO(1.0, 0.1)}}, "objective RDPO instead of DPO;"),
    ("fixed", {"module": {"weighting": SigmoidPrior(0.7, 0.3)}}, r"weighting\.slope 0\.7 instead of"),
    (
        "pacmr",
        {"module": {"weighting": VNetWeighting(OUTER, GHOST, every=2, learning_rate=1e-2)}},
        r"outer\.tau 0\.6 instead of 0\.5, weighting\.learning_rate 0\.01 instead of 0\.001",
    ),
]


@pytest.mark.parametrize("method", ["dpo", "fixed", "pacmr"])
def test_a_fit_with_another_method_does_not_resume(make_run, checkpoint, method):
    make_run(method, more=[type("Best", (Callback,), {"state_dict": lambda _: {"loss": np.float32(1.5)}})()])
    for options, message in (other[1:] for other in OTHERS if other[0] == method):
        with pytest.raises(UserError, match=message):
            make_run(method, "other", ckpt=checkpoint(), **options)
    assert make_run(method, "same", ckpt=checkpoint())[0].global_step == 6


def test_another_reference_is_refused(make_run, checkpoint, tmp_path, caplog):
    trainer, module = make_run("dpo")
    scaled = PreferenceModule(PolicyModel(module.policy.name, rank=4, alpha=8), DPO(1.0))
    with pytest.raises(UserError, match=r"are given: policy\.alpha 8 instead of 32; take the"):
        trainer.validate(scaled, trainer.datamodule, ckpt_path=checkpoint())
    other = PreferenceModule(PolicyModel(module.policy.name, rank=4), DPO(0.5))
    trainer.validate(other, trainer.datamodule, ckpt_path=checkpoint())
    assert "Going on with others than the checkpoint's: objective.beta 0.5 instead of 1.0." in caplog.text
    copy = tmp_path / "moved"
    shutil.copytree(module.policy.name, copy)
    assert make_run("dpo", "moved-run", model=str(copy), ckpt=checkpoint())[0].global_step == 6
    base = AutoModelForCausalLM.from_pretrained(copy)
    with torch.no_grad():
        base.get_output_embeddings().weight[0, 0] += 1e-3
    base.save_pretrained(copy)
    with pytest.raises(UserError, match=f"The weights of {copy} differ from those that the checkpoint"):
        make_run("dpo", "other", model=str(copy), ckpt=checkpoint())
    changed = PreferenceModule(PolicyModel(str(copy), rank=4), DPO(1.0))
    with pytest.raises(UserError, match="differ from those"):
        trainer.validate(changed, trainer.datamodule, ckpt_path=checkpoint())


def test_losses_that_are_no_numbers_stop_the_run(make_run):
    message = r"The loss of \d pairs \(world-0-.*is not a finite number|The gradient is not a finite"
    with pytest.raises(UserError, match=message):
        make_run("dpo", module={"learning_rate": 1e30, "max_grad_norm": None})
    with pytest.raises(UserError, match="The val loss is not a finite number; lower the learning rate"):
        make_run("dpo", module={"learning_rate": 1e30, "max_grad_norm": None}, val_check_interval=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": DPO}, "objective is <class '.*DPO'>, but it must be an Objective, such as DPO()"),
        ({"warmup_ratio": 1.5}, "warmup_ratio is 1.5"),
        ({"min_lr_ratio": -0.1}, "min_lr_ratio is -0.1"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens is 0"),
        ({"micro_batch_tokens": 9, "micro_batch_size": 2}, "tokens is 9 and micro_batch_size 2, but one"),
    ],
)
def test_ranges(options, message):
    with pytest.raises(UserError, match=message):
        PreferenceModule(PolicyModel("unbuilt"), **options)


def test_what_a_run_cannot_do_is_found_at_its_start(make_run, make_policy, monkeypatch):
    for method, options, message in (
        ("dpo", {"module": {"micro_batch_tokens": 20}}, r"is 20, but .* \d+ tokens; set it to \d+ or more"),
        ("pacmr-central", {"module": {"objective": RPOEM(1.0)}}, "use GhostDotProduct"),
        ("pacmr", {"meta_every": None, "model": "nowhere"}, "update 0 is due .* no meta-batch"),
        ("pacmr", {"meta_every": 3, "model": "nowhere"}, "update 2 is due .* no meta-batch"),
        *(("pacmr", {"precision": one}, f"is {one}, .* leave it") for one in ("bf16-mixed", "64-true")),
    ):
        with pytest.raises(UserError, match=message):
            make_run(method, **options)
    make_run("pacmr", meta_every=3, steps=2)  # it ends before the update that has no meta-batch
    monkeypatch.setattr(PreferenceModule, "configure_optimizers", lambda m: torch.optim.SGD(m.parameters()))
    by_metric = lambda m: ([sgd := torch.optim.SGD(m.parameters())], [ReduceLROnPlateau(sgd)])  # noqa: E731
    for owner, name, does, message in (
        (DPO, "learned", lambda _: {"loss": 1.0}, "train/loss is the module's own curve; name"),
        (Unweighted, "weights", lambda _, r, b: Weights(r.u[:, None]), r"shape \(8, 1\) for 8 pairs, not"),
        (PreferenceModule, "configure_optimizers", by_metric, "or ReduceLROnPlateau; return one optimizer"),
        (PreferenceModule, "configure_optimizers", lambda _: None, "returns no or several optimizers"),
    ):
        monkeypatch.setattr(owner, name, does)
        with pytest.raises(UserError, match=message):
            make_run("dpo")
    for data in (DataLoader([1, 2]), SFTDataModule(WorldCompletions(9, 9), None, 300)):
        with pytest.raises(UserError, match=r"datamodule is .*, but must be a PreferenceDataModule"):
            quiet_trainer(None).fit(PreferenceModule(make_policy()), data)
    with pytest.raises(UserError, match=r"^BatchSizeFinder would .*model.micro_batch_size auto tries"):
        Tuner(quiet_trainer(None)).scale_batch_size(PreferenceModule(make_policy()), DataLoader([1, 2]))
    monkeypatch.setattr(PolicyModel, "is_sharded", True)
    with pytest.raises(UserError, match="micro_batch_tokens is 999, but under ZeRO-3"):
        make_run("dpo", module={"micro_batch_tokens": 999})


def test_the_noise_rate_reaches_objective_weighting_and_checkpoint(make_run, checkpoint, caplog):
    parts = {"objective": RDPO(1.0), "weighting": SigmoidPrior(offset="auto")}
    _, module = make_run("fixed", module=parts)
    assert module.objective.label_noise == 0.3
    assert torch.load(checkpoint(), weights_only=True)["objective"] == {"label_noise": 0.3}
    assert module.weighting.offset == pytest.approx(0.847298, abs=1e-6)
    make_run("dpo", "clean", module={"objective": parts["objective"]}, data={"noise_rate": 0.0})
    assert "label_noise auto is 0, as no noise is injected, and RDPO is then plain DPO" in caplog.text


def test_stateful_objectives_resume(make_run, checkpoint):
    trainer, straight = make_run("dpo", "straight", steps=8, module={"objective": AnnotatorRPOEM(1.0)})
    start = checkpoint("straight")
    _, resumed = make_run("dpo", "resumed", steps=8, ckpt=start, module={"objective": AnnotatorRPOEM(1.0)})
    found = straight.objective.state_dict()
    assert found == resumed.objective.state_dict() != AnnotatorRPOEM(1.0).state_dict()
    torch.testing.assert_close(resumed.policy.adapter(), straight.policy.adapter(), rtol=0, atol=0)
    other = PreferenceModule(PolicyModel(straight.policy.name, rank=4), RPOEM(1.0))
    with pytest.raises(UserError, match="The checkpoint was made with another objective than RPOEM; use the"):
        trainer.validate(other, trainer.datamodule, ckpt_path=start)


def test_annotators_reach_the_objective(make_run, tmp_path, world_files):
    """Rates from the u that the run wrote down, step by step; with micro-batches that sort the pairs."""
    names = {row["id"]: row["annotator"] for row in read_lines(world_files[0])}
    objective, again = AnnotatorRPOEM(1.0, momentum=0.5), AnnotatorRPOEM(1.0, momentum=0.5)
    make_run("dpo", "annotators", module={"micro_batch_size": 2, "objective": objective})
    for _, step in read_weights(tmp_path / "annotators").groupby("step"):
        u = torch.tensor(step["u"].to_numpy())
        zeros, who = torch.zeros_like(u), [names[name] for name in step["id"]]
        again.observe(Rewards(LogProbs(u, zeros), LogProbs(zeros, zeros), 1.0, annotators=who), [])
    rates = objective.annotator_rates
    assert objective.estimated_rate == pytest.approx(again.estimated_rate, abs=1e-6)
    assert rates == pytest.approx(again.annotator_rates, abs=1e-6) and rates.keys() == {"ann", "bob"}
    assert abs(rates["ann"] - rates["bob"]) > 1e-3
    learned = json.loads((tmp_path / "annotators/summary.json").read_text())["learned"]
    assert learned == {f"reliability/{name}": 1 - rate for name, rate in rates.items()}
    logged = pd.read_csv(tmp_path / "annotators/metrics.csv")["train/reliability/ann"].dropna()
    assert len(logged) == 3 and logged.iloc[-1] == pytest.approx(learned["reliability/ann"])


def test_metrics_are_on_the_strategys_device(save_model):
    """Nothing may wait for the strategy to move the module: ZeRO-3 does not."""
    module = PreferenceModule(PolicyModel(save_model("llama")), weighting=VNetWeighting())
    module.trainer = SimpleNamespace(strategy=SingleDeviceStrategy("meta"), datamodule=None)
    module.setup("validate")
    states = [metric.metric_state.values() for metric in module.modules() if isinstance(metric, Metric)]
    assert len(states) > 20
    assert {value.device.type for part in states for value in part} == {"meta"}
    assert {p.device.type for p in module.vnet.parameters()} == {"meta"}


def test_a_file_is_known_by_its_content(tmp_path):
    one, moved = tmp_path / "pairs.parquet", tmp_path / "elsewhere" / "pairs.parquet"
    moved.parent.mkdir()
    for file in (one, moved):
        file.write_text("probabilities")
    saved = flat_options("weighting", AuditedWeights(str(one)))
    saved["planned updates"] = 5
    assert flat_options("", {"long": "x" * 9999}) == {"long": "x" * 9999}
    given = {"": [GHOST, {2}], "kind": TrainerFn.FITTING, "file": one, "call": json.dumps}
    found = {".0": "GhostDotProduct", ".0.clip": 10.0, ".1": [2], "kind": "fit", "call": "json.dumps"}
    assert flat_options("", given) == found | flat_options("file", str(one))
    check_options(saved, flat_options("weighting", AuditedWeights(str(moved))) | {"planned updates": 5}, 3)
    moved.write_text("Probabilities")
    with pytest.raises(UserError, match=r"weighting\.audit pairs\.parquet \(.*\) instead of pairs\.parque"):
        check_options(saved, flat_options("weighting", AuditedWeights(str(moved))), 3)


def test_a_shorter_run_than_the_checkpoint_is_told(caplog):
    check_options({"planned updates": 5}, {"planned updates": 6}, 5)
    assert "Nothing is left" not in caplog.text
    check_options({"planned updates": 5}, {"planned updates": 3}, 5)
    assert "Nothing is left to train: 5 of 3 updates are done" in caplog.text
