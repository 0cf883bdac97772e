"""Several processes through the command line: the shipped strategies, and what happens where one fails."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from lightning.pytorch.strategies import DeepSpeedStrategy, StrategyRegistry
from transformers import AutoModelForCausalLM

from pacmr_lightning.command_line.exceptions import lost_process, no_compiler
from pacmr_lightning.commands.fit import parser_of
from pacmr_lightning.runs.config import use_lora_deepspeed

from ...conftest import fails

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture
def fit(base, inside, monkeypatch):
    """Arguments of the quickstart's PACMR-DPO, with all its callbacks, in an empty folder."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    sizes = """--data.source.pairs 321 --data.source.validation_pairs 33 --model.weighting.outer.tau 0.5
        --model.weighting.every 3 --trainer.max_steps 8
        --trainer.callbacks.samples 8 --trainer.callbacks+=SampleResponses --trainer.callbacks.prompts 2
        --trainer.enable_progress_bar false"""

    def fit(run, *arguments, strategy=None, devices=1):
        files = ["quickstart/preference", "methods/pacmr", *([f"strategies/{strategy}"] if strategy else [])]
        configs = [word for file in files for word in ("--config", str(CONFIGS / f"{file}.yaml"))]
        where = ["--trainer.default_root_dir", run, "--trainer.devices", str(devices)]
        return ["fit", *configs, "--model.policy.model", base, *sizes.split(), *where, *arguments]

    return fit


def run(command, status=0):
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=1200)
    assert done.returncode == status, done.stderr[-3000:]
    return done


@pytest.mark.slow
def test_zero_3_through_the_command_line(fit):
    """torchrun's two processes with parts of the base leave what one process leaves, callbacks' files too."""
    alone = run(["pacmr_lightning", *fit("one")])
    group = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "pacmr_lightning"]
    together = run([*group, *fit("two", strategy="zero3", devices=2)])
    [size] = [line for line in alone.stderr.splitlines() if "trained of" in line]
    assert size in together.stderr
    one, two = (torch.load(f"{name}/checkpoints/last.ckpt", weights_only=True) for name in ("one", "two"))
    assert one["weighting"]["updates"] == two["weighting"]["updates"] == 3
    assert min(v.abs().max() for k, v in one["state_dict"].items() if "lora_B" in k) > 1e-3
    torch.testing.assert_close(two["state_dict"], one["state_dict"], atol=1e-4, rtol=0)
    vnets = [torch.cat([x.flatten() for x in each["weighting"]["vnet"].values()]) for each in (two, one)]
    assert (vnets[0] - vnets[1]).abs().quantile(0.95) < 1e-4, "Adam makes steps of rounding alone"
    left = [{p.name for p in Path(name).rglob("*") if "tfevents" not in p.name} for name in ("one", "two")]
    assert left[0] - left[1] == set()
    # Greedy and sampled responses of the trained policy, token by token.
    for file in ("responses.jsonl", "samples.jsonl"):
        assert Path("two", file).read_text() == Path("one", file).read_text()
    # Of 321 probe pairs on two ranks, one counts once though both have it.
    gaps = [pd.read_csv(f"{name}/analysis/weight-gap.csv") for name in ("one", "two")]
    pd.testing.assert_frame_equal(*gaps, atol=1e-3)


OWN = "pacmr_lightning.strategies.LoraDeepSpeedStrategy"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "stage"),
    [
        (["deepspeed_stage_1"], None),
        (["deepspeed_stage_2_offload"], None),
        (["lightning.pytorch.strategies.DeepSpeedStrategy", "--trainer.strategy.stage", "3"], 3),
    ],
)
def test_lightnings_deepspeed_trains_the_adapter(words, stage, fit):
    """Two processes under Lightning's name or class path end where one does; one printed line says why."""
    few = ["--trainer.max_steps", "4", "--trainer.callbacks", "RunSummary"]
    run(["pacmr_lightning", *fit("one", *few)])
    done = run(["pacmr_lightning", *fit("two", *few, "--trainer.strategy", *words, devices=2)])
    assert done.stderr.count(f"trainer.strategy {words[0]} is {OWN} here") == 1 and OWN not in done.stdout
    one, two = (torch.load(f"{name}/checkpoints/last.ckpt", weights_only=True) for name in ("one", "two"))
    assert one["weighting"]["updates"] == two["weighting"]["updates"] == 2
    for name, value in one["state_dict"].items():
        torch.testing.assert_close(two["state_dict"][name], value, atol=1e-4, rtol=0)
    saved = yaml.safe_load(Path("two/config.yaml").read_text())["trainer"]["strategy"]
    assert saved["class_path"] == OWN and saved["init_args"]["stage"] == (stage or int(words[0][16]))


def test_lightnings_names(fit):
    """All of Lightning's registered names, with what they stand for; other strategies stay."""
    parser, arguments = parser_of("fit"), fit("run")[1:]
    names = [name for name in StrategyRegistry if StrategyRegistry[name]["strategy"] is DeepSpeedStrategy]
    assert len(names) >= 7
    config = parser.parse_args([*arguments, "--trainer.strategy", "lightning.pytorch.strategies.DDPStrategy"])
    assert config.trainer.strategy.class_path.endswith(".DDPStrategy")
    for name in ("ddp", "auto", *names):
        config.trainer.strategy = name
        use_lora_deepspeed(config)
        found = config.trainer.strategy
        if name in names:
            assert found.class_path == OWN
            assert vars(found.init_args) == StrategyRegistry[name]["init_params"]
        else:
            assert found == name
    parser.dump(config)  # as config.yaml has it


@pytest.mark.slow
def test_sft_under_deepspeed(tmp_path):
    """Two processes end with the model of DDP, and a run that goes on from the middle with the same bits."""
    words = f"""fit --config {CONFIGS}/quickstart/sft.yaml --data.source.rows 64
        --data.source.validation_rows 16 --data.batch_size 8 --trainer.accelerator cpu --trainer.devices 2
        --checkpoint.every_n_train_steps 2 --checkpoint.every_n_epochs null --checkpoint.save_top_k -1
        --trainer.strategy"""
    models = []
    for folder, more in (
        ("plain", "ddp"),
        ("whole", "deepspeed_stage_2"),
        ("again", f"deepspeed_stage_2 --ckpt_path {tmp_path}/whole/checkpoints/step-2.ckpt"),
    ):
        path = tmp_path / folder
        run(["pacmr_lightning", *f"{words} {more} --trainer.default_root_dir {path}".split()])
        models.append(AutoModelForCausalLM.from_pretrained(path / "model").state_dict())
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value, rtol=1e-5, atol=1e-6)
        assert torch.equal(models[1][name], models[2][name])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_what_ends_one_process_ends_all(fit, strategy):
    """A loss that is no number, and a kill: its sentence says how to go on, which then works."""
    often = ["--checkpoint.every_n_train_steps", "1"]
    for callback, said in (("Poison", "is not a finite number"), ("Killed", "--ckpt_path last")):
        words = fit(callback, f"--trainer.callbacks+=group_callbacks.{callback}", *often, strategy=strategy)
        done = run(["pacmr_lightning", *words, "--trainer.devices", "2"], status=2)
        errors = [line for line in done.stderr.splitlines() if line.startswith("pacmr: error: ")]
        assert len(errors) == 1 and said in errors[0]
        assert "Traceback" not in done.stderr
    run(["pacmr_lightning", *fit("Killed", "--ckpt_path", "last", strategy=strategy, devices=2)])
    assert torch.load("Killed/checkpoints/last.ckpt", weights_only=True)["global_step"] == 8


def test_a_process_that_does_not_answer():
    with pytest.raises(torch.distributed.DistError) as caught:
        torch.distributed.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=timedelta(seconds=1))
    outer = RuntimeError("training failed")
    outer.__cause__ = caught.value
    assert "did not answer in time" in str(lost_process(outer))
    assert lost_process(RuntimeError("out of memory")) is None


def test_a_kernel_that_cannot_be_compiled(monkeypatch):
    from deepspeed.ops.op_builder import CPUAdamBuilder

    monkeypatch.setenv("PATH", "/nowhere")  # no ninja, no compiler
    with pytest.raises(RuntimeError) as caught:
        CPUAdamBuilder().load(verbose=False)
    assert "compile its cpu_adam" in str(no_compiler(caught.value))
    assert no_compiler(RuntimeError("out of memory")) is None


def test_what_is_refused(fit, capsys):
    said = fails(capsys, fit("run", "--model.policy.attn_implementation", "flash_attention_2"))
    assert "attn_implementation to sdpa" in said and not Path("run").exists()
