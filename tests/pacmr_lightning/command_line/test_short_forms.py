"""Short forms of a run's options, the page of help on them, and proposals for options that are not there."""

import re

import pytest

from pacmr_lightning.command_line.short_forms import EXAMPLE, expanded, page
from pacmr_lightning.commands.fit import parser_of

from ...conftest import ended, fails

pytestmark = pytest.mark.usefixtures("inside")


BASE = ["--config", "preference"]
SFT = ["--config", "sft", "--model.model", "m", "--data.tokenizer", "m"]
OUTPUT = ["--trainer.default_root_dir", "runs/x"]
PAIRS = ["--data.source", "Files", "--data.source.train", "p.jsonl"]


@pytest.mark.parametrize(
    ("given", "full"),
    [
        (
            "--model org/m --data p.jsonl --method pacmr --output runs/x",
            [*BASE, "--config", "methods/pacmr", "--model.policy.model", "org/m", *PAIRS, *OUTPUT],
        ),
        ("--model=Qwen2.5 --trainer.max_steps 3", [*BASE, "--model.policy.model", "Qwen2.5"]),
        ("--data org/pairs", [*BASE, "--data.source", "HubPreferences", "--data.source.path", "org/pairs"]),
        # A method and short forms follow the configs that are given.
        ("--method ipo --config preference", [*BASE, "--config", "methods/ipo"]),
        (
            "--model m --config sft --data p.jsonl",
            [*SFT, "--data.source", "CompletionFiles", "--data.source.train", "p.jsonl"],
        ),
        # LightningCLI's own: classes, and configs that name data.
        ("--model PreferenceModule --data my.Pairs", ["--model", "PreferenceModule", "--data", "my.Pairs"]),
        ("-c mine.yaml --method ipo --a 1 --data P.Q", ["-c", "mine.yaml", "--config", "methods/ipo", "--a"]),
        (
            "--model m --checkpoint.save_top_k -1 --print_config --data p.jsonl",
            [*BASE, "--model.policy.model", "m", "--checkpoint.save_top_k", "-1", "--print_config", *PAIRS],
        ),
        ("--config part.yaml", [*BASE, "--config", "part.yaml"]),
        ("--model.help PreferenceModule", ["--model.help", "PreferenceModule"]),
    ],
)
def test_written_out(given, full, tmp_path):
    (tmp_path / "mine.yaml").write_text("data: {class_path: PreferenceDataModule}")
    (tmp_path / "part.yaml").write_text("trainer: {max_epochs: 2}")
    found = expanded(["fit", *given.split()])
    assert found[0] == "fit" and found[1 : 1 + len(full)] == full


def test_a_folder_named_like_a_class_is_a_model(tmp_path):
    (tmp_path / "SFTModule").mkdir()
    assert "--model.policy.model" in expanded(["fit", "--model", "SFTModule"])


def test_the_page(capsys):
    """It has at most 60 lines, and each of its options and defaults is that of the config ``preference``."""
    lines = page().splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 120
    assert ended(capsys, ["fit", "--help"])[1] == page() + "\n"
    values = re.findall(r"^  --((?:model|data|trainer)\.[\w.]+) .*\(default: ([\d.e-]+)[,)]", page(), re.M)
    assert len(values) >= 8
    words = [word for name, value in values for word in (f"--{name}", value)]
    parser = parser_of("fit")
    base = [*BASE, "--model.policy.model", "m", *PAIRS]
    plain = parser.parse_args(expanded(["fit", *base])[1:])
    assert plain.as_dict() == parser.parse_args([*base, *words]).as_dict()
    named = re.findall(r"^  --((?:model|data|trainer)\.[\w.]+) ", page(), re.M)
    for name in set(named) - {"model.help"}:
        place = plain
        for part in name.split("."):
            place = place.get("init_args", place) if hasattr(place, "get") else place
            assert part in place, name
            place = place[part]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--learning_rate 1e-4", "--learning_rate: unknown option; did you mean --model.learning_rate?"),
        ("--beta 0.1", "--beta: unknown option; did you mean --model.objective.beta?"),
        ("--model tiny --data p.jsonl", "The model tiny cannot be loaded"),
        ("--model m --data p.jsonl --method pacrm", "unknown method pacrm; did you mean pacmr?"),
        ("--model m --data p.jsonl --output --seed_everything 1", "--output has no value; give the run's"),
        ("--model m --data p.jsonl --trainer.default_root_dir=", "--output is '', but it must be a local"),
        ("--model m --data p.jsonl --method x", "unknown method x; choose one of cdpo, dpo,"),
    ],
)
def test_proposals(words, said, capsys, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 40)
    assert said in fails(capsys, ["fit", *words.split()])


def test_fit_alone(capsys):
    status, _, said = ended(capsys, ["fit"])
    assert status == 2 and EXAMPLE in said
