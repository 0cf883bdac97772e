"""The ``pacmr`` command: short errors that leave nothing, reloading without YAML, protected run folders."""

import json
import shlex
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml

from pacmr_lightning import cli
from pacmr_lightning.embedded_world import World
from pacmr_lightning.modules import PreferenceModule

from ..conftest import ended, fails, write_lines


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_llama, preference_config) -> str:
    folder = tmp_path_factory.mktemp("base")
    model = tiny_llama(folder / "model", vocab_size=2048, initializer_range=0.2)
    rows = [row | {"eta": None} for row in World().preference_rows(24, 0)]
    pairs = write_lines(folder / "pairs.jsonl", rows)
    callbacks = [{"class_path": "WeightRecorder"}, {"class_path": "RunSummary"}]
    content = preference_config(model, pairs, None, None, callbacks, max_steps=2, val_check_interval=1)
    content["data"]["init_args"]["source"]["init_args"]["validation_fraction"] = 0.05
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return str(folder / "config.yaml")


@pytest.fixture
def base(config, tmp_path, monkeypatch) -> list[str]:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return ["--config", config]


VNET = "--model.weighting VNetWeighting"
PAC = f"{VNET} --model.weighting.outer PromptAugmentationConsistency"
NOISE = "--data.noise NearTieNoise --data.noise.share 0.3"
TWO_RATES = "--data.noise TwoRateNoise --data.noise.rates '[0, 0.2]'"
WORD = "--data.noise SpuriousPreferenceNoise --data.noise.share 0.3 --data.noise.word"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{PAC} --model.weighting.outer.tau 0.49", "tau is 0.49"),
        ("--model.policy.rank null", "rank is null, but it must have a value."),
        (f"--output {__file__}/run", "is a file and no folder; name another place."),
        (f"--model.objective DrDPO {VNET}", "VNetWeighting would have no effect"),
        ("--model.weighting SigmoidPrior --model.weighting.offset auto", "noise_rate is 0.0"),
        ("--model.weighting OracleWeights", "add the column eta to the rows"),
        ("--model.weighting DropFlipped", "add the column flipped to the rows"),
        (
            NOISE,
            "NearTieNoise needs eta, the probability that the chosen response is better, of every pair, but "
            "24 of the 24 training pairs have none, 'world-0-0'",
        ),
        ("--data.clean_meta EmbeddedWorld", "the weighting has no meta-batch"),
        (f"{NOISE} --data.noise_rate 0.3", "noise_rate and noise are given"),
        ("--model.objective AnnotatorRPOEM", "no training pair names one; give the rows a column annotator"),
        (f"{TWO_RATES} --model.weighting OracleWeights", "needs one noise rate"),
        (f"{WORD} 'x y'", "word is 'x y', but it must be a single word"),
        (f"{WORD} x", "between 0.0% and 0.0% of these labels can be expected to be"),
        ("--data.noise AnnotatorNoise --data.noise.reliabilities '{a: 2}'", "reliabilities of 'a' is 2"),
        ("--model.policy.model ./nowhere", "nowhere"),
        ("--model.policy.lora_options '{use_dora: true}'", "the key 'use_dora', but it takes"),
        ("--model.policy.lora_options '{r: 4, lora_dropout: 0.1}'", "set the option rank instead"),
        ("--data.source.init_args.train nowhere.jsonl", "nowhere.jsonl"),
        ("--data.max_length 3", "max_length"),
        ("--model.learning_rate 1e39", "learning_rate is 1e+39, but it must be above 0 and at most 1e30"),
        ("--model.weight_decay -0.1", "weight_decay is -0.1, but it must be at least 0"),
        ("--model.betas '[0.9, 1]'", "one of betas is 1.0, but it must be at least 0 and below 1"),
        ("--seed_everything -1", "-1 is not in bounds"),
        ("--ckpt_path nowhere.ckpt", "nowhere.ckpt does not exist"),
        ("--trainer.strategy nothing", "invalid strategy name"),
        ("--trainer.devices 99", "global_batch_size is 8, which 99 processes cannot share evenly"),
    ],
)
def test_bad_options(words, message, base, capsys):
    assert message in fails(capsys, ["fit", *base, *shlex.split(words)])
    assert not list(Path().iterdir()), "bad input left something behind"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # Not given, the number of processes is torchrun's.
        (["--data.global_batch_size", "7"], "global_batch_size is 7, which 2 processes cannot share evenly"),
        (["--trainer.devices", "1"], "torchrun has started 2 processes, but trainer.devices is 1"),
        (["--trainer.devices", "3"], "torchrun has started 2 processes, but trainer.devices is 3"),
    ],
)
def test_processes_that_torchrun_has_started(options, message, base, capsys, monkeypatch):
    started = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "RANK": 0, "LOCAL_RANK": 0}
    for name, value in (started | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29511}).items():
        monkeypatch.setenv(name, str(value))
    assert message in fails(capsys, ["fit", *base, *options])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nnot JSON\n", "line 2 is not JSON (Expecting value at column 1); write one object a line."),
        ('{"prompt": "a", "chosen": "b"}\n', "rejected"),
        ('{"prompt": "a", "chosen": "b", "chosen": "x", "rejected": "c"}\n', "has the key 'chosen' twice"),
        ('{"prompt": "a", "chosen": "b", "rejected": "b"}\n', "equal responses"),
        ("", "bad.jsonl is empty; it must hold at least one row"),
    ],
)
def test_bad_files(text, message, base, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text(text)
    words = [*base, "--data.source.init_args.train", str(tmp_path / "bad.jsonl")]
    assert message in fails(capsys, ["fit", *words])
    assert not list(Path().iterdir())


def test_a_run(base, capsys, tmp_path):
    """Fit, protect, resume, validate, predict, reload without YAML, compare: the life of a run's folder."""
    arguments = [*base, *PAC.split(), "--model.weighting.outer.tau", "0.5", "--model.method", "pacmr"]
    run = Path("runs/preferences-pacmr-noise30-seed42")
    hold = f"from pacmr_lightning.files import *\nwith only_one(Path('{run}')): print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=-1, stdout=-1) as other:
        other.stdout.readline()
        assert f"Another run works in {run};" in fails(capsys, ["fit", *base, "--output", str(run)])
        other.kill()
    cli.main(["fit", *arguments, "--data.noise_rate", "0.3", "--model.max_new_tokens", "3"])
    found = {path.name for path in run.iterdir()}
    assert {"config.yaml", "metrics.csv", "tensorboard", "checkpoints", "summary.json"} <= found
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["model"]["init_args"]["weighting"]["init_args"]["every"] == 10
    assert json.loads((run / "summary.json").read_text())["method"] == "pacmr"

    assert f"{run} already holds a run" in fails(capsys, ["fit", *arguments, "--data.noise_rate", "0.3"])
    last = str(run / "checkpoints" / "last.ckpt")
    again = ["--config", str(run / "config.yaml"), "--ckpt_path", last]
    (run / ".model.partial" / "shards").mkdir(parents=True)  # as a kill in the middle of a save leaves it
    cli.main(["fit", *again, "--trainer.max_steps", "3"])
    assert not (run / ".model.partial").exists()
    assert json.loads((run / "summary.json").read_text())["steps"] == 3
    written = Path(last).stat().st_mtime_ns
    cli.main(["fit", *again[:2], "--trainer.default_root_dir", "elsewhere", "--trainer.max_steps", "1"])
    assert Path("elsewhere/checkpoints/last.ckpt").exists() and Path(last).stat().st_mtime_ns == written
    cli.main(["validate", *again])
    cli.main(["test", *again])
    assert "test/rewards/accuracies" in capsys.readouterr().out
    cli.main(["predict", *again])
    rows = [json.loads(line) for line in (run / "generations.jsonl").read_text().splitlines()]
    fields = {"id", "prompt", "response", "finish_reason", "prompt_tokens", "response_tokens"}
    assert rows and all(set(row) == fields and row["response_tokens"] <= 3 for row in rows)
    # An option of the command line counts, and not the checkpoint's.
    cli.main(["predict", *again, "--model.max_new_tokens", "1", "--generation.output", "one.jsonl"])
    lines = Path("one.jsonl").read_text().splitlines()
    assert [json.loads(line)["response_tokens"] for line in lines] == [1] * len(rows)

    module = PreferenceModule.load_from_checkpoint(last)
    assert module.method == "pacmr" and module.weighting.outer.tau == 0.5
    checkpoint = torch.load(last, weights_only=True)
    for name, parameter in module.policy.adapter().items():
        assert torch.equal(parameter, checkpoint["state_dict"][f"policy.{name}"])
    torch.testing.assert_close(module.vnet.state_dict(), checkpoint["weighting"]["vnet"], rtol=0, atol=0)

    cli.main(["compare", str(run)])
    assert " pacmr  " in capsys.readouterr().out
    assert json.loads((run / "summary.json").read_text())["flip_auroc"] is not None
    moved = ["--config", str(run.rename("moved") / "config.yaml"), "--ckpt_path", "last"]
    moved += ["--config", "{seed_everything: 1}"]
    assert f"No checkpoint is in {run}/checkpoints; add --output moved," in fails(capsys, ["fit", *moved])
    cli.main(["validate", *moved, "--output", "moved"])


@pytest.mark.parametrize("arguments", [["fit", "--help_all"], ["predict", "--help_all"], ["audit", "--help"]])
def test_help(arguments, capsys):
    status, out, _ = ended(capsys, arguments)
    assert status == 0 and "usage: pacmr " in out


def test_the_first_page_names_every_command_once(capsys):
    out = ended(capsys, ["--help"])[1]
    for name in (*cli.RUNS, *cli.TOOLS):
        assert sum(line.startswith(f"  {name} ") for line in out.splitlines()) == 1, name


@pytest.mark.parametrize(
    ("commands", "heavy"),
    [
        ({"--help": 0, "fit --help": 0, "fit": 2, "predict --help": 0}, {"torch", "numpy", "pandas"}),
        ({"compare --help": 0, "compare --nonsense": 2}, {"lightning", "transformers"}),
    ],
)
def test_what_needs_no_trainer_does_not_wait_for_it(commands, heavy):
    code = f"""
import sys
from pacmr_lightning.cli import main
for words, status in {commands}.items():
    try: main(words.split())
    except SystemExit as stop: assert stop.code == status, words
    else: raise AssertionError(words)
    assert not {heavy} & set(sys.modules), words
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def test_unknown_command(capsys):
    assert "Unknown command fitt; did you mean fit? Commands are fit, validate," in fails(capsys, ["fitt"])
    assert "Unknown command x; choose one of fit, validate," in fails(capsys, ["x"])


def test_a_reader_that_has_seen_enough():
    """As in ``pacmr sweep FILE --dry_run | head``: the end of the pipe is no error to be told."""
    script = """
import sys
from pacmr_lightning import cli
from pacmr_lightning.command_line.output import print_result
def flood():
    for _ in range(10_000):
        print_result("x" * 1000)
flood.flood = flood
cli.TOOLS["flood"] = ""
sys.modules["pacmr_lightning.commands.flood"] = flood
cli.main(["flood"])
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(120) == 128 + signal.SIGPIPE
        assert process.stderr.read() == b""


def test_what_ends_a_quickstart_early(base, capsys):
    Path("there").mkdir()
    assert "output is there, which exists; remove it" in fails(capsys, ["quickstart", "--output", "there"])
    few = [fails(capsys, ["quickstart", f"--{n}", "1", "--output", "new"]) for n in ("pairs", "samples")]
    assert "must be at least 64" in few[0] and "samples is 1" in few[1] and not Path("new").exists()


def test_what_a_run_says(inside, tiny_llama):
    """Into a log: what, from what, where the results are; no tips, summaries of 0 FLOPs or lines of bars."""
    tiny_llama("model")
    command = [sys.executable, "-m", "pacmr_lightning", "fit", "--config", "quickstart/preference"]
    command += ["--config", "sweeps/world_base", "--model.policy.model", "model", "--data.source.pairs", "64"]
    command += ["--data.source.validation_pairs", "8", "--trainer.callbacks.samples", "4"]
    command += ["--trainer.default_root_dir", "run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "it is for results"
    said = done.stderr
    for fact in ("64 of 64 pairs kept", "trained of", "The run is in run;", "pacmr audit run"):
        assert fact in said, fact
    for talk in ("Tip", "FLOPs", "TPU", "Tokenizing", "Loading weights", "Warning"):
        assert talk not in said, talk
    assert len(said.splitlines()) < 30, said


def test_warnings_to_users_have_no_place_in_the_code(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    cli.main(["configs"])
    kinds = UserWarning, FutureWarning
    as_shown = [warnings.formatwarning("It is so.", kind, "f.py", 3, "g()") for kind in kinds]
    assert as_shown == ["Warning: It is so.\n", "f.py:3: FutureWarning: It is so.\n  g()\n"]
