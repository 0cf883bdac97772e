"""A real PACMR-DPO run of a tiny model under noise."""

import json
import shutil

import pytest

from pacmr_lightning import cli
from pacmr_lightning.audit import AuditOptions
from pacmr_lightning.audit import audit as whole_audit
from pacmr_lightning.commands.audit import show
from pacmr_lightning.embedded_world import World
from pacmr_lightning.runs.finished_run import find_run, load_run

PAIRS = 64
HOSTILE = "<script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">"


def audit(run, scorer=None, **options):
    """The table of an audit, which is shown as the command does."""
    found = whole_audit(str(run), options=AuditOptions(scorer, **options))
    show(found)
    return found.table


def loaded(run):
    """A run's files, module, data with labels as trained, and updates."""
    found = find_run(str(run), "last")
    module, data, updates = load_run(found, as_trained=True)
    data.setup("fit")
    return found, module, data, updates


def refused(capsys, *words):
    """What a command says of bad input, in one sentence and with exit status 2."""
    with pytest.raises(SystemExit) as stop:
        cli.main([*map(str, words)])
    said = " ".join(capsys.readouterr().err.split())
    assert stop.value.code == 2 and said.count("error: ") == 1 and "Traceback" not in said
    return said


def world_rows(count, seed):
    """World rows with a column of their own; some say whether their label is wrong."""
    rows = list(World().preference_rows(count, seed))
    for i, row in enumerate(rows):
        row["annotator"] = f"a{i % 3}"
        if i % 4 == 0:
            row["flipped"] = i % 8 == 0
    rows[3]["rejected"] += f" {HOSTILE} \u202e abc \u0001 😀"
    return rows


@pytest.fixture(scope="session")
def finished(tmp_path_factory, tiny_llama):
    folder = tmp_path_factory.mktemp("audit")
    tiny_llama(folder / "model", initializer_range=0.2)
    for name, count, seed in (("train", PAIRS, 0), ("validation", 8, 1)):
        lines = [json.dumps(row) + "\n" for row in world_rows(count, seed)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    cli.main(
        [
            *("fit", "--model", "PreferenceModule", "--model.policy", "PolicyModel"),
            *("--model.policy.model", str(folder / "model"), "--model.objective", "DPO"),
            *("--model.objective.beta", "1.0", "--model.learning_rate", "0.01"),
            *("--model.weighting", "VNetWeighting", "--model.weighting.every", "2"),
            *("--model.weighting.learning_rate", "0.1", "--data", "PreferenceDataModule"),
            *("--data.source", "Files", "--data.source.train", str(folder / "train.jsonl")),
            *("--data.source.validation", str(folder / "validation.jsonl")),
            *("--data.global_batch_size", "8", "--data.meta_batch_size", "8", "--data.noise_rate", "0.3"),
            *("--trainer.max_epochs", "1", "--trainer.accelerator", "cpu"),
            *("--trainer.limit_val_batches", "0"),
            *("--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"),
            *("--trainer.callbacks", "WeightRecorder"),
            *("--trainer.default_root_dir", str(folder / "run")),
        ]
    )
    return folder / "run"


@pytest.fixture
def run(finished, tmp_path):
    """A copy of the run that a test may change."""
    return shutil.copytree(finished, tmp_path / "run")
