"""Sweep files: what a cell is, and one sentence for what is wrong before anything runs."""

import json
from pathlib import Path

import pytest
import yaml

from pacmr_lightning import cli
from pacmr_lightning.errors import UserError
from pacmr_lightning.sweep import state
from pacmr_lightning.sweep.cells import cells
from pacmr_lightning.sweep.spec import read_sweep
from pacmr_lightning.sweep.state import prepare, state_of

from ...conftest import fails
from ..tables import texts
from .conftest import OPTIONS, check_dry_run, check_measures

ROOT = Path(__file__).parents[3]
LITERAL = r"\d{3} {'a': 1} {} {val/loss:.2f}"
PAPER = {"": 21, "_tau": 12, "_clean_meta": 9}
PAPER |= {f"{kind}_4gpu": number for kind, number in PAPER.items()}
SIZES = {
    **{"world": 450, "tldr_small": 30, "sentiment_tiny": 4, "sentiment_small": 4},
    **{f"{task}{kind}": n for task in ("tldr", "hh") for kind, n in PAPER.items()},
    **{f"{task}_consistency{devices}": 1 for task in ("tldr", "hh") for devices in ("", "_4gpu")},
}
"""Cells of every sweep file in configs/sweeps and examples."""


def nested(train: str) -> dict:
    return {"class_path": "pacmr_lightning.datamodules.Files", "init_args": {"train": train}}


def test_cells(write_sweep, world):
    """Every combination in an own folder, with the arguments of its pacmr fit."""
    options = {"y": [1, "{seed}"], "z": "s{seed}n{noise}", "v": nested("{folder}/w")}
    path = write_sweep(
        noise_rates=[0.2, 0.35],
        methods={
            "dpo": None,
            "soft": {"config": "pacmr", "vary": {"a.tau": [0.5, 0.6], "b.outer": ["A", "B"]}},
            "own": {"config": "mine.yaml", "options": options},
            "braces": {"config": "dpo", "options": {"x": "{{epoch}}-{seed}", "y": {"z": LITERAL}}},
            "two": {"config": "dpo", "after": "dpo", "first": "audit {after}", "options": {"w": "{after}/a"}},
        },
    )
    found = cells(read_sweep(path))
    assert len(found) == 2 * 2 * (1 + 4 + 1 + 1 + 1) and len({cell.name for cell in found}) == len(found)
    by_name = {cell.name: cell for cell in found}
    common = ["--seed_everything", "1", "--data.seed", "1", "--data.noise_seed", "1", "--data.noise_rate"]
    base = ["fit", "--config", str(world / "base.yaml"), "--config"]

    cell = by_name["soft-noise35-tau0.6-outerB-seed1"]
    assert cell.variation == {"a.tau": 0.6, "b.outer": "B"}
    assert cell.arguments == [
        *(*base, "configs/methods/pacmr.yaml", "--model.method", "soft", *common, "0.35"),
        *("--a.tau", "0.6", "--b.outer", "B"),
        *("--trainer.default_root_dir", "out/soft-noise35-tau0.6-outerB-seed1"),
    ]
    own = by_name["own-noise20-seed1"].arguments
    assert own[:6] == [*base, "mine.yaml", "--model.method"]
    assert own[-8:-4] == ["--y", '[1, "1"]', "--z", "s1n0.2"]
    assert own[-4:-2] == ["--v", json.dumps(nested("out/own-noise20-seed1/w"))]
    braces = by_name["braces-noise20-seed1"].arguments
    assert braces[-6:-2] == ["--x", "{epoch}-1", "--y", json.dumps({"z": LITERAL})]
    two = by_name["two-noise20-seed1"]
    assert two.after == by_name["dpo-noise20-seed1"].folder
    assert two.first == ["audit", "out/dpo-noise20-seed1"]
    assert two.arguments[-4:-2] == ["--w", "out/dpo-noise20-seed1/a"]
    assert not cell.first and cell.after is None


BAD_FILES = """
methods: {dpo: {labels: x}}
    methods.labels: unknown option; did you mean label?
methods: {dpo: 3}
    method dpo: expected keys and values, but got 3
base: [preferense]
    (did you mean preference?)
methods: [dpo]
    methods: expected dict[str, SweptMethod], but got ['dpo']
options: {1: 2}
    the option 1 is no text; name it as pacmr fit does
output: "out/{seed}"
    output or report has the placeholder {seed}, but it may have none
like: [x.yaml]
    like is ['x.yaml'], but it must be one sweep file
more: {data.source: {class_path: Files, init_args: {train: "{sed}"}}}
    data.source of the method dpo has the placeholder {sed}, but it may have {seed}, {noise}, {folder};
    write {{sed}} for the text {sed}.
methods: {dpo: {first: "audit {run}"}}
    first of the method dpo has the placeholder {run}
methods: {dpo: {first: "audit 'x"}}
    (No closing quotation)
methods: {dpo: {first: adit x}}
    begins with adit, which is no command of pacmr
prepare: [x]
    prepare: expected keys and values, but got 'x'
prepare: [{output: x, command: "fit --seed_everything {seed}"}]
    The command of x has the placeholder {seed}, but it may have {output}
afterwards: [{output: x, command: fit --config sft --modell M}]
    The preparation of x cannot fit: --modell: unknown option
more: {data.global_batch_size: "{seed}"}
    seed0 cannot fit: global_batch_size is 0
more: {trainer.default_root_dir: x}
    is the cell's own folder
more: {trainer.callbacks: [{class_path: WeightRecorder}]}
    would write no summary.json, which the tables need; add the callback RunSummary
noise_rates: [20]
    one of noise_rates is 20.0, but it must be at least 0 and below 1
seeds: []
    seeds is [], but it needs at least one
seeds: [1, 1]
    and none twice
jobs: 0
    jobs is 0
anchor: ipo
    anchor names ipo, which is none of the methods (dpo, pacmr)
comparisons: {x: [ipo]}
    x names ipo
methods: {dpo: {label: pacmr}, pacmr: }
    but none may occur twice
methods: {dpo: {vary: {a: []}}}
    varies a over no values
methods: {dpo: {after: pacmr}, pacmr: }
    dpo comes after pacmr, which
options: {data.noise_rate: "{noise}"}
    would be the same run
methods: {dpo: {vary: {data.source.train: [data/a.jsonl, data_a.jsonl]}}}
    would share the folder out/dpo-noise30-traindata_a
methods: {dpo: , dqo: }
    configs/methods/dqo.yaml
methods: {dpo: {options: {model.objective.beta: 0}}}
    beta is 0
{noise_rates: [0.2], options: {seed_everything: "{seed}"}}
    dpo-noise20-seed0 would have the noise rate 0.3 in its data; add data.noise_rate: "{noise}" to options
methods: {dpo: , a: &a {after: dpo, first: "audit {after}"}, b: {<<: *a, first: "audit {after} --top=1"}}
    a-noise30-seed0 and b-noise30-seed0 would write different audits to out/dpo-noise30-seed0/audit; add
methods: {dpo: , a: {after: dpo, first: "audit {after} --output=out/one"}}
    a-noise30-seed0 and a-noise30-seed1 would write different audits to out/one; add --output {folder}/audit
"""
"""Keys of a sweep file, ``more`` beside the usual options, and what is said of them."""
NOT_THERE = """
methods:
  dpo: {options: {data.augmentations: not-read.parquet}}
  mwn: {options: {data.clean_meta: Files, data.clean_meta.train: c.jsonl}}
"""
NOT_MADE = "mwn-noise30-seed0 would read c.jsonl, which does not exist and which no command of prepare makes"


@pytest.mark.parametrize(("text", "message"), [*texts(BAD_FILES), (NOT_THERE, NOT_MADE)])
def test_bad_files(text, message, write_sweep, capsys):
    changes = yaml.safe_load(text)
    if "more" in changes:
        changes["options"] = OPTIONS | changes.pop("more")
    assert message in fails(capsys, ["sweep", write_sweep(**changes), "--dry_run"])
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not a sweep file"),
        ("- a", "expected keys and values"),
        ("seeds: [1]\nmethods: {dpo: , ipo: , dpo: }", "dpo is there twice"),
        ("like: sweep.yaml", "sweep.yaml is like itself (sweep.yaml - sweep.yaml)"),
    ],
)
def test_no_sweep(text, message, inside, capsys):
    Path("sweep.yaml").write_text(text)
    assert message in fails(capsys, ["sweep", "sweep.yaml", "--dry_run"])
    assert "cannot be read" in fails(capsys, ["sweep", "nowhere.yaml"])


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    # Those of one task, on one device, say all that the others would.
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * ("hh" in name or "4gpu" in name)) for name in SIZES],
    ids=str,
)
def test_shipped_sweeps(name, whole, inside, capsys):
    file = ROOT / ("examples" if name.startswith("sentiment") else "configs/sweeps") / f"{name}.yaml"
    sweep = read_sweep(str(file))
    found = check_dry_run(file, lambda words: cli.main(["sweep", *words]), whole, capsys)
    assert len(cells(sweep)) == SIZES[name] and (found == SIZES[name] or not whole)
    check_measures(sweep)


INPUTS = {
    "pairs.jsonl": "pairs.jsonl",
    "base/model.safetensors": "base",
    "base/tokenizer.json": "base",
    "bottom/model.safetensors": "bottom",
    "clean/train.jsonl": "clean",
    "reward/model.safetensors": "reward",
    "cache/models--org--judge/refs/main": "org/judge",
}
"""Files that a cell reads, and what each is named as."""


def write(name: str, text: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)


def test_a_cell_knows_its_inputs(write_sweep, capsys, monkeypatch):
    """Models, data and commits on the Hub, also inside of values; loggers write to their folders."""
    for name in (*INPUTS, "bottom/config.json", "reward/config.json", "boards/events"):
        write(name, "one")
    Path("base/adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "bottom"}))
    monkeypatch.setattr(state, "HF_HUB_CACHE", "cache")
    judges = [{"class_path": "X", "init_args": {"model": model}} for model in ("reward", "org/judge")]
    options = OPTIONS | {
        "model.policy.model": "base",
        "data.source": {"class_path": "Files", "init_args": {"train": "pairs.jsonl"}},
        "data.clean_meta": {"class_path": "HubPreferences", "init_args": {"path": "clean"}},
        "data.augmentations": "out/later.parquet",
        "data.extra": "{folder}/made.jsonl",
        "trainer.callbacks": judges,
        "trainer.logger": {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "boards"}},
    }
    path = write_sweep(options=options)
    cell, *_ = cells(read_sweep(path))
    prepare(cell)
    for name in ("boards/events", "out/dpo-noise30-seed0/made.jsonl", "out/later.parquet"):
        write(name, "other")
        assert state_of(cell) == "waiting"
    second = {"config": "dpo", "after": "dpo", "options": {"model.learning_rate": 1}}
    _, after, *_ = cells(read_sweep(write_sweep(options=options, methods={"dpo": None, "second": second})))
    prepare(after)
    record = Path(cell.folder, "cell.json").read_text()
    write(str(cell.folder / "cell.json"), record.replace("pairs.jsonl", "others.jsonl"))
    with pytest.raises(UserError, match="other settings of the cell before it than the sweep file has now"):
        state_of(after)
    write(str(cell.folder / "cell.json"), record)
    write_sweep(options=options)
    for name, told in INPUTS.items():
        write(name, "other")
        said = f"holds a run with other files than the sweep file has now ({told} has changed)"
        assert said in fails(capsys, ["sweep", path])
        write(name, "one")
