"""``pacmr export``: what plain transformers and PEFT load is the run's policy; the card; VNet; bad input."""

import json
import re
import resource
import shutil
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from pacmr_lightning import cli
from pacmr_lightning.embedded_world import World
from pacmr_lightning.modules import PreferenceModule
from pacmr_lightning.runs.model_card import public

from ...conftest import edit_config, fails, files, short_fit, write_lines
from ..runs.test_checkpoints import Code

LAST = "checkpoints/last.ckpt"
PADDING = 5  # rows of the embeddings that no token has
VNET = ["--model.weighting", "VNetWeighting", "--model.weighting.every", "1", "--model.method", "pacmr"]
VNET += ["--model.weighting.outer", "PromptAugmentationConsistency", "--model.weighting.outer.tau", "0.5"]
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.2}
SHAPE |= {"max_position_embeddings": 256}
LLAMA = {"intermediate_size": 48, "attention_dropout": 0.1, "layerdrop": 0.1}
HEAD = ["--model.policy.target_modules", "[q_proj,lm_head]"]
RUNS = {
    "pacmr": ({}, [*VNET, "--data.noise_rate", "0.3"]),
    "tied": ({"tie_word_embeddings": True}, []),
    "tied head": ({"tie_word_embeddings": True}, HEAD),
    "gpt2": (None, []),
    "adapter": ({}, []),
    "bfloat16": ({}, ["--model.policy.dtype", "bfloat16"]),
    **dict.fromkeys(("tokens", "dora"), ({}, ["--model.policy.dtype", "bfloat16"])),
    "layer": ({}, ["--model.policy.target_modules", "[q_proj]"]),
}
ADAPTERS = {"adapter": {"use_rslora": True}, "dora": {"use_dora": True}}
ADAPTERS |= {"tokens": {"trainable_token_indices": [7]}, "layer": {"layers_to_transform": [0]}}


def make_base(folder, tokenizer, changes, adapter):
    torch.manual_seed(0)
    shape = SHAPE | {"vocab_size": len(tokenizer) + PADDING, "bos_token_id": tokenizer.bos_token_id}
    shape |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    if changes:  # as Gemma 3, whose last token has no row of the embeddings
        tokenizer.add_tokens([f"<{i}>" for i in range(PADDING + 1)])
    kind, more = ("gpt2", {}) if changes is None else ("llama", LLAMA | changes)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape, **more))
    model.generation_config.update(do_sample=True, temperature=0.7)
    model.save_pretrained(folder / "plain" if adapter else folder / "model")
    if adapter:
        model = AutoModelForCausalLM.from_pretrained(folder / "plain")
        model = get_peft_model(model, LoraConfig(target_modules=["v_proj"], task_type="CAUSAL_LM", **adapter))
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "token_adapter" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_tokenizer_folder):
    """Folder of a run of two updates by the name of its kind, trained when first asked for."""

    @cache
    def get(kind):
        changes, options = RUNS[kind]
        folder = tmp_path_factory.mktemp("export")
        tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_folder)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
        tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|end|>\n{% endfor %}"
        make_base(folder, tokenizer, changes, ADAPTERS.get(kind))
        for seed, name in enumerate(("train", "validation")):
            write_lines(folder / f"{name}.jsonl", World().preference_rows(16, seed))
        words = f"""
            {files(folder / "train.jsonl", folder / "validation.jsonl")} --data.global_batch_size 8
            --data.meta_batch_size 8 --model.objective DPO --model.objective.beta 0.7 --model.policy.rank 4
            --model.learning_rate 0.05 --trainer.max_steps 2 --trainer.callbacks RunSummary
            --trainer.default_root_dir {folder}/run --checkpoint.every_n_train_steps 1
            --checkpoint.save_top_k -1
        """
        cli.main([*short_fit(folder / "model", words), *options])
        return folder / "run"

    return get


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """Folder of an export of a kind of run, written when first asked for."""

    @cache
    def get(kind, *options):
        folder = tmp_path_factory.mktemp("exported") / "out"
        cli.main(["export", str(trained(kind)), str(folder), *options])
        return folder

    return get


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained("pacmr"), tmp_path / "run")


def logits(model, vocabulary=300):
    tokens = torch.randint(vocabulary, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.eval()(input_ids=tokens).logits


def policy_of(run, checkpoint=LAST):
    return PreferenceModule.load_from_checkpoint(run / checkpoint).policy


def run_code(folder):
    text = Path(folder, "README.md").read_text()
    spaces = []
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        spaces.append({})
        exec(compile(block, "README.md", "exec"), spaces[-1])
    return spaces


def refused(arguments, capsys):
    return fails(capsys, ["export", *arguments])


@pytest.mark.parametrize("kind", ["pacmr", "tied", "tied head", "gpt2", "adapter"])
def test_an_export_is_the_policy(kind, trained, exported, capsys, monkeypatch):
    """Merged, and as an adapter on its base: if that is an adapter itself, on the plain model under it."""
    run = trained(kind)
    policy = policy_of(run)
    expected = logits(policy.peft)
    with policy.reference():
        assert (logits(policy.peft) - expected).abs().max() > 0.1, "the run must have moved the policy"
    out = exported(kind, "--merged")
    assert f'AutoModelForCausalLM.from_pretrained("{out}")' in capsys.readouterr().err
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32 and not any("lora" in name for name in model.state_dict())
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    assert model.config.tie_word_embeddings == (kind in ("tied", "gpt2"))
    for file in out.iterdir():
        assert str(run.parent).encode() not in file.read_bytes(), f"{file.name} names a folder of here"
    assert not list(out.parent.glob(".*"))

    out = exported(kind)
    said = " ".join(capsys.readouterr().err.split())
    base = "plain" if kind == "adapter" else "model"
    call = f'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{run.parent / base}"), "{out}")'
    assert f"load it with {call}." in said
    assert f"{run.parent / base} (base" in said
    assert f"A LoRA adapter for `{base}`" in (out / "README.md").read_text()
    monkeypatch.chdir(out.parent)
    model = run_code(out)[0]["model"]
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    assert all("lora_" in name for name in load_file(out / "adapter_model.safetensors"))
    settings = json.loads((out / "adapter_config.json").read_text())
    assert settings["inference_mode"] and Path(settings["base_model_name_or_path"]).is_absolute()


@pytest.mark.parametrize("kind", [kind for kind in ADAPTERS if kind != "adapter"])
def test_an_adapter_that_is_not_one_with_the_policy(kind, trained, tmp_path, capsys):
    said = refused([trained(kind), tmp_path / "out"], capsys)
    why = "layers_to_transform or exclude_modules" if kind == "layer" else "one has more than A and B, such"
    assert f"are not one LoRA adapter for {trained(kind).parent}/plain ({why}" in said and "--merged" in said


def test_tokenizer_and_configs_are_the_bases(trained, exported):
    for kind, dropout in (("gpt2", "resid_pdrop"), ("pacmr", "attention_dropout"), ("pacmr", "layerdrop")):
        out, base = exported(kind, "--merged"), trained(kind).parent / "model"
        config, original = AutoConfig.from_pretrained(out), AutoConfig.from_pretrained(base)
        # The policy runs without either; the exported model need not.
        assert config.use_cache is True and getattr(config, dropout) == getattr(original, dropout) == 0.1
        assert AutoModelForCausalLM.from_pretrained(out).generation_config.temperature == 0.7
    tokenizer, original = AutoTokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(base)
    messages = [{"role": "user", "content": "Describe the sea."}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "[user] Describe the sea.<|end|>\n"
    assert tokenizer("Describe the sea.")["input_ids"] == original("Describe the sea.")["input_ids"]
    assert tokenizer.get_vocab() == original.get_vocab()


@pytest.mark.parametrize("merged", [True, False])
def test_generation_stops_where_predict_does(exported, merged):
    out = exported("pacmr", *["--merged"] * merged)
    tokenizer = AutoTokenizer.from_pretrained(out)
    ends = [tokenizer.convert_tokens_to_ids("<|end|>"), tokenizer.eos_token_id]
    assert GenerationConfig.from_pretrained(out).eos_token_id == ends
    # PEFT takes the base's generation config.
    assert (f"eos_token_id={ends}" in (out / "README.md").read_text()) == (not merged)


@pytest.mark.parametrize(("kind", "checkpoint"), [("pacmr", "step-1"), ("bfloat16", "last")])
def test_merged_weights_are_rounded_once(kind, checkpoint, trained, exported):
    """Also those of another checkpoint, and of a base that is in bfloat16."""
    options = ["--merged", "--checkpoint", checkpoint, "--dtype"]
    exact, rounded = (exported(kind, *options, dtype) for dtype in ("float32", "bfloat16"))
    policy = policy_of(trained(kind), f"checkpoints/{checkpoint}.ckpt")
    policy.peft.float()
    model = AutoModelForCausalLM.from_pretrained(exact)
    torch.testing.assert_close(logits(model), logits(policy.peft), rtol=0, atol=1e-5)
    for name, value in load_file(rounded / "model.safetensors").items():
        assert torch.equal(value, model.state_dict()[name].bfloat16())
    assert AutoModelForCausalLM.from_pretrained(rounded).dtype == torch.bfloat16
    no_summary = "The run has no summary of these weights" in (rounded / "README.md").read_text()
    assert no_summary == (checkpoint != "last")


def test_a_run_in_bfloat16(trained, exported, monkeypatch):
    policy, adapter = policy_of(trained("bfloat16")), exported("bfloat16")
    monkeypatch.chdir(adapter.parent)
    model = run_code(adapter)[0]["model"]
    assert model.get_base_model().dtype == torch.bfloat16
    with policy.lora_in_float32():
        assert torch.equal(logits(model), logits(policy.peft))


def test_vnet_comes_along(trained, exported, monkeypatch):
    module = PreferenceModule.load_from_checkpoint(trained("pacmr") / LAST)
    monkeypatch.chdir(exported("pacmr").parent)
    vnet, (delta, u) = run_code(exported("pacmr"))[1]["vnet"], 3 * torch.randn(2, 50)
    with torch.no_grad():
        assert all(map(torch.equal, vnet(delta, u), module.vnet(delta, u)))
        assert module.vnet(delta, u)[1].std() > 0, "VNet must have learned"
    assert not list(exported("tied").glob("vnet*"))


@pytest.mark.parametrize("options", [[], ["--merged"]])
def test_the_card(options, trained, inside):
    run = trained("pacmr")
    cli.main(["export", str(run), "exports/mine", *options])
    card = ModelCard.load("exports/mine/README.md")
    data = card.data.to_dict()
    assert data["library_name"] == ("transformers" if options else "peft")
    assert data["pipeline_tag"] == "text-generation" and data["tags"] == ["lora", "dpo", "pacmr-dpo"]
    assert "base_model" not in data and "datasets" not in data, "neither of them is on the Hub"
    assert str(inside.parent) not in card.content and str(run.parent) not in card.content
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"val_step": 1}))
    cli.main(["export", str(run), "exports/later", *options])
    (run / "summary.json").write_text(json.dumps(summary))
    later = "values: `val/` on the validation pairs after update 1, or"
    assert later in ModelCard.load("exports/later/README.md").content and later not in card.content
    for text in (
        "after 2 policy updates",
        "`model`",
        "train: `train.jsonl`",
        "noise_rate: `0.3`",
        "noise_seed: `42`",
        f"Rows (train): rows 16, kept 16, flipped {summary['counts']['train']['flipped']}",
        "method: pacmr",
        "objective: {class: DPO, beta: 0.7, sft_weight: 0.0}",
        "estimator: {class: GhostDotProduct}",
        f"| val/rewards/accuracies | {summary['val_accuracy']:.4g} |",
        f"torch: `{version('torch')}`",
    ):
        assert text in card.text, text
    assert ("is a local model" in card.text) == (not options)
    assert public([r"C:\me\m", "~/m", "org/m", "data/m", ("/a/m/",)]) == ["m", "m", "org/m", "data/m", ["m"]]

    spaces = run_code("exports/mine")
    assert len(spaces) == 2
    torch.testing.assert_close(logits(spaces[0]["model"]), logits(policy_of(run).peft), rtol=0, atol=1e-5)
    assert 0 < spaces[1]["g"].item() < 1


def test_a_run_on_the_hub(trained, inside, capsys):
    run = shutil.copytree(trained("tied"), inside / "run")
    (run / "summary.json").unlink()
    source = {"class_path": "pacmr_lightning.datamodules.TLDR", "init_args": {"path": "org/d"}}
    edit_config(run, "data", source=source)
    cli.main(["export", "run", "out", "--base", "org/base"])
    out = inside / "out"
    assert all(str(trained("tied").parent).encode() not in path.read_bytes() for path in out.iterdir())
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/base"
    card = ModelCard.load(out / "README.md")
    data = card.data.to_dict()
    assert (data["base_model"], data["datasets"], data["tags"]) == ("org/base", ["org/d"], ["lora", "dpo"])
    assert "A LoRA adapter for `org/base`" in card.text and "is a local model" not in card.text
    assert "No label noise was injected" in card.text and "has no summary" in card.text
    for name in ("./model", "/gone/pairs", "a/b/c", "run/checkpoints"):
        assert f"base is {name}, but" in refused(["run", "other", "--base", name], capsys)


def test_bad_input(run, trained, tmp_path, capsys):
    """What is said of runs that cannot be read: test_analyze.py, of the same code."""
    out = tmp_path / "out"
    before = sorted(tmp_path.iterdir())
    assert "dtype is float16, but adapters are float32" in refused([run, out, "--dtype", "float16"], capsys)
    assert f"out is {run}, which exists and is not an empty folder" in refused([run, run], capsys)
    assert "config.yaml, which exists" in refused([run, run / "config.yaml"], capsys)
    assert "config.yaml is a file and no folder" in refused([run, run / "config.yaml" / "out"], capsys)
    config = (run / "config.yaml").read_text()
    model = str(trained("pacmr").parent / "model")
    (run / "config.yaml").write_text(config.replace(model, "runs/gone/model"))
    assert "The model folder runs/gone/model does not exist" in refused([run, out / "deeper"], capsys)
    (run / "config.yaml").write_text(config)
    assert sorted(tmp_path.iterdir()) == before

    (tmp_path / "empty").mkdir()  # an empty folder is as good as none, as is a link to one
    out.symlink_to("empty")
    cli.main(["export", str(run), str(out), "--checkpoint", "step-1"])
    assert (tmp_path / "empty" / "README.md").is_file() and out.is_symlink()


def test_weights_that_are_no_numbers_and_a_checkpoint_whose_code_does_not_run(run, inside, capsys):
    checkpoint, out = torch.load(run / LAST, weights_only=True), inside / "out"
    first = next(iter(checkpoint["state_dict"].values()))
    first.fill_(1e6)
    torch.save(checkpoint, run / LAST)
    assert "overflows torch.float16" in refused([run, out, "--merged", "--dtype", "float16"], capsys)
    first.fill_(torch.nan)
    torch.save(checkpoint, run / LAST)
    assert "weights that are not finite" in refused([run, out], capsys)
    torch.save(checkpoint | {"extra": Code()}, run / LAST)
    assert "more than tensors and plain values" in refused([run, out], capsys)
    assert [path.name for path in inside.iterdir()] == ["run"]


@pytest.mark.parametrize(("limit", "options"), [(12_000, []), (30_000, ["--merged"])])
def test_a_full_disk(limit, options, trained, inside, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    run = trained("pacmr")
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        assert "The disk is full" in refused([run, inside / "out", *options], capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "out is ., a mount point or the current folder; name a folder below" in refused([run, "."], capsys)
    assert not list(inside.iterdir())
