"""Bad input of every shape, of the trainer's commands and of the tools: one sentence, status 2, no usage."""

import json
import re
from typing import Union

import pytest
import yaml

from pacmr_lightning import cli
from pacmr_lightning.runs.option_parser import OptionParser

from ..tables import cases, texts

POLICY = {"class_path": "PolicyModel", "init_args": {"model": "./nowhere"}}
FILES = {"class_path": "Files", "init_args": {"train": "pairs.jsonl", "validation": "pairs.jsonl"}}


@pytest.fixture
def base(tmp_path, monkeypatch) -> dict:
    monkeypatch.chdir(tmp_path)
    return {
        "model": {"class_path": "PreferenceModule", "init_args": {"policy": POLICY}},
        "data": {"class_path": "PreferenceDataModule", "init_args": {"source": FILES}},
        "trainer": {"accelerator": "cpu", "max_steps": 2},
    }


def said(capsys, arguments: list[str]) -> str:
    """What the command says, which is one line, on stderr; it ends with status 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.out == ""
    # The first import of the libraries says so where it takes more than a second.
    other = ("Loading PyTorch", "--config preference is")
    [line] = [line for line in captured.err.splitlines() if not line.startswith(other)]
    assert line.startswith("pacmr: error: ")
    return line.removeprefix("pacmr: error: ")


SHORT = {
    "VNET": "--model.weighting VNetWeighting",
    "PAC": "--model.weighting.outer PromptAugmentationConsistency",
}
TRAINER = """
VNET --model.weighting.outer.tau 0.4
    model.weighting.outer.tau: got 0.4, but its class must come first; choose one of CleanPreference,
VNET PAC --model.weighting.outer.tau x
    model.weighting.outer.tau: expected float, but got x.
VNET --model.weighting.estimator CentralDifference --model.weighting.estimator.epsilom 1
    model.weighting.estimator.epsilom: unknown option; did you mean epsilon?
--model.weighting SigmoidPrior --model.weighting.offset aut
    model.weighting.offset: expected 'auto' or float, but got aut; did you mean auto?
VNET --model.weighting.outer DPO
    model.weighting.outer: there is no class or file DPO; choose one of CleanPreference,
    PromptAugmentationConsistency, SoftPromptConsistency, or give an import path.
--model.objective '{class_path: DPO, beta: 1}'
    model.objective: expected a class, with class_path and init_args only, but got {'class_path': 'DPO',
--model.objective nowhere.yaml
    model.objective: nowhere.yaml cannot be imported (No module named 'nowhere'); choose one of
--model.policy peft.LoraConfig
    model.policy: peft.LoraConfig is no PolicyModel; choose one
--model.policy.target_modules '[1, 2]'
    model.policy.target_modules: expected str, but got [1, 2].
--model PreferenceModul
    model: there is no class or file PreferenceModul; did you mean PreferenceModule?
--data.noise CategoryNoise --data.noise.rates '{a: x}'
    data.noise.rates: expected float or null, but got {'a': 'x'}.
--data.global_batch_size ''
    data.global_batch_size: expected int, but got nothing.
--data.global_batch_size
    --data.global_batch_size: its value is missing; give it after the option.
--trainer.enable_progress_bar tru
    trainer.enable_progress_bar: expected true, false or null, but got tru.
--trainer.limit_val_batches x
    trainer.limit_val_batches: expected int, float or null, but got x.
--trainer.max 3
    --trainer.max: unknown option; did you mean --trainer.max_epochs, --trainer.max_steps or
--trainer.callbacks '[RunSummary, {class_path: SampleResponses, init_args: {evry: 3}}]'
    trainer.callbacks.evry: unknown option; did you mean every?
--trainer.callbacks '{class_path: SampleResponses, init_args: {prompts: 0}}'
    prompts is 0, but it must be at least 1.
--trainer.logger CSVLoger
    trainer.logger: there is no class or file CSVLoger; did you mean CSVLogger?
there
    unexpected word there; options start with --, see --help.
--trainer 3
    trainer: expected options with their values, as in YAML, but got 3.
"""
TOOLS = """
fit --config nowhere.yaml
    config: there is no file nowhere.yaml; pacmr configs lists all.
fit --model PreferenceModule
    model.policy: missing; give it on the command line or in a config.
predict --generation.outpt x
    --generation.outpt: unknown option; did you mean --generation.output?
inspect --source Files
    source.train: missing; give it on the command line or in a config.
augment
    source and output are missing; give them on the command line or in a config.
compare nowhere
    nowhere/summary.json does not exist;
compare file
    file/summary.json does not exist;
audit --run runs/mine
    --run: unknown option; give run without --run before it.
export a b c
    unexpected word c; options start with --, see --help.
export a b --merged=x
    argument --merged/--no_merged: ignored explicit argument 'x'.
sweep a --dry-run
    --dry-run: unknown option; did you mean --dry_run?
analyze a --split trian
    split: expected 'train' or 'validation', but got trian; did you mean train?
analyze a --taus
    --taus: its value is missing; give it after the option.
analyze a --taus 0.6 x
    taus: expected float, but got x.
"""


@pytest.mark.parametrize(
    ("arguments", "sentence"), cases(re.sub(r"\b(VNET|PAC)\b", lambda name: SHORT[name[0]], TRAINER))
)
def test_words_of_the_command_line(arguments, sentence, base, capsys, tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(base))
    assert said(capsys, ["fit", "--config", "config.yaml", *arguments]).startswith(sentence)


CONFIGS = """
model: a: b
    bad.yaml: not valid YAML: mapping values are not allowed in this context
trainer: 3
    trainer: expected options with their values, as in YAML, but got 3.
modle: {a: 1}
    modle.a: unknown option; did you mean model?
trainer: {max_stepz: 1}
    trainer.max_stepz: unknown option; did you mean trainer.max_steps?
checkpoint: {save_last: so}
    bad.yaml: checkpoint.save_last: expected true, false, 'link' or null, but got so.
model: 3
    bad.yaml: model: expected a class, with class_path and init_args only, but got 3; choose one of
model: {class_path: PreferenceModule, init_arg: {}}
    bad.yaml: model: expected a class, with class_path and init_args only.
model: {class_path: PreferenceModule, init_args: {weighting: {class_path: VNetWeighting, OUTER}}}
    bad.yaml: model.weighting.outer.tauu: unknown option; did you mean tau?
"""
OUTER = "init_args: {outer: {class_path: PromptAugmentationConsistency, init_args: {tauu: 0.6}}}"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        *texts(CONFIGS.replace("OUTER", OUTER)),
        ("trainer: {max_epochs: 1}\ntrainer: {max_steps: 3}\n", "bad.yaml: not valid YAML: trainer is there"),
        ("data: {seed: 1, task: x, seed: 2}\n", "bad.yaml: not valid YAML: seed is there twice"),
        ("", "bad.yaml: expected options with their values, as in YAML, but got nothing."),
    ],
)
def test_words_of_a_config(text, sentence, base, capsys, tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(base))
    (tmp_path / "bad.yaml").write_text(text)
    assert said(capsys, ["fit", "--config", "config.yaml", "--config", "bad.yaml"]).startswith(sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"), [([], "no command is given; pacmr --help lists them."), *cases(TOOLS)]
)
def test_words_of_all_commands(arguments, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert said(capsys, arguments).startswith(sentence)


def test_flags_and_lists(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "options.yaml").write_text(json.dumps({"taus": [0.6, 0.8], "runs": ["a", "b"]}))
    for arguments, found in (
        (["export", "--merged", "a", "b"], {"run": "a", "out": "b", "merged": True}),
        (["export", "a", "b"], {"merged": False, "dtype": None}),
        (["analyze", "a", "b", "--taus", "0.7", "0.9"], {"runs": ["a", "b"], "taus": [0.7, 0.9]}),
        (["analyze", "--config", "options.yaml"], {"runs": ["a", "b"], "taus": [0.6, 0.8]}),
        (["analyze", "a"], {"taus": [0.55, 0.6, 0.7]}),
        (["compare", "a", "--output", "x.png"], {"step": "last"}),
        (["compare", "a", "--output", "x.png", "--step", "5"], {"step": 5}),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main([*arguments, "--print_config"])
        assert stop.value.code == 0
        assert found.items() <= yaml.safe_load(capsys.readouterr().out).items()


@pytest.mark.parametrize("word", ["1", "1.0", "0.25", "null"])
def test_whole_numbers_stay_whole(word):
    """``--trainer.limit_val_batches 1`` is one batch; as 1.0 it would be all of them.

    That holds whatever order of types another package has left in typing's cache.
    """

    def run(limit: Union[float, int, None] = None):  # noqa: UP007
        """Run."""

    parser = OptionParser()
    parser.add_function_arguments(run)
    found = parser.parse_args(["--limit", word]).limit
    assert repr(found) == word.replace("null", "None")
