"""Every shipped config is parsed and trains two updates on a tiny model; every key says what it means."""

import itertools
import json
import re
from pathlib import Path

import pandas as pd
import pytest
import yaml
from transformers import AutoModelForCausalLM

from pacmr_lightning import cli
from pacmr_lightning.callbacks import weight_figures
from pacmr_lightning.embedded_world import World
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.runs.option_parser import OptionParser

from .conftest import ended, read_lines, write_lines

ROOT = Path(__file__).parents[1]
CONFIGS = [*sorted((ROOT / "configs").rglob("*.yaml")), *sorted((ROOT / "examples").glob("*.yaml"))]
SWEEPS = sorted((ROOT / "research" / "sweeps").glob("*.yaml"))
METHODS = sorted((ROOT / "configs" / "methods").glob("*.yaml"))
PREFERENCE = [path for path in CONFIGS if path.name.endswith("preference.yaml") or path.stem == "sentiment"]
SFT = [path for path in CONFIGS if path.name.endswith("sft.yaml")]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT)).removeprefix("configs/")


def test_preference_configs_leave_the_rate_to_the_size():
    for path in PREFERENCE:
        assert yaml.safe_load(path.read_text())["model"]["init_args"].get("learning_rate") is None


@pytest.fixture
def tiny(inside, tiny_llama) -> dict[str, str]:
    """Paths of a tiny model with its tokenizer, of pairs and of completions, in an empty folder."""
    tiny_llama("model")
    pairs = write_lines("pairs.jsonl", World().preference_rows(160, 0))
    completions = write_lines("completions.jsonl", World().sft_rows(400, 0))
    return {"model": "model", "pairs": pairs, "completions": completions}


def upstream(kind: str) -> str:
    """The synthetic benchmark's pairs as the datasets on the Hub are laid out."""
    subsets = ("harmless-base", "helpful-base", "helpful-online", "helpful-rejection-sampled")
    held_out = {"TLDR": ["validation"], "TLDRCompletions": ["valid", "test"]}.get(kind, ["test"])
    for seed, count, splits in ((0, 160, ["train"]), (1, 40, held_out)):
        frame = pd.DataFrame(World().preference_rows(count, seed))
        prompt = frame["prompt"] + " " + frame.index.astype(str)
        post = "SUBREDDIT: r/x\n\nTITLE: t\n\nPOST: " + prompt + "\n\nTL;DR:"
        sides = frame[["chosen", "rejected"]]
        paths = [f"data/{split}-00000-of-00001.parquet" for split in splits]
        if kind == "TLDR":
            turns = sides.map(lambda text: [{"role": "assistant", "content": text}])
            columns = turns.assign(prompt=post)
        elif kind == "TLDRCompletions":
            columns = pd.DataFrame({"prompt": post, "label": frame["chosen"].str.strip()})
        else:
            start = "\n\nHuman: I do not know. " + prompt + "\n\nAssistant:"
            columns = pd.DataFrame({side: start + sides[side] for side in sides})[:60]
            paths = [f"{subset}/{split}.parquet" for subset in subsets for split in splits]
        for path in paths:
            Path(kind, path).parent.mkdir(parents=True, exist_ok=True)
            columns.to_parquet(Path(kind, path))
    return kind


def source_of(config: Path) -> str:
    """The class of the config's source."""
    return yaml.safe_load(config.read_text())["data"]["init_args"]["source"]["class_path"]


SHORT = ["--trainer.max_steps", "2", "--trainer.accelerator", "cpu", "--trainer.default_root_dir", "run"]
SHORT += ["--trainer.log_every_n_steps", "1", "--trainer.limit_val_batches", "1", "--data.num_workers", "0"]

OF_ROWS = ("own_weights", "soft_labels")
"""Methods that need columns of the rows."""


def composed(base: Path, method: Path):
    """Every method on one base, and what uses most of a base on each; others repeat that, and are slow."""
    quick = base.parent.name == "quickstart" or method.stem == "pacmr"
    quick = quick or (name(base) == "preference.yaml" and method.stem in ("dpo", "mwn", *OF_ROWS))
    marks = () if quick else pytest.mark.slow
    return pytest.param(base, method, id=f"{name(base)}-{name(method)}", marks=marks)


@pytest.mark.parametrize(
    ("base", "method"),
    [
        composed(base, method)
        for base, method in itertools.product(PREFERENCE, METHODS)
        # The synthetic benchmark has no votes and no weights.
        if base.parent.name != "quickstart" or method.stem not in OF_ROWS
    ],
)
@pytest.mark.filterwarnings("ignore:CentralDifference is")  # the step of Qu et al. on a tiny bf16 model
def test_preference(base, method, tiny, monkeypatch):
    # A random model never ends a response itself.
    arguments = ["--model.policy.model", tiny["model"], "--model.max_new_tokens", "8"]
    if (base.parent.name, method.stem) != ("quickstart", "pacmr"):
        # To write the figures takes most of the time.
        monkeypatch.setattr(weight_figures, "save_figure", lambda *arguments: None)
    source, noise = source_of(base), []
    if method.stem in OF_ROWS:
        own = write_lines("own.jsonl", [row | {"p_right": 0.9} for row in read_lines(tiny["pairs"])])
        arguments += ["--data.source", "Files", "--data.source.train", own]
        noise = ["--data.noise", "TwoRateNoise", "--data.noise.rates", "[0.1, 0.3]"]
    elif source == "EmbeddedWorld":
        arguments += ["--data.source.pairs", "128", "--data.source.validation_pairs", "32"]
        arguments += ["--trainer.callbacks.samples", "4"]
    elif source == "Files":
        arguments += ["--data.source.train", tiny["pairs"], "--data.noise_rate", "0.2"]
        if base.stem == "sentiment":
            arguments += ["--trainer.callbacks.samples", "4"]
    else:
        arguments += ["--data.source.path", upstream(source)]
        noise = ["--data.noise", "TwoRateNoise", "--data.noise.rates", "[0.1, 0.3]"]
        if source == "TLDR":
            arguments += ["--data.source.test_prompts", upstream("TLDRCompletions")]
    if method.stem == "mwn":
        arguments += ["--data.clean_meta", "EmbeddedWorld", "--data.clean_meta.pairs", "64"]
    if method.stem == "rpo_em_annotators":
        noise = ["--data.noise", "AnnotatorNoise", "--data.noise.share", "0.3"]
    if noise:
        arguments += [*noise, "--data.noise_rate", "0"]
    cli.main(["fit", "--config", str(base), "--config", str(method), *arguments, *SHORT])
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["method"] == method.stem and summary["steps"] == 2
    size = yaml.safe_load(Path("run/config.yaml").read_text())["data"]["init_args"]["validation_batch_size"]
    assert summary["val_pairs"] == min(size, summary["counts"]["validation"]["kept"]) > 0, "of one batch"
    assert {"config.yaml", "metrics.csv", "weights", "tensorboard"} <= {p.name for p in Path("run").iterdir()}
    assert Path("run/noise_mask.parquet").exists() == (summary["noise_rate"] > 0)


@pytest.mark.parametrize("method", METHODS, ids=name)
def test_the_last_method_counts(method):
    """After another one it is what it is after itself; weightings keep the other's objective."""
    parser = OptionParser()
    parser.add_argument("--config", action="config")
    parser.add_subclass_arguments(PreferenceModule, "model")
    words = ["--model=PreferenceModule", "--model.policy=PolicyModel", "--model.policy.model=m"]
    given = [[*words, f"--config={before}", f"--config={method}"] for before in METHODS]
    found = [vars(parser.parse_args(each).model.init_args) for each in given]
    own = found[METHODS.index(method)]
    kept = set() if "objective:" in method.read_text() else {"objective"}
    assert [{name for name in own if one[name] != own[name]} - kept for one in found] == [set()] * len(found)


@pytest.mark.parametrize("base", SFT, ids=name)
def test_sft(base, tiny):
    arguments = []
    source = source_of(base)
    if source == "WorldCompletions":
        arguments += ["--data.source.rows", "128", "--data.source.validation_rows", "32"]
    elif source == "CompletionFiles":
        arguments += ["--data.source.train", tiny["completions"], "--data.batch_size", "8"]
    else:
        arguments += ["--data.source.path", upstream(source), "--data.batch_size", "8"]
    if "from_scratch" not in yaml.safe_load(base.read_text())["model"]["init_args"]:
        arguments += ["--model.model", tiny["model"], "--data.tokenizer", tiny["model"]]
    cli.main(["fit", "--config", str(base), *arguments, *SHORT])
    AutoModelForCausalLM.from_pretrained("run/model")


@pytest.mark.parametrize("path", [*CONFIGS, *SWEEPS], ids=name)
def test_every_key_has_a_comment(path):
    first, *lines = path.read_text().splitlines()
    assert first.startswith("# "), "the file does not say what it is for"
    texts = [line.strip().removeprefix("- ") for line in lines]
    # A class's arguments and sections need no comment of their own.
    values = [text for text in texts if re.match(r"(?!#|init_args:|class_path:)[^:]+:\s*\S", text)]
    assert values and [text for text in values if "#" not in text] == []
    yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_commands_in_a_header(path):
    """They name files that exist, the task's own base, and where VNet's prompts come from."""
    text = path.read_text().replace(" \\\n#", "")
    for words in re.findall(r"^#   (pacmr fit .*|python .*)$", text, re.MULTILINE):
        if re.search(r"configs/(tldr|hh)/preference.yaml .*methods/pacmr", words):
            task = "hh" if "_hh" in words else "tldr"
            assert f"configs/{task}/preference.yaml" in words
            assert f"--data.augmentations data/{task}/augmented.parquet" in words


STRATEGIES = sorted((ROOT / "configs" / "strategies").glob("*.yaml"))


def under(strategy: Path, base: Path):
    """Every strategy under one base, and every base under one strategy; others repeat that, and are slow."""
    marks = () if "ddp" in strategy.stem or base.parent.name == "quickstart" else pytest.mark.slow
    return pytest.param(strategy, base, id=f"{name(strategy)}-{name(base)}", marks=marks)


@pytest.mark.parametrize(("strategy", "base"), [under(s, base) for s in STRATEGIES for base in PREFERENCE])
def test_strategies_compose(strategy, base, capsys):
    """Parsed only: a strategy says where things lie, and leaves the run as it is."""
    method = ROOT / "configs/methods/pacmr.yaml"
    files = [word for path in (base, method, strategy) for word in ("--config", str(path))]
    status, printed, _ = ended(capsys, ["fit", *files, "--print_config"])
    assert status == 0
    parsed = yaml.safe_load(printed)
    own = yaml.safe_load(strategy.read_text())
    for key, value in own["trainer"]["strategy"]["init_args"].items():
        assert parsed["trainer"]["strategy"]["init_args"][key] == value
    before = yaml.safe_load(base.read_text())
    assert parsed["trainer"]["devices"] == own["trainer"].get("devices", before["trainer"]["devices"])
    assert len(parsed["trainer"]["callbacks"]) == len(before["trainer"]["callbacks"])
    assert parsed["model"]["init_args"]["weighting"]["class_path"].endswith("VNetWeighting")
    if strategy.stem != "paper_4gpu":
        data = before["data"]["init_args"]
        assert parsed["data"]["init_args"]["global_batch_size"] == data["global_batch_size"]


def test_the_paper_s_batch():
    """32 pairs an update are 2 micro-batches of 4 on each of 4 devices (its appendix G)."""
    paper = yaml.safe_load((ROOT / "configs/strategies/paper_4gpu.yaml").read_text())
    share = paper["data"]["init_args"]["global_batch_size"] / paper["trainer"]["devices"]
    assert share / paper["model"]["init_args"]["micro_batch_size"] == 2
