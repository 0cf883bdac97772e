"""docs/coming_from_trl.md: its recipe runs, and both sides of its table exist."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from pacmr_lightning import cli
from pacmr_lightning.commands.fit import parser_of
from pacmr_lightning.embedded_world import World

from .conftest import write_lines

PAGE = (Path(__file__).parents[1] / "docs/coming_from_trl.md").read_text()
TABLE = [line.split("|")[1:3] for line in PAGE.splitlines() if line.startswith("| `")]


# TRL calls names that transformers 5.24 deprecates.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
def test_the_recipe(inside, monkeypatch, tiny_llama, capsys):
    """Its program and commands, in their order, with a tiny model and few pairs."""
    pytest.importorskip("trl", reason="TRL is in the extra oracle")
    tiny_llama("path/to/sft-model")
    for name, seed in (("pairs.jsonl", 7), ("validation.jsonl", 8)):
        write_lines(name, World().preference_rows(64, seed))
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    train, audit, again = [
        shlex.split(line, comments=True)
        for block in re.findall(r"```bash\n(.*?)```", PAGE, re.S)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    for words in (train, audit, again):
        if words[:2] == ["python", "train.py"]:
            monkeypatch.setattr("sys.argv", words[1:])
            exec(compile(program, "train.py", "exec"), {})
        else:
            # The tiny model knows nothing, so it cannot predict the labels.
            cli.main([*words[1:], "--noise_rate", "0.3"])
    assert re.search(r"^dpo-cleaned: accuracy on held-out pairs 0\.\d{3}$", capsys.readouterr().out, re.M)
    assert Path("dpo-cleaned/adapter_config.json").is_file()
    lines = Path("pairs.jsonl").read_text().splitlines()
    cleaned = Path("audit/cleaned.jsonl").read_text().splitlines()
    assert 0 < len(cleaned) <= len(lines) and [line for line in lines if line in cleaned] == cleaned


def test_the_names_of_trl():
    trl = pytest.importorskip("trl", reason="TRL is in the extra oracle")
    known = {field.name for field in dataclasses.fields(trl.DPOConfig)}
    named = {name for theirs, _ in TABLE for name in re.findall(r"`(\w+)`", theirs)}
    assert len(named) > 20 and named <= known
    losses = trl.DPOConfig.__dataclass_fields__["loss_type"].metadata["help"]
    ours = " ".join(theirs for theirs, _ in TABLE if "loss_type" in theirs)
    others = {"loss_type", "and", "loss_weights", "label_smoothing"}
    assert set(re.findall(r"'(\w+)'", losses)) == set(re.findall(r"\b[a-z_]+\b", ours)) - others


def test_our_options():
    """Each is one of ``pacmr fit``, with the value that the table gives it."""
    options = {n: v for _, ours in TABLE for n, v in re.findall(r"--([\w.]+)(?: (\w+))?", ours)}
    assert len(options) > 20

    def parsed(**values):
        base = {"config": "preference", "model.policy.model": "m", "data.source.train": "pairs.jsonl"}
        return parser_of("fit").parse_args([f"--{n}={v}" for n, v in (base | values).items()]).as_dict()

    found = parsed(**{name: value for name, value in options.items() if value} | {"model.objective": "RDPO"})
    for name, value in options.items():
        node = found
        for key in name.split("."):
            node = node.get("init_args", node)
            assert key in node, name
            node = node[key]
        assert name == "model.objective" or not value or str(node).lower() == value, name
    for kind, name in (("IPO", "length_normalize"), ("CDPO", "label_noise"), ("DPO", "sft_weight")):
        found = parsed(**{"model.objective": kind})
        assert name in found["model"]["init_args"]["objective"]["init_args"]
