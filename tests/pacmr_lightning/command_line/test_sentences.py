"""Bad input of every shape, of the trainer's commands and of the tools: one sentence, status 2, no usage."""

import json
import re

import pytest
import yaml

from pacmr_lightning import cli
from pacmr_lightning.command_line.sentences import short_message

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
    model.weighting.outer.tau: got 0.4, but its class must come first; it is an option of
    PromptAugmentationConsistency.
VNET PAC --model.weighting.outer.tau x
    model.weighting.outer.tau: expected a float, but got x.
VNET --model.weighting.estimator CentralDifference --model.weighting.estimator.epsilom 1
    model.weighting.estimator.epsilom: CentralDifference has no such option; did you mean epsilon?
--model.weighting.evry 1
    model.weighting.evry: got 1, but its class must come first; choose one of AuditedWeights,
    DropFlipped, OracleWeights, SigmoidPrior, Unweighted, VNetWeighting, or give
    an import path.
--model.weighting 3
    model.weighting: expected a Weighting or null, but got 3.
--model.weighting SigmoidPrior --model.weighting.offset aut
    model.weighting.offset: expected 'auto' or a float, but got aut; did you mean auto?
VNET --model.weighting.outer DPO
    model.weighting.outer: there is no class DPO; choose one of CleanPreference,
    PromptAugmentationConsistency, SoftPromptConsistency, or give an import path.
--model.objective '{class_path: DPO, beta: 1}'
    model.objective: beside class_path a class has only init_args, with its options, but got
    {'class_path': 'DPO', 'beta': 1}.
--model.objective '{class_path: DPO, init_args: {beta: x}}'
    model.objective.beta: expected a float, but got x.
--model.objective nowhere.yaml
    model.objective: there is no file nowhere.yaml.
--model.policy peft.LoraConfig
    model.policy: peft.LoraConfig is no PolicyModel; choose one of PolicyModel, or give an import path.
--model.policy pacmr_lightning.policy.Nothing
    model.policy: there is no class pacmr_lightning.policy.Nothing; choose one of PolicyModel, or give
    an import path.
--model.policy.target_modules '[1, 2]'
    model.policy.target_modules: expected a str, but got 1 in [1, 2].
--model.policy.lora_options 3
    model.policy.lora_options: expected a dict[str, Any] or null, but got 3.
--model.learning_rat 3
    model.learning_rat: PreferenceModule has no such option; did you mean learning_rate?
--model PreferenceModul
    model: there is no class PreferenceModul; did you mean PreferenceModule?
--data.source Filez
    data.source: there is no class Filez; did you mean Files?
--data.source.train '[1]'
    data.source.train: expected a str, but got [1].
--data.noise_rates 0.3
    data.noise_rates: expected a list[float] or null, but got 0.3.
--data.noise_rates '[0.3, x]'
    data.noise_rates: expected a float, but got x in [0.3, 'x'].
--data.noise CategoryNoise --data.noise.rates '{a: x}'
    data.noise.rates: expected a float, but got x in {'a': 'x'}.
--data.global_batch_size ''
    data.global_batch_size: expected an int, but got nothing.
--data.global_batch_size
    --data.global_batch_size: its value is missing; give it after the option.
--trainer.max_epochs abc
    trainer.max_epochs: expected an int or null, but got abc.
--trainer.enable_progress_bar tru
    trainer.enable_progress_bar: expected true, false or null, but got tru.
--trainer.limit_val_batches x
    trainer.limit_val_batches: expected an int, a float or null, but got x.
--trainer.max 3
    --trainer.max: unknown option; did you mean --trainer.max_epochs, --trainer.max_steps or
    --trainer.max_time?
--trainer.callbacks '[{class_path: WeightRecordr}]'
    trainer.callbacks: there is no class WeightRecordr; did you mean WeightRecorder?
--trainer.callbacks '[RunSummary, {class_path: SampleResponses, init_args: {evry: 3}}]'
    trainer.callbacks.evry: SampleResponses has no such option; did you mean every?
--trainer.callbacks '{class_path: SampleResponses, init_args: {prompts: 0}}'
    prompts is 0, but it must be at least 1.
--trainer.logger CSVLoger
    trainer.logger: there is no class CSVLoger; did you mean CSVLogger?
--seed_everything x
    seed_everything: expected true, false or an int, but got x.
--modl PreferenceModule
    --modl: unknown option; did you mean --model?
there
    unexpected word there; options start with --, see --help.
--trainer 3
    trainer: expected options with their values, as in YAML, but got 3.
"""
TOOLS = """
fit --config nowhere.yaml
    config: there is no file
fit --model PreferenceModule
    model.policy: missing; give it on the command line or in a config.
validate --verbose x
    verbose: expected true or false, but got x.
validate --ckpt_pat x
    --ckpt_pat: unknown option; did you mean --ckpt_path?
predict --generation.outpt x
    --generation.outpt: unknown option; did you mean
sweep nowhere.yaml --jobs x
    jobs: expected an int or null, but got x.
inspect --source Files
    source.train: missing;
judge a
    second: missing; give it on the command line or in a config.
judge a b --judge EndpointJudg
    judge: there is no class EndpointJudg; did you mean
augment
    source and output are missing;
augment --rewriter Paraphras
    rewriter: there is no class Paraphras; did you mean Paraphrase?
clean-meta --judge x
    --judge: unknown option; did you mean --judges?
compare
    runs: missing;
compare nowhere --figur x.png
    --figur: unknown option; did you mean --figure?
compare nowhere
    nowhere/summary.json does not exist;
compare file
    file/summary.json does not exist;
export a b c
    unexpected word c; options start with --, see --help.
export a b --dtype int8
    dtype: expected one of 'float32', 'bfloat16', 'float16' or null,
export a b --merged=x
    merged: a flag takes no value, but got x; leave the value out.
sweep a --jobs x
    jobs: expected an int or null, but got x.
sweep a --dry-run
    --dry-run: unknown option; did you mean --dry_run?
surfaces a --output x.png --step x
    step: expected 'last' or an int, but got x.
analyze a --split trian
    split: expected one of 'train', 'validation', but got trian; did you
analyze a --taus
    --taus: its value is missing; give it after the option.
analyze a --taus 0.6 x
    taus: expected a float, but got x.
surfaces
    runs: missing;
audit a --action swop
    action: expected one of 'drop', 'swap' or null, but got swop; did you
"""


@pytest.mark.parametrize(
    ("arguments", "sentence"), cases(re.sub(r"\b(VNET|PAC)\b", lambda name: SHORT[name[0]], TRAINER))
)
def test_words_of_the_command_line(arguments, sentence, base, capsys, tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(base))
    assert said(capsys, ["fit", "--config", "config.yaml", *arguments]) == sentence


CONFIGS = """
model: a: b
    bad.yaml: not valid YAML (mapping values are not allowed in this context at line 1,
hello
    bad.yaml: expected options with their values, as in YAML, but got hello.
trainer: 3
    trainer: expected options with their values, as in YAML, but got 3.
modle: {a: 1}
    modle.a: unknown option; did you mean model.a?
trainer: {max_stepz: 1}
    trainer.max_stepz: unknown option; did you mean trainer.max_steps?
trainer: {max_steps: x}
    bad.yaml: trainer.max_steps: expected an int, but got x.
checkpoint: {save_last: so}
    bad.yaml: checkpoint.save_last: expected 'link', true, false or null,
model: 3
    bad.yaml: model: expected a LightningModule or null, but got 3.
model: {class_path: PreferenceModule, init_arg: {}}
    bad.yaml: model: beside class_path a class has only init_args, with its options.
model: {class_path: PreferenceModule, init_args: {weighting: {class_path: VNetWeighting, OUTER}}}
    bad.yaml: model.weighting.outer.tauu: PromptAugmentationConsistency has no such option; did
trainer: {callbacks: [{class_pat: RunSummary}]}
    bad.yaml: trainer.callbacks.class_pat: Callback has no such option; did you mean class_path?
"""
OUTER = "init_args: {outer: {class_path: PromptAugmentationConsistency, init_args: {tauu: 0.6}}}"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        *texts(CONFIGS.replace("OUTER", OUTER)),
        ("model: [1,\ntrainer: 3\n", "bad.yaml: not valid YAML ("),
        (
            "trainer: {max_epochs: 1}\ntrainer: {max_steps: 3}\n",
            "bad.yaml: not valid YAML (trainer is there twice at line 2",
        ),
        ("data: {seed: 1, task: x, seed: 2}\n", "bad.yaml: not valid YAML (seed is there twice at line 1"),
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
        (["surfaces", "a", "--output", "x.png"], {"step": "last"}),
        (["surfaces", "a", "--output", "x.png", "--step", "5"], {"step": 5}),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main([*arguments, "--print_config"])
        assert stop.value.code == 0
        assert found.items() <= yaml.safe_load(capsys.readouterr().out).items()


def test_what_has_another_shape_is_passed_on():
    assert short_message("Nothing\n  of the  kind") == "Nothing of the kind"
    assert short_message('Parser key "a":\n  Nothing of the kind') == "a: Nothing of the kind"


def test_a_name_before_what_has_none(capsys):
    told = said(capsys, ["audit", "--run", "runs/mine"])
    assert told == "--run: unknown option; give run without --run before it."
    assert "did you mean --runs?" not in said(capsys, ["compare", "--rums", "runs/mine"])
