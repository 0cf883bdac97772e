"""Of all tests: their order, no time limits, nothing leaves the temporary folder, and what many need."""

import gc
import gzip
import json
import os
import shutil
import sqlite3
import tempfile
from pathlib import Path

# Before datasets is imported: it reads the variable once.
_CACHE = tempfile.TemporaryDirectory(prefix="pacmr-tests-")
os.environ["HF_DATASETS_CACHE"] = _CACHE.name

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import yaml  # noqa: E402

from .forked import Process  # noqa: E402

WORDS = (
    "Describe the sea in a calm mood: What is the best of all books? I do not know it, because of the rain."
)

# The same examples in every run, on a busy machine too, and nothing is left in the folder.
hypothesis.settings.register_profile(
    "tests",
    **{"derandomize": True, "database": None, "deadline": None},
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tests")

TURNS = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
LLAMA = {
    **{"vocab_size": 512, "hidden_size": 16, "intermediate_size": 16},
    **{"num_hidden_layers": 1, "num_attention_heads": 2},
}
SHARED = Path(__file__).parents[1].parent / "shared" / "data"
FORKED = (
    *("test_strategies", "test_kills", "test_generations", "test_tokenization"),
    *("test_runner", "test_slurm", "test_judged_audit"),
)
"""Files whose tests fork processes: in one process of pytest, so that what they fork from imports once."""
LONG = (
    *FORKED,
    *("test_extension", "test_augment", "test_configs", "test_translation"),
    *("test_refine", "test_health", "test_sweeps"),
)
"""Files that take longest on two cores: one that comes last would keep one process waiting for the other."""


# What the tests import stays; to look through it for garbage while it is imported takes seconds.
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    # What libraries import later is as much again: looking through all of it took a fortieth of the time.
    gc.set_threshold(*gc.get_threshold()[:2], 100)
    gc.enable()


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """One process a file, as ``--dist loadfile`` does, and one for what shares a start or a run."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            path = Path(super()._split_scope(nodeid))
            if path.stem in FORKED:
                return "forked"
            return str(path.parent if path.parent.name == "audit" else path)

    return Scheduling(config, log) if config.option.dist == "loadfile" else None


@pytest.fixture(scope="session")
def tiny_tokenizer_folder(tmp_path_factory):
    """A folder with a byte-level BPE tokenizer: it adds BOS, has EOS and PAD, and can encode any text."""
    from pacmr_lightning.datamodules.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([WORDS] * 20, vocab_size=300).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_llama(tiny_tokenizer_folder, tmp_path_factory):
    """Saves a tiny Llama with random weights, and its tokenizer, in a folder, whose name it returns.

    ``tokenizer`` is the tiny one unless another is given; ``keys`` are those of ``LlamaConfig``.
    """
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tiny_tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_folder)
    made = {}

    def save(folder, tokenizer=tiny_tokenizer, seed=0, model_class=LlamaForCausalLM, **keys):
        kind = repr((id(tokenizer), seed, model_class, sorted(keys.items())))
        if kind not in made or tokenizer is not tiny_tokenizer:  # the others may have been changed
            place = tmp_path_factory.mktemp("tiny_llama")
            special = {f"{n}_token_id": getattr(tokenizer, f"{n}_token_id") for n in ("bos", "eos", "pad")}
            torch.manual_seed(seed)
            model_class(LlamaConfig(**{**LLAMA, **special, **keys})).save_pretrained(place)
            tokenizer.save_pretrained(place)
            made[kind] = place, torch.get_rng_state()
        place, state = made[kind]
        shutil.copytree(place, folder, dirs_exist_ok=True)
        torch.set_rng_state(state)
        return str(folder)

    return save


@pytest.fixture(scope="session")
def forked():
    """Starts a process that runs code, as ``python -c`` does but without its imports; see forked.py."""
    started = []

    def start(code, *arguments, **options):
        started.append(Process(code, *arguments, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def inside(tmp_path, monkeypatch):
    """The test's own folder, as the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write_rows(tmp_path):
    return lambda rows, name="rows.jsonl": write_lines(tmp_path / name, rows)


@pytest.fixture(scope="session")
def preference_config():
    """Makes the config of a small preference run on the CPU, which logs each update.

    ``pairs`` is a file of rows, or the options of a source; ``module``, ``data`` and ``trainer`` are options.
    """

    def make(model, pairs, module=None, data=None, callbacks=(), **trainer):
        policy = {"class_path": "PolicyModel", "init_args": {"model": str(model)}}
        files = {"class_path": "Files", "init_args": dict.fromkeys(("train", "validation"), str(pairs))}
        options = {"source": pairs if isinstance(pairs, dict) else files}
        options |= {"global_batch_size": 8, "meta_batch_size": 4}
        shown = {"log_every_n_steps": 1, "enable_progress_bar": False, "enable_model_summary": False}
        return {
            "model": {"class_path": "PreferenceModule", "init_args": {"policy": policy, **(module or {})}},
            "data": {"class_path": "PreferenceDataModule", "init_args": options | (data or {})},
            "trainer": {"accelerator": "cpu", **shown, "callbacks": list(callbacks), **trainer},
        }

    return make


@pytest.fixture
def tokenizer(tiny_tokenizer_folder):
    from pacmr_lightning.datamodules.tokenizer import load_tokenizer

    return load_tokenizer(tiny_tokenizer_folder)


@pytest.fixture
def shared_data():
    """Real rows, where this checkout has them beside it; never part of the repository."""
    if not SHARED.is_dir():
        pytest.skip("the real preference rows are not beside this checkout")
    return SHARED


@pytest.fixture(scope="session")
def pair_rows():
    """Makes pairs with distinct prompts that the rules can reword."""

    def make(count, **columns):
        return [
            {"prompt": f"What is the best of {i} books?", "chosen": f" I do not know all {i}."}
            | {"rejected": f" The {i} of rain.", **columns}
            for i in range(count)
        ]

    return make


@pytest.fixture
def server(request, monkeypatch):
    """A chat endpoint on this machine that answers by the test file's ``reply``, without a key."""
    from .pacmr_lightning.evaluation.faulty_server import FaultyServer

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with FaultyServer(request.module.reply) as server:
        yield server


@pytest.fixture
def store(tmp_path):
    from pacmr_lightning.evaluation.answer_store import AnswerStore

    with AnswerStore(tmp_path / "answers.sqlite") as store:
        yield store


def own_modules() -> dict[str, Path]:
    """Files of the packages by the names under which they are imported."""
    root, package, found = Path(__file__).parents[1], "pacmr_lightning", {}
    for folder, prefix in ((package, ""), ("datamodules", f"{package}."), ("callbacks", f"{package}.")):
        for path in (root / folder).rglob("*.py"):
            name = prefix + ".".join(path.relative_to(root).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def ended(capsys: pytest.CaptureFixture[str], arguments: list[object]) -> tuple[int, str, str]:
    """Runs a command that ends the program; returns its status, output and errors."""
    from pacmr_lightning import cli

    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main([*map(str, arguments)])
    return stop.value.code, *capsys.readouterr()


def fails(capsys: pytest.CaptureFixture[str], arguments: list[object]) -> str:
    """Runs a command, which must fail with status 2 and one line; returns that line."""
    status, _, said = ended(capsys, arguments)
    lines = [line for line in said.splitlines() if line.startswith("pacmr: ")]
    assert status == 2 and "Traceback" not in said
    assert len(lines) == 1 and lines[0].startswith("pacmr: error: ")
    return lines[0]


def short_fit(model: object, words: str = "") -> list[str]:
    """The words of a short preference run on the CPU, and further ones."""
    base = f"fit --model PreferenceModule --model.policy PolicyModel --model.policy.model {model}"
    base += " --data PreferenceDataModule --trainer.accelerator cpu --trainer.enable_progress_bar false"
    return f"{base} --trainer.enable_model_summary false {words}".split()


def files(train: object, validation: object = None) -> str:
    """Words that read pairs from files; without validation rows they are the training rows."""
    return f"--data.source Files --data.source.train {train} --data.source.validation {validation or train}"


def edit_config(run: Path, section: str, **options: object) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config[section]["init_args"] |= options
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def with_callback(name: str, **options: object) -> str:
    given = (f" --trainer.callbacks.{option} {value}" for option, value in options.items())
    return f"--trainer.callbacks+={name}{''.join(given)}"


def quiet_trainer(folder, callbacks=(), **options):
    """A trainer on the CPU that shows nothing, and keeps checkpoints if a callback does."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    quiet["enable_checkpointing"] = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    where = {"accelerator": "cpu", "devices": 1, "default_root_dir": folder, "callbacks": list(callbacks)}
    return Trainer(**{**quiet, **where, **options})


def write_lines(path, rows) -> str:
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return str(path)


def read_lines(path) -> list[dict]:
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def stored(path) -> int:
    with sqlite3.connect(path) as store:
        return store.execute("SELECT count(*) FROM answers").fetchone()[0]
