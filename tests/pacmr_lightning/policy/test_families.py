"""A pair's value is that of its sequences alone, whatever its neighbours and the family, or it is refused."""

import math

import pandas as pd
import pytest
import torch
from lightning.pytorch import seed_everything
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, xLSTMConfig, xLSTMForCausalLM

from pacmr_lightning import cli
from pacmr_lightning.batch import PairBatch
from pacmr_lightning.datamodules import CompletionFiles, Files, PreferenceDataModule, SFTDataModule
from pacmr_lightning.datamodules.tokenizer import load_tokenizer
from pacmr_lightning.errors import UserError
from pacmr_lightning.evaluation.generation import Decoding, generated
from pacmr_lightning.evaluation.prompt_batch import PromptBatch
from pacmr_lightning.modules import PreferenceModule, SFTModule
from pacmr_lightning.objectives import DPO
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.policy.lora import add_lora
from pacmr_lightning.policy.merged_adapters import merge_rounded

from ...conftest import files, quiet_trainer, read_lines, short_fit, write_lines

SIZE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZE |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "head_dim": 16}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 96}
LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [1.0 + 3 * i for i in range(8)]}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 32}
NEO = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 512, "window_size": 32}
FAMILIES = {
    "phi3": SIZE | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 96},
    "llama": SIZE | {"max_position_embeddings": 96, "rope_parameters": DYNAMIC},
    "granite": SIZE | {"max_position_embeddings": 96, "rope_parameters": DYNAMIC, "logits_scaling": 2.0},
    "gpt_neo": NEO | {"attention_types": [[["global", "local"], 1]]},
    "llama4_text": SIZE | EXPERTS | {"attention_chunk_size": 32, "num_hidden_layers": 4},
    "rwkv": {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2},
}
OTHERS = {
    "bert": SIZE,
    "ctrl": {"n_embd": 32, "dff": 48, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "gemma3n_text": SIZE | {"vocab_size_per_layer_input": 512, "num_kv_shared_layers": 0},
    "gpt_oss": SIZE | EXPERTS | {"layer_types": ["full_attention"] * 2},  # products are written in place
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "phimoe": SIZE | EXPERTS,
    "recurrent_gemma": SIZE | {"num_hidden_layers": 3, "lru_width": 32},
    "roberta": SIZE | {"is_decoder": True},
    "zamba2": SIZE | {"layers_block_type": ["hybrid"] * 2, "n_mamba_heads": 8, "mamba_headdim": 8},
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 48},
}
PAIR = [7, 8, 9, 10, 11], [12, 13, 14], [15, 16]
LENGTHS = (3, 40, 4, 50, 3, 45, 4, 41)
"""Words of the prompts; each has about two tokens."""


@pytest.fixture
def save(tokenizer, tmp_path):
    """Saves a tiny model with lively weights, so that mistakes show, and its tokenizer."""

    def save(config):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 2:
                    weight.mul_(3.0)
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return save


def config_of(family):
    special = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return AutoConfig.for_model(family, **special | (FAMILIES | OTHERS)[family])


@pytest.fixture
def pairs(tmp_path):
    def write(name, lengths):
        rows = [
            {
                "prompt": f"What {'the sea is in a book ' * (words // 6)} {'is it ' * (words % 6)}{i}?",
                "chosen": f" I do not know it {'of all books ' * (words // 12)}.",
                "rejected": "The rain." if words == 3 else " The sea, because.",
            }
            for i, words in enumerate(lengths)
        ]
        return write_lines(tmp_path / f"{name}.jsonl", rows)

    return write("train", LENGTHS), write("short", (3, 4, 3, 4))


@torch.no_grad()
def alone(model, prompt, response):
    """A response's log-probability by one plain forward pass."""
    model(torch.tensor([prompt[:1]]), use_cache=False)  # dynamic NTK keeps the frequencies of a longer one
    logits = model(torch.tensor([[*prompt, *response]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)].sum()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_python_program(name, save, pairs, tmp_path):
    """As in the README, where validation pairs are short, come first, and the reference is computed live."""
    folder, (train, short) = save(config_of(name)), pairs
    seed_everything(1)
    module = PreferenceModule(PolicyModel(folder, rank=2), DPO(beta=0.1), learning_rate=1e-4)
    data = PreferenceDataModule(Files(train, short), tokenizer=folder, global_batch_size=8)
    quiet_trainer(tmp_path / "run", max_steps=1).fit(module, data)
    found = module.policy.reference_log_probs(data.train_pairs.batch(list(range(8))))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    triples = (map(row.get, ("prompt_ids", "chosen_ids", "rejected_ids")) for row in data.train_pairs.rows)
    expected = torch.tensor([[alone(model, prompt, one) for one in both] for prompt, *both in triples])
    torch.testing.assert_close(torch.stack([found.chosen, found.rejected], 1), expected, atol=1e-4, rtol=0)
    cached = torch.tensor(data.train_pairs.reference_log_probs(module.policy))  # as audits have them, too
    torch.testing.assert_close(cached, expected, atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["ctrl", "gpt_oss", "recurrent_gemma", "roberta", "phimoe", "mamba"])
def test_families_that_work(family, save):
    """RoBERTa counts its positions from elsewhere, CTRL scales embeddings in place.

    Phi-MoE's routers return several tensors, which an adapter's layer does not take.
    """
    folder = save(config_of(family))
    targets = ["in_proj", "x_proj"] if family == "mamba" else "all-linear"
    policy = PolicyModel(folder, rank=2, target_modules=targets)
    policy.build()
    prompt, chosen, rejected = PAIR
    batch = PairBatch.collate(["a", "b"], [prompt, prompt[:2]], [chosen] * 2, [rejected] * 2)
    found = policy.log_probs(batch)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(found.chosen[0], alone(model, prompt, chosen), atol=1e-4, rtol=0)
    torch.testing.assert_close(found.rejected[1], alone(model, prompt[:2], rejected), atol=1e-4, rtol=0)
    gradients = torch.autograd.grad(found.chosen.sum(), list(policy.adapter().values()))
    if policy.model.supports_gradient_checkpointing:
        policy.recompute("selective")
        policy.log_probs(batch).chosen.sum().backward()
        torch.testing.assert_close([p.grad for p in policy.adapter().values()], [*gradients])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "targets", "said"),
    [
        ("bert", "all-linear", "predictions of BertLMHeadModel change by .* with the tokens after them"),
        ("xlnet", "all-linear", "predictions of XLNetLMHeadModel change by .* with the tokens after them"),
        ("mamba", "all-linear", r"incompatible with Mamba.*\[dt_proj, in_proj, x_proj\]"),
        ("mamba", ["dt_proj", "in_proj"], r"2 of its 4 .*0.mixer.dt_proj.*\[in_proj, out_proj, x_proj\]"),
        ("gemma3n_text", "all-linear", r"does not call .* set target_modules to some of \[[a-z]"),
    ],
)
def test_families_that_are_refused(family, targets, said, save, pairs, tmp_path):
    folder = save(config_of(family))
    with pytest.raises(UserError, match=said):
        policy = PolicyModel(folder, rank=2, target_modules=targets)
        policy.build()
        policy.log_probs(PairBatch.collate(["a"], *([part] for part in PAIR)))
    if "with the tokens after them" not in said:  # an audit needs no adapter
        cli.main(["audit", folder, "--data", pairs[0], "--noise_rate", "0.2", "--output", str(tmp_path)])


@pytest.mark.filterwarnings("ignore")
def test_layers_that_share_a_weight_are_not_merged(save, tmp_path):
    folder, lora = save(config_of("zamba2")), {"r": 2, "target_modules": ["q_proj"]}
    rows = write_lines(tmp_path / "sft.jsonl", [{"prompt": "What is it?", "completion": " A book."}] * 8)
    data = SFTDataModule(CompletionFiles(rows, rows), folder, batch_size=4)
    with pytest.raises(UserError, match="q_proj shares its weight"):
        quiet_trainer(tmp_path / "sft", fast_dev_run=True).fit(SFTModule(folder, lora=lora), data)
    model = add_lora(AutoModelForCausalLM.from_pretrained(folder), lora, "lora")
    with pytest.raises(UserError, match="q_proj shares its weight"):
        merge_rounded(model, torch.float32, None)


@pytest.mark.filterwarnings("ignore")
def test_the_command(save, pairs, tmp_path):
    """A fresh policy equals its reference, however the batch was cut, and so do later values."""
    folder, seen = save(config_of("phi3")), []
    for size, reference in ((1, "cached"), (8, "live")):
        words = f"""{files(*pairs)} --data.reference {reference} --data.global_batch_size 8
            --trainer.max_steps 2 --trainer.log_every_n_steps 1 --model.micro_batch_size {size}
            --model.learning_rate 1e-3 --model.policy.layout shared --output {tmp_path / str(size)}"""
        cli.main(short_fit(folder, words))
        seen.append(pd.read_csv(tmp_path / str(size) / "metrics.csv")["train/loss"].dropna().tolist())
    assert seen[0][0] == pytest.approx(math.log(2), abs=1e-6)
    assert seen[0] == pytest.approx(seen[1], abs=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["rwkv", "phi3", "llama"])
def test_responses_to_prompts_of_any_length(name, save):
    """Greedy responses are those of plain forward passes over one sequence; some pass the rotary limit."""
    folder = save(config_of(name))
    tokenizer, policy = load_tokenizer(folder), PolicyModel(folder, rank=2)
    policy.build(announce=False)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(4, 300, (n,), generator=generator).tolist() for n in (5, 5, 93, 30, 120)]
    for some in (prompts[:2], prompts):
        names = [str(i) for i in range(len(some))]
        batch = PromptBatch.collate(names, names, some, pad_id=tokenizer.pad_token_id)
        for prompt, found in zip(some, generated(policy, tokenizer, batch, 6, Decoding()), strict=True):
            tokens = list(prompt)
            while len(tokens) < len(prompt) + len(found):
                model(torch.tensor([prompt[:1]]), use_cache=False)
                tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
            assert found == tokens[len(prompt) :]
    assert policy.generates_alone is (name == "rwkv")


@pytest.mark.filterwarnings("ignore")
def test_a_cache_that_fails(tmp_path, tokenizer, write_rows, pair_rows, caplog):
    """transformers' xLSTM refuses its own cache, so predict computes without one, and says so."""
    kernels = {"chunkwise_kernel": "chunkwise--native_autograd", "step_kernel": "native"}
    kernels["sequence_kernel"] = "native_sequence__native"
    size = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2}
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    model = xLSTMForCausalLM(xLSTMConfig(**size, **kernels, **special)).eval()
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    rows, run = files(write_rows(pair_rows(8))), tmp_path / "run"
    options = f"{rows} --data.global_batch_size 8 --trainer.max_steps 1 --model.learning_rate 1e-30"
    cli.main(short_fit(tmp_path / "base", f"{options} --output {run}"))
    words = f"--config {run}/config.yaml --ckpt_path last --model.max_new_tokens 5 --data.predict_prompts 3"
    cli.main(["predict", *words.split()])
    assert "does not generate from its cache (matC_old has wrong shape" in caplog.text
    for row in read_lines(run / "generations.jsonl"):
        ids = tokens = tokenizer(row["prompt"], return_tensors="pt").input_ids
        for _ in range(row["response_tokens"]):
            tokens = torch.cat([tokens, model(tokens, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        assert tokenizer.decode(tokens[0, ids.shape[1] :]) == row["response"]


@pytest.fixture
def gemma(save):
    """A tiny Gemma 3 with a vision tower, as those of 4B and more parameters are loaded."""
    text = SIZE | {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    images = {"mm_tokens_per_image": 4, "image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7}
    vision |= {"image_size": 28, "patch_size": 14}
    return save(Gemma3Config(text_config=text, vision_config=vision, **images))


@pytest.mark.parametrize("targets", ["all-linear", "[q_proj,v_proj]"])
def test_pairs_on_a_model_with_a_vision_tower(targets, gemma, pairs, tmp_path, caplog):
    words = f"{files(*pairs)} --data.global_batch_size 8 --trainer.max_steps 1 --output {tmp_path / 'run'}"
    cli.main(short_fit(gemma, f"{words} --model.policy.target_modules {targets}"))
    assert "gets no adapter in model.vision_tower, model.multi_modal_projector" in caplog.text
    checkpoint = next((tmp_path / "run" / "checkpoints").glob("*.ckpt"))
    trained = torch.load(checkpoint, weights_only=False)["state_dict"]
    assert trained and all(".language_model." in key for key in trained)


@pytest.mark.parametrize("lora", ["null", '{"r":2}'])
def test_sft_of_a_model_with_a_vision_tower(lora, gemma, tmp_path):
    rows = [{"prompt": f"What is {i}?", "completion": f" A book of {i}."} for i in range(8)]
    train = write_lines(tmp_path / "sft.jsonl", rows)
    words = f"""fit --model SFTModule --model.model {gemma} --model.lora {lora} --model.learning_rate 1e-2
        --data SFTDataModule --data.tokenizer {gemma} --data.source CompletionFiles
        --data.source.train {train} --data.source.validation {train} --trainer.accelerator cpu
        --trainer.max_steps 1 --trainer.enable_progress_bar false --trainer.default_root_dir {tmp_path}/sft"""
    cli.main(words.split())
    folders = gemma, tmp_path / "sft" / "model"
    before, after = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders)
    moved = [key for key, weight in before.items() if not torch.equal(weight, after[key])]
    assert moved and not any("vision" in key or "projector" in key for key in moved)
