"""Bad input of every shape, of the trainer's commands and of the tools: one sentence, status 2, no usage."""

import json
from pathlib import Path
from typing import Union

import pytest
import yaml

from pacmr_lightning.runs.option_parser import OptionParser

from ...conftest import ended
from ..tables import cases, texts


@pytest.fixture
def config(inside, preference_config):
    Path("config.yaml").write_text(yaml.safe_dump(preference_config("./nowhere", "pairs.jsonl")))
    return "config.yaml"


def said(capsys, arguments: list[str]) -> str:
    """What the command says, which is one line, on stderr; it ends with status 2."""
    status, out, err = ended(capsys, arguments)
    assert status == 2 and out == ""
    # The first import of the libraries says so where it takes more than a second.
    other = ("Loading PyTorch", "--config preference is")
    [line] = [line for line in err.splitlines() if not line.startswith(other)]
    assert line.startswith("pacmr: error: ")
    return line.removeprefix("pacmr: error: ")


TRAINER = """
--model.weighting VNetWeighting --model.weighting.outer.tau 0.4
    model.weighting.outer: its option tau is given, but not which class; choose one of
    CleanPreference, PromptAugmentationConsistency, SoftPromptConsistency, or give an import path.
--model.weighting VNetWeighting --model.weighting.everi 1
    model.weighting.everi: unknown option; did you mean every?
--model.weighting SigmoidPrior --model.weighting.offset aut
    model.weighting.offset: expected float or 'auto', but got aut; did you mean auto?
--model.objective nowhere.yaml
    model.objective: nowhere.yaml is no class that fits here (No module named 'nowhere'); choose one of
--model.policy peft.LoraConfig
    model.policy: Import path peft.LoraConfig does not correspond to a subclass of PolicyModel; choose
    one of PolicyModel, or
--model.policy.target_modules '[1, null]'
    model.policy.target_modules: expected str or list[str], but got [1, None].
--data.meta_every 3 --model.policy.quantization null
    data.meta_every is 3, but the model's options make it null; leave it out.
--data.tokenizer other
    data.tokenizer is other, but the model's options make it
--data.global_batch_size ''
    data.global_batch_size: expected int, but got nothing.
--trainer.enable_progress_bar tru
    trainer.enable_progress_bar: expected true, false or null, but got tru.
--trainer.max 3
    --trainer.max: unknown option; did you mean --trainer.max_epochs, --trainer.max_steps or
--trainer.callbacks '[RunSummary, {class_path: SampleResponses, init_args: {evry: 3}}]'
    trainer.callbacks.evry: unknown option; did you mean every?
--trainer.callbacks '{class_path: SampleResponses, init_args: {prompts: 0}}'
    prompts is 0, but it must be at least 1.
--trainer.logger CSVLoger
    trainer.logger: CSVLoger is no class that fits here; did you mean CSVLogger?
there
    unrecognized arguments: there.
--trainer 3
    trainer: Unable to load config "3".
"""
TOOLS = """
fit --config nowhere.yaml
    config: there is no file nowhere.yaml; pacmr configs lists all.
fit --config methods/pacrm
    config: there is no file methods/pacrm (did you mean methods/pacmr?); pacmr configs lists all.
fit --model PreferenceModule
    model: policy must be given.
inspect --source Files
    source: train must be given.
augment
    source, output must be given.
compare file
    file/summary.json does not exist;
compare judged
    judged/summary.json is not of a run of preferences; name the folder of one.
sweep a --dry-run
    --dry-run: unknown option; did you mean --dry_run?
analyze a --taus 0.6 x
    taus: expected float, but got x.
"""


@pytest.mark.parametrize(("arguments", "sentence"), cases(TRAINER))
def test_words_of_the_command_line(arguments, sentence, config, capsys):
    assert said(capsys, ["fit", "--config", config, *arguments]).startswith(sentence)


CONFIGS = """
model: a: b
    bad.yaml: Problems parsing config: mapping values are not allowed in this context
modle: {a: 1}
    modle.a: unknown option; --help lists the options.
checkpoint: {save_last: so}
    bad.yaml: checkpoint.save_last: expected true, false, 'link' or null, but got so.
model: {class_path: PreferenceModule, init_arg: {}}
    bad.yaml: model: a class has class_path and init_args only.
data: {seed: 1, task: x, seed: 2}
    bad.yaml: Problems parsing config: seed is there twice
modle: {a: {b: &b {<<: {c: 1}, c: 2}}, d: {<<: *b}}
    modle.a.b.c: unknown option; --help lists the options.
model: {class_path: PreferenceModule, init_args: {weighting: {class_path: VNetWeighting, %s}}}
    bad.yaml: model.weighting.outer.tauu: unknown option; did you mean tau?
"""
OUTER = "init_args: {outer: {class_path: PromptAugmentationConsistency, init_args: {tauu: 0.6}}}"


@pytest.mark.parametrize(("text", "sentence"), [*texts(CONFIGS % OUTER), ("", "bad.yaml: it has no lines")])
def test_words_of_a_config(text, sentence, config, capsys):
    Path("bad.yaml").write_text(text)
    assert said(capsys, ["fit", "--model", "m", "--config", config, "-c", "bad.yaml"]).startswith(sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"), [([], "no command is given; pacmr --help lists them."), *cases(TOOLS)]
)
def test_words_of_all_commands(arguments, sentence, capsys, inside):
    (inside / "file").write_text("")
    (inside / "judged").mkdir()
    (inside / "judged" / "summary.json").write_text('{"pairs": 3}')
    assert said(capsys, arguments).startswith(sentence)


def test_flags_and_lists(capsys, inside):
    (inside / "options.yaml").write_text(json.dumps({"taus": [0.6, 0.8], "runs": ["a", "b"]}))
    for arguments, found in (
        (["export", "--merged", "a", "b"], {"run": "a", "out": "b", "merged": True}),
        (["export", "a", "b"], {"merged": False, "dtype": None}),
        (["analyze", "a", "b", "--taus", "0.7", "0.9"], {"runs": ["a", "b"], "taus": [0.7, 0.9]}),
        (["analyze", "--config", "options.yaml"], {"runs": ["a", "b"], "taus": [0.6, 0.8]}),
        (["analyze", "a"], {"taus": [0.55, 0.6, 0.7]}),
    ):
        status, out, _ = ended(capsys, [*arguments, "--print_config"])
        assert status == 0 and found.items() <= yaml.safe_load(out).items()


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
