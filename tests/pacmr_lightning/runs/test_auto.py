"""gradient_checkpointing: auto, by what a step takes and what is free; for SFT, too."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch.strategies import DeepSpeedStrategy
from transformers import AutoModelForCausalLM, LlamaConfig

from pacmr_lightning import cli
from pacmr_lightning.datamodules.sft import SFTDataModule
from pacmr_lightning.datamodules.sources import WorldCompletions
from pacmr_lightning.modules import PreferenceModule, SFTModule
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.runs import config as module
from pacmr_lightning.runs import memory_estimate
from pacmr_lightning.runs.memory_estimate import sft_step_bytes, step_bytes

from .test_memory_estimate import peak_of_allocations

GPU = torch.device("cuda")


@pytest.fixture
def folder(tmp_path):
    shape = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=512, **shape)).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.fixture
def decided(folder, monkeypatch):
    """What is decided with so many bytes free, what the configuration then has, and what was printed."""

    def run(
        free: float,
        asked="auto",
        strategy=None,
        device=GPU,
        attention="auto",
        devices=1,
        made=None,
        **options,
    ):
        policy = PolicyModel(folder, rank=8, gradient_checkpointing=True, attn_implementation=attention)
        given = Namespace(gradient_checkpointing=asked)
        config = Namespace(model=Namespace(init_args=Namespace(policy=Namespace(init_args=given))))
        strategy = strategy or SimpleNamespace(root_device=device)
        data = SimpleNamespace(train_pairs=SimpleNamespace(longest=lambda: (96, 32)), global_batch_size=8)
        trainer = SimpleNamespace(strategy=strategy, world_size=1, num_devices=devices, datamodule=data)
        said = []
        monkeypatch.setattr(module, "rank_zero_info", said.append)
        monkeypatch.setattr(module, "free_memory", lambda found: int(free))
        saved = module.SaveRunConfig(None, config)
        trained = PreferenceModule(policy, **options)
        saved.setup(trainer, trained, "fit")
        if made is not None:
            made.append(trained)
        return policy.gradient_checkpointing, given.gradient_checkpointing, said

    return run


def test_recomputed_where_a_step_would_not_fit(decided, folder):
    policy = PolicyModel(folder, rank=8)
    whole, part = (step_bytes(policy, pairs, 96, 32, devices=1) for pairs in (8, 2))
    assert part < 0.5 * whole
    # The longest pair has 160 tokens; no more than the device's 8 pairs run at once.
    tokens = [({"micro_batch_tokens": 479}, part), ({"micro_batch_tokens": 9999}, whole)]
    for options, needed in (({}, whole), ({"micro_batch_size": 2}, part), *tokens):
        fits, short = (needed / module.FREE * factor for factor in (1.01, 0.99))
        assert decided(fits, **options)[:2] == (False, False)
        checkpointed, written, said = decided(short, **options)
        assert checkpointed and written
        sizes = [f"{size / 2**30:.3g} GiB" for size in (needed, int(short))]
        assert said == [
            f"gradient_checkpointing auto is true: without it a step takes some {sizes[0]} (calculated, not "
            f"measured), and {sizes[1]} of the GPU are free; overrule by "
            "--model.policy.gradient_checkpointing."
        ]
    # Two processes share a machine's RAM.
    for devices, expected in ((1, False), (2, True)):
        free = 1.01 * whole / module.FREE
        found, written, said = decided(free, device=torch.device("cpu"), devices=devices)
        assert found == written == expected and "of RAM are free" in said[0]


def test_what_was_asked_for_is_left_alone(decided):
    assert decided(0.0, asked=False) == (True, False, [])  # the fixture's policy recomputes
    assert decided(0.0, asked=False, micro_batch_size=2) == (True, False, [])


@pytest.mark.parametrize(
    ("asked", "fits", "pairs", "recomputed"),
    [
        ("auto", (8, False), 8, False),  # all of them
        ("auto", (4, False), 4, False),  # enough tokens
        ("auto", (2, False), 4, True),  # too few to keep a GPU busy
        ("auto", (2, True), 2, True),
        ("auto", (1, True), 1, True),
        (True, (8, False), 8, True),
        (False, (2, False), 2, False),
    ],
)
def test_pairs_of_a_micro_batch(asked, fits, pairs, recomputed, decided, folder, monkeypatch):
    """As many as fit, with activations kept if these are enough; the free bytes are for ``fits``."""
    policy = PolicyModel(folder, rank=8)
    monkeypatch.setattr(memory_estimate, "BUSY", 4 * 160)
    free = 1.01 / module.FREE * step_bytes(policy, fits[0], 96, 32, devices=1, recomputed=fits[1])
    set_to: list[PreferenceModule] = []
    estimated: list[float] = []
    monkeypatch.setattr(
        module, "step_bytes", lambda *of, **named: estimated.append(step_bytes(*of, **named)) or estimated[-1]
    )
    found = decided(free, asked, micro_batch_size="auto", made=set_to)
    assert set_to[0].micro_batch_size == pairs
    also = ""
    if asked == "auto":
        assert found[:2] == (recomputed, recomputed)
        also = f" and gradient_checkpointing auto is {str(recomputed).lower()}"
    (said,) = found[2]
    assert said.startswith(
        f"micro_batch_size auto is {pairs}{also}: a step takes some {estimated[-1] / 2**30:.3g} GiB"
    )
    # No step is estimated twice.
    assert len(estimated) == len(set(estimated)) and all(x > module.FREE * free for x in estimated[:-1])


def test_pairs_where_memory_does_not_choose(decided):
    """Elsewhere 4, as at most; with a budget of tokens, and of attention that is not estimated, none."""
    for options, pairs in (
        ({"device": torch.device("cpu")}, 4),
        ({"attention": "eager"}, 4),
        ({"micro_batch_tokens": 999}, None),
    ):
        set_to: list[PreferenceModule] = []
        assert "micro_batch_size" not in str(
            decided(1e12, micro_batch_size="auto", made=set_to, **options)[2]
        )
        assert set_to[0].micro_batch_size == pairs


def test_ranks_decide_alike(decided, folder, monkeypatch):
    """By the one that has least."""
    needed = step_bytes(PolicyModel(folder, rank=8), 8, 96, 32, devices=1)
    monkeypatch.setattr(module, "min_over_ranks", lambda value, device: min(value, int(0.5 * needed)))
    assert decided(1e12)[0] is True


def test_what_a_policy_does(folder):
    """LoRA in bf16 keeps less for backward; with FlashAttention each response has a prompt of its own."""

    def needed(**options):
        return step_bytes(PolicyModel(folder, rank=8, dtype="bfloat16", **options), 8, 96, 32, devices=1)

    assert needed() < 0.9 * needed(lora_compute_dtype="float32")
    assert needed(layout="packed_shared") == needed(layout="shared") == needed()
    assert needed(attn_implementation="flash_attention_2") == needed(layout="packed") > 1.1 * needed()


def test_parts_of_a_model(decided, folder, monkeypatch):
    """ZeRO-3 with offloading holds less; what it keeps gathered counts."""
    policy = PolicyModel(folder, rank=8)
    whole = step_bytes(policy, 8, 96, 32, devices=1)
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "none"}}
    part = step_bytes(policy, 8, 96, 32, devices=1, zero=zero)
    on_host = step_bytes(policy, 8, 96, 32, 1, {**zero, "offload_optimizer": {"device": "cpu"}})
    assert on_host < part
    monkeypatch.setattr(DeepSpeedStrategy, "root_device", GPU)
    strategy = DeepSpeedStrategy(stage=3, offload_optimizer=True, offload_parameters=True)
    for factor, expected in ((1.01, False), (0.99, True)):
        assert decided(factor * on_host / module.FREE, strategy=strategy)[0] is expected
    assert on_host != whole


def test_recomputed_where_the_estimate_does_not_count(decided):
    """Attention's scores."""
    checkpointed, written, said = decided(1e12, attention="eager")
    assert checkpointed and written is True and "with eager attention is not estimated" in said[0]


@pytest.fixture
def sft(monkeypatch):
    """What is decided for SFT with real data and so many bytes free, and what was printed."""

    def run(free: float, **options):
        data = SFTDataModule(WorldCompletions(rows=48, validation_rows=8), vocab_size=420, batch_size=8)
        data.prepare_data()
        data.setup("validate")
        shape = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
        module_ = SFTModule(from_scratch=shape, gradient_checkpointing="auto", **options)
        given = Namespace(gradient_checkpointing="auto")
        trainer = SimpleNamespace(
            strategy=SimpleNamespace(root_device=GPU), world_size=1, datamodule=data, precision="32-true"
        )
        said = []
        monkeypatch.setattr(module, "rank_zero_info", said.append)
        monkeypatch.setattr(module, "free_memory", lambda found: int(free))
        saved = module.SaveRunConfig(None, Namespace(model=Namespace(init_args=given)))
        saved.setup(trainer, module_, "fit")
        decided = module_.hparams["gradient_checkpointing"]
        assert given.gradient_checkpointing is decided
        return decided, said, module_, data

    return run


@pytest.mark.parametrize("lora", [None, {"r": 4}])
def test_sft_recomputes_where_a_step_would_not_fit(sft, lora):
    decided, said, tuned, data = sft(2**40, lora=lora)
    assert decided is False and said[0].startswith("gradient_checkpointing auto is false: without it a step")
    tokens, responses = data.longest()
    lengths = [(len(row["prompt_ids"]), len(row["completion_ids"])) for row in data._rows["train"]]
    assert (tokens, responses) == (max(map(sum, lengths)), max(completion for _, completion in lengths))
    shape = {"rows": 8, "tokens": tokens, "responses": responses, "mixed": None}
    needed = sft_step_bytes(tuned.unbuilt(data.tokenizer), devices=1, **shape)
    assert sft(needed / module.FREE * 1.01, lora=lora)[0] is False
    assert sft(needed / module.FREE * 0.99, lora=lora)[0] is True
    # As the allocator counts a real pass: weights, gradients, AdamW's two moments, and activations.
    tuned.trainer = SimpleNamespace(datamodule=data, state=SimpleNamespace(fn=None))
    tuned.configure_model()
    ids = torch.randint(3, 400, (8, tokens))
    labels = ids.clone()
    labels[:, : tokens - responses] = -100
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    sizes = [(p.numel(), p.requires_grad) for p in tuned.network.parameters()]
    trained = [p for p in tuned.network.parameters() if p.requires_grad]

    def step():
        torch.autograd.grad(tuned.token_losses(batch).sum(), trained)

    step()
    real = 4 * sum(size * (4 if trains else 1) for size, trains in sizes) + peak_of_allocations(step)
    assert 0.9 * real < needed < 1.2 * real
    assert sft_step_bytes(tuned.unbuilt(data.tokenizer), devices=2, **shape) > needed
    halved = sft_step_bytes(tuned.unbuilt(data.tokenizer), devices=1, **{**shape, "mixed": torch.bfloat16})
    assert 0.4 * needed < halved < needed


def test_a_run_on_a_cpu(tiny_llama, tmp_path, monkeypatch, caplog):
    """Decided by what is free of RAM, printed and written down; the adapter is the same, bit for bit."""
    monkeypatch.chdir(tmp_path)
    tiny_llama("model")
    words = """
        fit --config quickstart/preference --config methods/pacmr --model.policy.model model
        --model.policy.gradient_checkpointing auto --data.source.pairs 64 --data.source.validation_pairs 8
        --trainer.accelerator cpu --trainer.limit_train_batches 2 --trainer.limit_val_batches 0
        --trainer.callbacks RunSummary --trainer.default_root_dir
    """.strip()
    found = {}
    for free, recomputed in ((None, False), (1, True)):
        if free is not None:
            monkeypatch.setattr(module, "free_memory", lambda device, free=free: free)
        cli.main(f"{words} {recomputed}".split())
        assert (
            f"gradient_checkpointing auto is {str(recomputed).lower()}: without it a step takes"
            in caplog.text
        )
        written = yaml.safe_load(Path(str(recomputed), "config.yaml").read_text())
        assert written["model"]["init_args"]["policy"]["init_args"]["gradient_checkpointing"] is recomputed
        found[recomputed] = torch.load(Path(str(recomputed), "checkpoints/last.ckpt"), weights_only=True)
    assert all(
        torch.equal(value, found[True]["state_dict"][name])
        for name, value in found[False]["state_dict"].items()
    )
