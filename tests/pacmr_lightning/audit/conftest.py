"""A real PACMR-DPO run of a tiny model under noise."""

import html
import json
import re
import shutil

import pytest

from pacmr_lightning import cli
from pacmr_lightning.audit import AuditOptions, agreement
from pacmr_lightning.audit import audit as whole_audit
from pacmr_lightning.commands.audit import show
from pacmr_lightning.embedded_world import World
from pacmr_lightning.runs.finished_run import find_run, load_run

from ...conftest import fails, short_fit, write_lines

PAIRS = 64
HOSTILE = "<script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">"


@pytest.fixture(scope="module", autouse=True)
def few_resamples(request):
    """Intervals of a tenth of the draws, where an audit's are not what is tested."""
    draws = agreement.resampled_prompts
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem != "test_agreement":
            few = lambda prompts, n: draws(prompts, min(n, 20))  # noqa: E731
            patch.setattr(agreement, "resampled_prompts", few)
        yield


def audit(run, scorer=None, **options):
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
    return " ".join(fails(capsys, words).split())


def pairs_on(page):
    return [json.loads(html.unescape(pair)) for pair in re.findall('data-pair="(.*?)"', page)]


FIT = (
    *("--model.weighting", "Unweighted", "--model.method", "first", "--trainer.max_epochs", "3"),
    *("--trainer.callbacks+", "WeightRecorder", "--trainer.callbacks+", "RunSummary"),
    *("--trainer.limit_val_batches", "null", "--trainer.log_every_n_steps", "5"),
)


def fit_words(finished, folder, *options):
    words = ("fit", "--config", finished / "config.yaml", *FIT, *options)
    return [*map(str, words), "--trainer.default_root_dir", str(folder)]


def fit(finished, folder, *options):
    cli.main(fit_words(finished, folder, *options))
    return folder


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
        write_lines(folder / f"{name}.jsonl", world_rows(count, seed))
    options = f"""
        --model.objective DPO --model.objective.beta 1.0 --model.learning_rate 0.01
        --model.weighting VNetWeighting --model.weighting.every 2 --model.weighting.learning_rate 0.1
        --data.source Files --data.source.train {folder}/train.jsonl --data.noise_rate 0.3
        --data.source.validation {folder}/validation.jsonl --data.global_batch_size 8
        --data.meta_batch_size 8 --trainer.max_epochs 1 --trainer.limit_val_batches 0
        --trainer.callbacks WeightRecorder --trainer.default_root_dir {folder}/run
    """
    cli.main(short_fit(folder / "model", options))
    return folder / "run"


@pytest.fixture(scope="session")
def learned(finished, tmp_path_factory):
    """A DPO run that has memorised its labels: nothing says how many of them are wrong."""
    return fit(finished, tmp_path_factory.mktemp("refine") / "first")


@pytest.fixture
def first(learned, tmp_path):
    return shutil.copytree(learned, tmp_path / "first")
