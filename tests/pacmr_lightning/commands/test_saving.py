"""What a run writes: nothing that libraries refuse at the end, nothing worse than what is there, and when."""

import json
import re
import resource
import shutil

import pandas as pd
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from pacmr_lightning import cli
from pacmr_lightning.embedded_world import World

from ...conftest import fails, read_lines, short_fit, write_lines
from ..tables import texts

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_llama):
    return tiny_llama(tmp_path_factory.mktemp("base"), **SHAPE, initializer_range=0.2)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    sft = [{"prompt": f"Describe the sea {i}:", "completion": " calm" * (1 + i % 3)} for i in range(24)]
    write_lines(folder / "sft.jsonl", sft)
    for seed, name in enumerate(("train", "validation")):
        write_lines(folder / f"{name}.jsonl", World().preference_rows(48, seed))
    return folder


@pytest.fixture
def pairs(base, files, tmp_path):
    def words(model=base, folder="run", more=""):
        options = f"""--data.source Files --data.source.train {files}/train.jsonl --data.source.validation
            {files}/validation.jsonl --data.global_batch_size 8 --trainer.default_root_dir {tmp_path / folder}
            --trainer.log_every_n_steps 1 --model.learning_rate 0.01 --trainer.max_epochs 1 {more}"""
        return short_fit(model, options)

    return words


@pytest.fixture
def sft(base, files, tmp_path):
    def words(model=base, folder="sft", more=""):
        return f"""fit --model SFTModule --model.model {model} --data SFTDataModule --data.tokenizer {model}
            --data.source CompletionFiles --data.source.train {files}/sft.jsonl --data.source.validation
            {files}/sft.jsonl --data.batch_size 8 --trainer.accelerator cpu --trainer.max_epochs 1
            --trainer.enable_progress_bar false --trainer.default_root_dir {tmp_path / folder}
            {more}""".split()

    return words


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ({"temperature": 0.9, "top_p": 0.6}, {"do_sample": True, "temperature": 0.9, "top_p": 0.6}),
        ({"temperature": 0.0, "do_sample": False}, {}),
        ({"length_penalty": 2.0, "early_stopping": True}, {}),
    ],
)
def test_a_generation_config_that_transformers_does_not_save(keys, kept, base, sft, pairs, tmp_path):
    model = shutil.copytree(base, tmp_path / "model")
    file = model / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    cli.main(sft(model))
    cli.main(pairs(model, more="--trainer.max_steps 1"))
    for name, options in (("adapter", []), ("merged", ["--merged"])):
        cli.main(["export", str(tmp_path / "run"), str(tmp_path / name), *options])
    for name in ("sft/model", "adapter", "merged"):
        found = GenerationConfig.from_pretrained(tmp_path / name)
        found.validate(strict=True)
        assert {key: getattr(found, key) for key in kept} == kept
        assert found.eos_token_id == AutoTokenizer.from_pretrained(base).eos_token_id
        if not kept:
            assert not keys.keys() & found.to_diff_dict().keys()


@pytest.mark.parametrize("kind", ["sft", "pairs"])
def test_what_a_library_refuses_is_said_before_the_training(kind, request, tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise ValueError("no such option\nand more")

    words = request.getfixturevalue(kind)()
    monkeypatch.setattr(GenerationConfig, "save_pretrained", refuse)
    said = fails(capsys, words)
    assert "could not be saved after the training (no such option); mend its config.json" in said
    assert not (tmp_path / "run").exists() and not (tmp_path / "sft").exists()


@pytest.mark.parametrize("lora", ["null", "{r: 4}"])
def test_sft_stops_where_it_diverges(lora, sft, tmp_path, capsys):
    """A saved model stays, also if the last update of all ruins the weights, which no loss has seen."""
    cli.main([*sft(), "--model.lora", lora, "--model.learning_rate", "1e-3"])
    model = tmp_path / "sft" / "model"
    before = weights(model)
    more = ["--model.lora", lora, "--ckpt_path", "last", "--trainer.max_epochs", "2", "--model.learning_rate"]
    said = fails(capsys, [*sft(), *more, "1e25"])
    assert "The loss is not a finite number; lower the learning rate" in said
    said = fails(capsys, [*sft(), *more, "1e18", "--trainer.max_steps", "4"])
    assert f"The loss of the trained model is not finite, so {model} is not written" in said
    assert same(before, weights(model)) and not list(model.parent.glob(".model*"))


@pytest.mark.parametrize("kind", ["sft", "pairs"])
def test_a_base_with_nan(kind, base, request, tmp_path, capsys):
    model = shutil.copytree(base, tmp_path / "model")
    found = weights(model)
    name = next(name for name in found if "mlp" in name)
    found[name][0, 0] = torch.nan
    save_file(found, model / "model.safetensors", metadata={"format": "pt"})
    said = fails(capsys, request.getfixturevalue(kind)(model))
    assert f"The model {model} has weights that are not finite in torch.float32, such as {name}" in said


def test_a_full_disk_costs_no_model(sft, tmp_path, capsys):
    """A limit on the size of files stands for the disk: checkpoints fit, the model does not."""
    more = ["--model.lora", "{r: 1, target_modules: [q_proj]}", "--model.learning_rate", "1e-3"]
    cli.main([*sft(), *more])
    model = tmp_path / "sft" / "model"
    before = weights(model)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    words = ["fit", "--config", str(tmp_path / "sft" / "config.yaml"), "--ckpt_path", "last"]
    words += ["--trainer.max_epochs", "2"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, limits[1]))
    try:
        assert "run the command again (fit with --ckpt_path last): finished" in fails(capsys, words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert same(before, weights(model)) and not list(model.parent.glob(".model*"))
    cli.main(words)
    assert not same(before, weights(model))
    assert "more than a model of this" in fails(capsys, [*sft(folder="new"), "--model.save_to", str(model)])
    assert not (tmp_path / "new").exists()


def steps(run):
    return sorted(int(path.stem.split("-")[1]) for path in (run / "checkpoints").glob("step-*.ckpt"))


def losses(run):
    table = pd.read_csv(run / "metrics.csv").dropna(subset="val/loss")
    return dict(zip(table["step"] + 1, table["val/loss"], strict=True))


def test_checkpoints_by_time(pairs, tmp_path):
    cli.main(pairs(more="--checkpoint.train_time_interval 0:00:00.001 --checkpoint.save_top_k -1"))
    assert steps(tmp_path / "run") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("every", "mode"), [("every_n_train_steps 4", "min"), ("every_n_epochs 1", "max")])
def test_the_best_checkpoint_is_the_state_that_was_validated(every, mode, pairs, tmp_path, capsys):
    more = "--trainer.val_check_interval 2 --trainer.max_epochs 2 --checkpoint.save_on_train_epoch_end false"
    monitor = f"--checkpoint.monitor val/loss --checkpoint.mode {mode} --checkpoint.{every}"
    cli.main(pairs(more=f"{more} {monitor}"))
    run = tmp_path / "run"
    found = losses(run)
    assert len(found) == 6
    best = (min if mode == "min" else max)(found, key=found.get)
    assert steps(run) == [best]
    capsys.readouterr()
    checkpoint = str(run / f"checkpoints/step-{best}.ckpt")
    cli.main(["validate", "--config", str(run / "config.yaml"), "--ckpt_path", checkpoint])
    printed = re.search(r"val/loss\D*([\d.]+)", capsys.readouterr().out)[1]
    assert float(printed) == pytest.approx(found[best], rel=1e-5)


REFUSED = """
--checkpoint.filename {step}-{val/lost:.2f}
    has logged val/lost by a validation; choose one of val/
--checkpoint.filename best --checkpoint.save_top_k 2 --checkpoint.monitor val/loss
    with {step} if
--checkpoint.filename a/{step}
    filename is a/{step}, but it must be a name without folders
--checkpoint.filename last
    other than last
--checkpoint.filename {step
    filename is {step, but
--checkpoint.save_last false --checkpoint.save_top_k 0
    so nothing is saved
--checkpoint.dirpath elsewhere
    audit, refine and export read the run's own folder
--checkpoint.save_on_exception true
    a failure leaves half an update; lower every_n_train_steps
--checkpoint.save_weights_only true
    no run goes on from weights alone
--checkpoint.save_last link
    save_last is link, but last.ckpt is the last state
"""


@pytest.mark.parametrize(("options", "said"), texts(REFUSED))
def test_checkpoint_options_that_are_refused(options, said, pairs, tmp_path, capsys):
    assert said in fails(capsys, pairs(more=options))
    assert not (tmp_path / "run").exists()


def test_the_best_of_a_resumed_run(pairs, tmp_path, caplog):
    """They are those of both parts of the run, whatever the interval, and wherever its folder is."""
    best = "--trainer.val_check_interval 1 --checkpoint.monitor val/loss --checkpoint.save_top_k 2"
    best += " --checkpoint.filename {step}-{val/loss:.6f}"
    cli.main(pairs(more=f"{best} --checkpoint.mode max"))
    assert "The best checkpoint has the highest val/loss (checkpoint.mode max)" in caplog.text
    run = tmp_path / "there"
    shutil.move(tmp_path / "run", run)
    (run / "summary.json").touch()
    before = {path.name for path in (run / "checkpoints").glob("*-*.ckpt")}
    more = f"{best} --checkpoint.mode max --ckpt_path last --trainer.max_epochs 2"
    cli.main(pairs(folder=run.name, more=f"{more} --checkpoint.every_n_train_steps 100"))
    assert not (run / "summary.json").exists()
    found = {f"{step}-{loss:.6f}.ckpt": loss for step, loss in losses(run).items()}
    kept = {path.name for path in (run / "checkpoints").glob("*-*.ckpt")}
    assert len(found) == 12 and kept == set(sorted(found, key=found.get)[-2:]) and kept & before


@pytest.mark.filterwarnings("ignore:last.ckpt, step-2.ckpt")
def test_averages_of_weights_in_sft(sft, tmp_path):
    """The saved model is the mean of the states after the updates, as when resumed in the middle."""
    more = """--model.lora null --model.learning_rate 1e-2 --checkpoint.every_n_train_steps 1
        --checkpoint.save_top_k -1 --trainer.callbacks lightning.pytorch.callbacks.WeightAveraging"""
    cli.main(sft(more=more))
    places = [tmp_path / f"sft/checkpoints/step-{step}.ckpt" for step in (1, 2)]
    first, second = (torch.load(path, weights_only=True) for path in places)
    name = "network.model.layers.0.mlp.up_proj.weight"
    found = weights(tmp_path / "sft" / "model")
    states = [content["current_model_state"][name] for content in (first, second)]
    torch.testing.assert_close(second["state_dict"][name], torch.stack(states).mean(0))
    cli.main(sft(more=f"{more} --ckpt_path {places[0]}"))
    assert same(found, weights(tmp_path / "sft" / "model"))


@torch.no_grad()
def margin(model, tokenizer, row):
    """Log-probability of the chosen minus the rejected response, by the whole model's own forward."""
    found = []
    for side in ("chosen", "rejected"):
        start = tokenizer(row["prompt"])["input_ids"]
        end = [*tokenizer(row[side], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        log_p = model(torch.tensor([start + end])).logits[0].log_softmax(-1)
        found.append(sum(log_p[len(start) + i - 1, token] for i, token in enumerate(end)))
    return float(found[0] - found[1])


def test_what_rounding_takes_of_a_merged_model(base, files, pairs, tmp_path, capsys):
    """The share in the line is that of an independent calculation, to what a few pairs say of all."""
    cli.main(pairs(more="--model.policy.dtype bfloat16 --trainer.max_epochs 2 --model.learning_rate 2e-5"))

    def export(name, *options):
        capsys.readouterr()
        cli.main(["export", str(tmp_path / "run"), str(tmp_path / name), *options])
        return capsys.readouterr().err

    merged, exact = export("merged", "--merged"), export("exact", "--merged", "--dtype", "float32")
    line = r"The merged weights are (\w+): (-?\d+\.\d)% of the policy's implicit margins are left"
    kind, share = re.search(line, merged).groups()
    assert kind == "bfloat16" and float(share) < 95 and "--dtype float32 rounds nothing" in merged
    assert re.search(line, exact).groups() == ("float32", "100.0")
    assert "rounds nothing" not in exact and "margins" not in export("adapter")

    def load(kind, name):
        return kind.from_pretrained(name, dtype=torch.bfloat16).float().eval()

    models = [load(AutoModelForCausalLM, base), load(AutoPeftModelForCausalLM, tmp_path / "adapter")]
    models.append(load(AutoModelForCausalLM, tmp_path / "merged"))
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = read_lines(files / "validation.jsonl")
    values = torch.tensor([[margin(model, tokenizer, row) for row in rows] for model in models]).double()
    before, after = values[1] - values[0], values[2] - values[0]
    assert float(after @ before / (before @ before)) == pytest.approx(float(share) / 100, abs=0.25)

    config = tmp_path / "run/config.yaml"
    config.write_text(config.read_text().replace("validation.jsonl", "gone.jsonl"))
    said = export("unmeasured", "--merged")
    assert "was not measured (" in said and "gone.jsonl" in said
    assert "; --dtype float32 rounds nothing." in said
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "unmeasured").dtype == torch.bfloat16


def test_what_rounding_takes_of_an_sft_model(sft, caplog):
    more = ["--model.lora", "{r: 4}", "--model.dtype", "bfloat16", "--model.learning_rate"]
    line = "of what the adapter changes are left after merging: bfloat16 weights round the rest away"
    for name, rate in (("large", "0.05"), ("small", "1e-6")):
        caplog.clear()
        cli.main([*sft(folder=name), *more, rate])
        assert (line in caplog.text) == (name == "small")
