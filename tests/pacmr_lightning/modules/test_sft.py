"""Supervised fine-tuning with real trainers, tokenizers and (tiny) models."""

import math
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint, SpikeDetection
from transformers import AutoModelForCausalLM, AutoTokenizer

from pacmr_lightning.callbacks import RunCheckpoint
from pacmr_lightning.datamodules.sft import SFTDataModule
from pacmr_lightning.datamodules.sources import CompletionFiles, WorldCompletions
from pacmr_lightning.errors import UserError
from pacmr_lightning.modules.sft import SFTModule, save_model
from pacmr_lightning.policy.lora import add_lora

from ...conftest import quiet_trainer, write_lines

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"initializer_range": 0.2}
LORA = {"r": 4, "lora_alpha": 8}
DROPPING = LORA | {"lora_dropout": 0.5}


def make_data(tokenizer=None, rows=48, batch_size=8, **options):
    return SFTDataModule(
        WorldCompletions(rows=rows, validation_rows=21),
        tokenizer=tokenizer,
        vocab_size=420 if tokenizer is None else None,
        batch_size=batch_size,
        **options,
    )


def fit(folder, module, data, ckpt_path=None, max_epochs=1, **options):
    seed_everything(1, verbose=False)
    trainer = quiet_trainer(folder, max_epochs=max_epochs, **options)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model that was trained from scratch: module, trainer, and the saved folder."""
    folder = tmp_path_factory.mktemp("sft")
    module = SFTModule(from_scratch=SHAPE, learning_rate=3e-3)
    trainer = fit(folder, module, make_data(), max_epochs=3)
    return module, trainer, folder / "model"


@pytest.fixture
def built(tmp_path):
    def make(module, data):
        trainer = quiet_trainer(tmp_path, max_epochs=1)
        data.trainer = module.trainer = trainer
        trainer.datamodule = data
        data.setup("fit")
        module.setup("fit")
        module.configure_model()
        return module, next(iter(data.train_dataloader()))

    return make


def logits(model, batch):
    model.eval()
    with torch.no_grad():
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def test_training_and_validation(trained):
    module, trainer, _ = trained
    assert trainer.global_step == 18
    assert trainer.callback_metrics["train/loss"] < 0.8 * math.log(420)
    module.eval()
    with torch.no_grad():
        losses = torch.cat([module.token_losses(batch) for batch in trainer.datamodule.val_dataloader()])
    assert len(losses) == 21 * 5
    assert trainer.callback_metrics["val/loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert trainer.callback_metrics["val/perplexity"] == pytest.approx(float(losses.mean().exp()), rel=1e-5)


def test_the_saved_folder_is_the_model_with_its_tokenizer(trained):
    module, trainer, folder = trained
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    batch = next(iter(trainer.datamodule.val_dataloader()))
    assert torch.equal(logits(model, batch), logits(module.network, batch))
    assert tokenizer.get_vocab() == trainer.datamodule.tokenizer.get_vocab()
    assert tokenizer("a")["input_ids"][0] == model.config.bos_token_id == tokenizer.bos_token_id
    for name in ("eos_token_id", "pad_token_id"):
        assert getattr(model.config, name) == getattr(tokenizer, name)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_loss_against_log_probabilities_in_float64(built):
    """Of the response's tokens alone, whatever padding stands behind them."""
    module, batch = built(SFTModule(from_scratch=SHAPE), make_data())
    module.network.double()
    # (8, T - 1) log-probabilities of the tokens from the second on.
    log_probs = logits(module.network, batch)[:, :-1].log_softmax(-1)
    found = log_probs.gather(2, batch["input_ids"][:, 1:, None])[..., 0]
    losses = module.token_losses(batch)
    assert losses.dtype == torch.float64 and losses.shape == (8 * 5,)  # four words and EOS
    torch.testing.assert_close(losses, -found[batch["labels"][:, 1:] != -100], rtol=1e-12, atol=0)
    padding = zip(batch.items(), (7, 0, -100), strict=True)
    wider = {name: torch.cat([part, torch.full((8, 3), fill)], 1) for (name, part), fill in padding}
    torch.testing.assert_close(module.token_losses(wider), losses)


@pytest.fixture
def base(trained):
    return str(trained[2])


def test_the_saved_model_stops_where_the_template_ends_a_turn(base, tmp_path):
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<|end|>\n{% endfor %}"
    model = add_lora(model, {**LORA, "target_modules": ["q_proj"]}, "lora")
    save_model(tmp_path / "model", model, tokenizer)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model").generation_config.eos_token_id
    assert found == [tokenizer.convert_tokens_to_ids("<|end|>"), tokenizer.eos_token_id]


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, about tied weights
@pytest.mark.parametrize(
    ("options", "tied"),
    [
        (LORA, False),
        ({"r": 2, "target_modules": ["q_proj", "lm_head"]}, True),
        ({"r": 2, "target_modules": ["embed_tokens"]}, True),
        ({"r": 2, "modules_to_save": ["lm_head"]}, True),
    ],
)
def test_lora_is_merged_as_it_was_trained(options, tied, tiny_llama, tmp_path):
    base = tiny_llama(tmp_path / "base", tie_word_embeddings=tied, initializer_range=0.2)
    module = SFTModule(model=base, lora=options, learning_rate=1e-2)
    data = make_data(tokenizer=base)
    fit(tmp_path, module, data)
    batch = next(iter(data.val_dataloader()))
    folder = tmp_path / "model"
    files = {path.name for path in folder.iterdir()}
    assert "model.safetensors" in files and not any("adapter" in name for name in files)
    saved = AutoModelForCausalLM.from_pretrained(folder)
    assert not any("lora" in name for name, _ in saved.named_parameters())
    torch.testing.assert_close(logits(saved, batch), logits(module.network, batch), atol=1e-4, rtol=1e-4)
    before = logits(AutoModelForCausalLM.from_pretrained(base), batch)
    assert (logits(saved, batch) - before).abs().max() > 0.01
    with module.network.disable_adapter():
        torch.testing.assert_close(logits(module.network, batch), before, rtol=0, atol=0)


def test_half_precision_is_for_the_base_alone(base, built, tmp_path):
    module, batch = built(SFTModule(model=base, lora=LORA, dtype="bfloat16"), make_data(tokenizer=base))
    kinds = {(p.dtype, p.requires_grad) for p in module.network.parameters()}
    assert kinds == {(torch.bfloat16, False), (torch.float32, True)}
    assert module.token_losses(batch).dtype == torch.float32
    with pytest.raises(UserError, match=r"is torch.bfloat16, .* set trainer.precision"):
        fit(tmp_path, SFTModule(from_scratch=SHAPE), make_data(), precision="bf16-true")
    with pytest.raises(UserError, match=r"bf16-mixed, but trains in 32-true .* ddp with bf16-mixed"):
        fit(tmp_path, SFTModule("nowhere"), make_data(), precision="bf16-mixed", strategy="deepspeed")


@pytest.mark.parametrize("lora", [None, DROPPING])
def test_gradient_checkpointing_recomputes_and_gives_the_same_gradients(base, built, lora):
    gradients, calls = [], []
    for checkpointing in (False, True):
        seed_everything(0, verbose=False)
        sft = SFTModule(model=base, lora=lora, gradient_checkpointing=checkpointing)
        module, batch = built(sft, make_data(tokenizer=base))
        [attention] = [m for n, m in module.network.named_modules() if n.endswith("layers.0.self_attn")]
        count = []
        attention.register_forward_hook(lambda *_, count=count: count.append(1))
        torch.manual_seed(0)
        module.token_losses(batch).sum().backward()
        calls.append(len(count))
        gradients.append([p.grad for p in module.parameters() if p.requires_grad])
    assert calls == [1, 2]
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def parameters(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("lora", "accumulate", "saved"), [(None, 1, 8), (None, 2, 4), (DROPPING, 1, 6)])
def test_a_resumed_run_ends_with_the_same_model(base, tmp_path, lora, accumulate, saved):
    middle = tmp_path / "checkpoints" / f"step={saved}.ckpt"
    saving = {"every_n_train_steps": saved, "save_top_k": -1, "filename": "{step}"}
    for folder, start in (("whole", None), ("resumed", middle)):
        checkpoints = RunCheckpoint(tmp_path / "checkpoints", **saving)
        options = {"callbacks": [checkpoints], "accumulate_grad_batches": accumulate, "max_epochs": 2}
        module = SFTModule(model=base, learning_rate=1e-2, lora=lora)
        data = make_data(tokenizer=base, num_workers=accumulate - 1)
        if start is None:  # an evaluation changes nothing
            quiet_trainer(tmp_path).validate(module, data, verbose=False)
        trainer = fit(tmp_path / folder, module, data, start, **options)
        assert trainer.global_step == 12 // accumulate
    assert_equal(parameters(tmp_path / "whole" / "model"), parameters(tmp_path / "resumed" / "model"))


@pytest.mark.parametrize("lora", [None, LORA])
def test_what_a_resumed_run_may_change(base, tmp_path, caplog, lora):
    middle = tmp_path / "checkpoints" / "epoch=0.ckpt"

    def run(start=middle, data=None, model=base, max_epochs=2, more=(), **options):
        callbacks = [ModelCheckpoint(middle.parent, save_top_k=-1, filename="{epoch}"), *more]
        module = SFTModule(model=model, **{"learning_rate": 1e-2, "lora": lora, **options})
        data = data or make_data(tokenizer=base)
        return fit(tmp_path / "run", module, data, start, max_epochs=max_epochs, callbacks=callbacks)

    run(None, max_epochs=1, more=[LearningRateFinder(num_training_steps=4)])
    with pytest.raises(UserError, match=r"another rate .* set model\.learning_rate to the one"):
        run(more=[LearningRateFinder()])
    trainer = run(learning_rate=1e-3, weight_decay=0.5)
    assert "learning_rate 0.001 instead of 0.01, weight_decay 0.5 instead of 0.0" in caplog.text
    assert "planned updates 12 instead of 6" in caplog.text
    content, loaded = torch.load(middle, weights_only=False), SFTModule.load_from_checkpoint(middle)
    assert_equal(content["state_dict"], {name: loaded.state_dict()[name] for name in content["state_dict"]})
    group = trainer.optimizers[0].param_groups[0]
    assert group["lr"] == pytest.approx(1e-4) and group["weight_decay"] == 0.5
    with pytest.raises(UserError, match="rows of a batch over all processes 4 instead of 8"):
        run(data=make_data(tokenizer=base, batch_size=4))
    with pytest.raises(UserError, match="training rows"):
        run(data=make_data(tokenizer=base, rows=49))
    other = tmp_path / "other"
    changed = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        changed.get_output_embeddings().weight[0, 0] += 1e-3
    changed.save_pretrained(other)
    AutoTokenizer.from_pretrained(base).save_pretrained(other)
    if lora is None:
        run(model=str(other))  # all weights come from the checkpoint
        return
    with pytest.raises(UserError, match=r"lora\.lora_alpha 16 instead of 8"):
        run(lora={**LORA, "lora_alpha": 16})
    with pytest.raises(UserError, match=f"weights of {other} differ"):
        run(model=str(other))
    trained = {name for name, p in trainer.lightning_module.named_parameters() if p.requires_grad}
    assert content["state_dict"].keys() == trained
    lost = content["state_dict"].popitem()[0]
    torch.save(content, middle)
    with pytest.raises(UserError, match=re.escape(f"lacks 1 trained weights, the first being {lost}")):
        run()


TWO = {"devices": 2, "strategy": "ddp_spawn"}


@pytest.mark.parametrize(
    ("rows", "others"),
    [
        (44, [(2, {"accumulate_grad_batches": 4})]),  # two in an epoch's last update
        pytest.param(48, [(4, TWO), (2, {**TWO, "accumulate_grad_batches": 2})], marks=pytest.mark.slow),
    ],
)
def test_every_token_counts_the_same(rows, others, base, tmp_path):
    words = (" deep" * (1 + i % 7) + " cold" for i in range(rows))
    uneven = ({"prompt": f"Describe the sea {i}:", "completion": word} for i, word in enumerate(words))
    path = write_lines(tmp_path / "rows.jsonl", uneven)
    source, found = CompletionFiles(path, path), []
    for size, options in ((8, {}), *others):
        folder, data = tmp_path / str(len(found)), SFTDataModule(source, tokenizer=base, batch_size=size)
        options = {"gradient_clip_val": 1.0, "max_epochs": 2} | options
        trainer = fit(folder, SFTModule(model=base, learning_rate=1e-2), data, **options)
        assert trainer.global_step == 12 or "strategy" in options  # spawned processes keep theirs
        found.append(parameters(folder / "model"))
    for other in found[1:]:
        torch.testing.assert_close(dict(other), dict(found[0]), rtol=1e-4, atol=1e-4)


def test_a_signal_waits_for_the_update(base, tmp_path):
    stop = Callback()
    # The second of the second update's two batches comes next.
    stop.on_train_batch_end = lambda *given: given[-1] == 2 and signal.raise_signal(signal.SIGTERM)
    checkpoints = RunCheckpoint(tmp_path / "checkpoints", every_n_train_steps=100, save_last=True)
    options = {"callbacks": [stop, checkpoints], "accumulate_grad_batches": 2}
    with pytest.raises(SystemExit):
        fit(tmp_path / "run", SFTModule(model=base), make_data(tokenizer=base), **options)
    assert torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 2


def test_where_the_model_is_saved(base, tmp_path):
    place, last = tmp_path / "elsewhere" / "reference", tmp_path / "last.ckpt"
    module = SFTModule(from_scratch=SHAPE, save_to=place)
    fit(tmp_path / "run", module, make_data(rows=8), fast_dev_run=True)
    assert not place.exists()
    for start, epochs in ((None, 1), (last, 2)):  # the second model takes the place of the first
        module = SFTModule(from_scratch=SHAPE, save_to=place)
        fit(tmp_path / "run", module, make_data(rows=8), start, epochs).save_checkpoint(last)
        assert_equal(parameters(place), module.network.state_dict())
    assert [path.name for path in place.parent.iterdir()] == ["reference"]
    assert not (tmp_path / "run" / "model").exists()
    for folder, start in ((place, None), (tmp_path / "run", None), (base, last)):
        with pytest.raises(UserError, match="which is more than a model of this run; move that folder, or"):
            module = SFTModule(from_scratch=SHAPE, save_to=folder)
            fit(tmp_path / "run", module, make_data(rows=8), start, 3)
    again = SFTModule(model=place)
    fit(tmp_path / "run", again, make_data(tokenizer=str(place), rows=8))
    assert again.hparams["model"] == str(place)


def test_the_loss_of_an_update_is_that_of_all_its_batches(base, tmp_path):
    module, data = SFTModule(model=base, learning_rate=1e-12), make_data(tokenizer=base)
    batches, step = [], module.training_step
    module.training_step = lambda batch, batch_idx: batches.append(batch) or step(batch, batch_idx)
    trainer = fit(tmp_path, module, data, accumulate_grad_batches=2, max_steps=1, log_every_n_steps=1)
    losses = torch.cat([module.token_losses(batch).detach() for batch in batches])
    assert float(trainer.callback_metrics["train/loss"]) == pytest.approx(float(losses.mean()), rel=1e-5)


def test_runs_that_are_refused(base, tmp_path):
    note = tmp_path / "model" / "note.txt"
    note.parent.mkdir()
    note.write_text("keep me")
    new = SFTModule(from_scratch=SHAPE)
    for folder, module in ((Path(base).parent, SFTModule(model=base)), (tmp_path, new)):
        with pytest.raises(UserError, match="is more than a model of this run; move that folder, or set"):
            fit(folder, module, make_data(rows=8))
    with pytest.raises(UserError, match=r"model is None, but it must be given, or use trainer\.validate"):
        SFTModule(from_scratch=SHAPE).configure_model()
    assert note.read_text() == "keep me"
    data = make_data(rows=8)
    data.trainer = quiet_trainer(tmp_path / "run")
    data.setup("fit")
    with pytest.raises(UserError, match="datamodule is None, but must be an SFTDataModule"):
        data.trainer.fit(SFTModule(from_scratch=SHAPE), data.train_dataloader())
    with pytest.raises(UserError, match="The run has no end"):
        fit(tmp_path / "run", SFTModule(from_scratch=SHAPE), data, max_epochs=-1)
    found = [{"callbacks": [each]} for each in (BatchSizeFinder(), SpikeDetection())]
    zeros = ({name: 0} for name in ("accumulate_grad_batches", "check_val_every_n_epoch"))
    for options in (*found, {"overfit_batches": 1}, *zeros):
        with pytest.raises(UserError, match=r"Finder would change|Detection cannot|(batches|epoch) is [01]"):
            fit(tmp_path / "run", SFTModule(from_scratch=SHAPE), data, **options)
    assert not (tmp_path / "run/model").exists()
    module, sharded = SFTModule(from_scratch=SHAPE), {"strategy": "deepspeed_stage_2"}
    module.trainer = quiet_trainer(tmp_path, accumulate_grad_batches=2, **sharded)
    with pytest.raises(UserError, match=r"is 2, but DeepSpeed .* 1 with a larger data\.batch_size"):
        module.configure_callbacks()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "model is None and from_scratch is None; give exactly one of them"),
        ({"model": "m", "from_scratch": {}}, "give exactly one of them"),
        ({"from_scratch": {"hiden_size": 8}}, "the key 'hiden_size', but it takes architectures, "),
        ({"from_scratch": {"vocab_size": 8}}, "; the tokenizer sets it"),
        ({"model": "m", "lora": {"rank": 8}}, "lora has the key 'rank', but it takes alpha_pattern, "),
        ({"model": "m", "learning_rate": 0.0}, "learning_rate is 0.0, but it must be above 0"),
        ({"model": "m", "dtype": "bfloat16"}, "dtype is bfloat16 without lora"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        SFTModule(**options)


def test_models_that_cannot_be_had(base, built, tmp_path):
    """What else is said of a model, or of LoRA's options: the policy's tests, whose code makes both."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    size, larger = len(tokenizer), str(tmp_path / "larger")
    tokenizer.add_tokens([f"extra-{i}" for i in range(9)])
    tokenizer.save_pretrained(larger)
    odd, wide = ({"from_scratch": {**SHAPE, "hidden_size": size}} for size in (30, "wide"))
    for options, tokenizer, message in (
        (odd, base, r"does not describe a Llama model \(.*30.* not a multiple"),
        (wide, base, r"does not describe a Llama model \(.*expected int, got str"),
        ({"model": base}, None, "the tokenizer is a new one"),
        ({"model": base}, larger, f"{size + 9} tokens, but the model .* has {size} embeddings; set"),
    ):
        with pytest.raises(UserError, match=message):
            built(SFTModule(**options), make_data(tokenizer=tokenizer, rows=8))
    shutil.copytree(base, larger, ignore=shutil.ignore_patterns("*token*"), dirs_exist_ok=True)
    built(SFTModule(f"{larger}/."), make_data(tokenizer=larger, rows=8))  # its own, with unused tokens
