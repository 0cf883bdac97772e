"""Tiny real models and random pairs for the tests of the method."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from pacmr_lightning.batch import PairBatch
from pacmr_lightning.policy import PolicyModel, attention
from pacmr_lightning.policy.token_layout import rows_of

from .policy import looped_attention  # noqa: F401, for packed pairs on a CPU

VOCABULARY = 61
SHAPE = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    # Large weights make tokens matter to each other, so that a wrong mask is seen.
    "initializer_range": 0.2,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.2}
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "qwen2": transformers.Qwen2Config(**SHAPE),
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=8),
    # A sliding layer beside a full one.
    "qwen2-mixed": transformers.Qwen2Config(
        **SHAPE,
        use_sliding_window=True,
        sliding_window=7,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "mistral": transformers.MistralConfig(**SHAPE, sliding_window=7),
    "gpt2": transformers.GPT2Config(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, **GPT2),
}


@pytest.fixture
def save_model(tmp_path: Path) -> Callable[..., str]:
    """Saves a model of a config, or of a name in CONFIGS, with random weights."""

    def save(kind: str | transformers.PretrainedConfig, **changes: object) -> str:
        torch.manual_seed(0)
        name, config = (kind, CONFIGS[kind]) if isinstance(kind, str) else (kind.model_type, kind)
        config = type(config)(**{**config.to_dict(), **changes})
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return save


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Packs shared rows, as on a GPU with a base in half precision."""
    return lambda: monkeypatch.setattr(attention, "packs", lambda *_: True)


@pytest.fixture
def make_policy(save_model: Callable[..., str], packed: Callable[[], None]) -> Callable[..., PolicyModel]:
    """A built policy; ``moved`` randomizes LoRA's B, so that the policy differs from the reference.

    The layout "packed" is "shared" on a GPU.
    """

    def make(name="llama", *, moved: bool = True, double: bool = False, **options: object) -> PolicyModel:
        changes = options.pop("changes", {})
        if options.get("layout") == "packed":
            packed()
            options["layout"] = "shared"
        policy = PolicyModel(save_model(name, **changes), **{"rank": 4, "alpha": 8, **options})
        policy.build()
        if double:
            policy.double()
            _exact_norms(policy)
        if moved:
            torch.manual_seed(1)
            with torch.no_grad():
                for key, parameter in policy.adapter().items():
                    if ".lora_B." in key:
                        parameter.normal_(std=0.1)
        return policy

    return make


def _exact_norms(model: torch.nn.Module) -> None:
    """transformers' RMSNorm computes in fp32 whatever the dtype; torch's own keeps float64."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm") and not isinstance(child, torch.nn.RMSNorm):
                norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon, dtype=torch.float64)
                norm.weight = child.weight
                setattr(module, name, norm)


def log_ratios(policy: PolicyModel, rows: list[dict], prompt: str = "prompt") -> np.ndarray:
    """(N, 2) log(pi / pi_ref) of chosen and rejected in the whole model's own forward, one pair at a time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(policy.name)
    found = []
    for row in rows:
        start = tokenizer(row[prompt])["input_ids"]
        ends = [
            [*tokenizer(row[side], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            for side in ("chosen", "rejected")
        ]
        pair = PairBatch.collate([row["id"]], [start], *([end] for end in ends))
        with torch.no_grad():
            now = policy.score(rows_of("plain", pair))
            with policy.reference():
                before = policy.score(rows_of("plain", pair))
        found.append([float(now.chosen - before.chosen), float(now.rejected - before.rejected)])
    return np.array(found)


@pytest.fixture
def make_batch() -> Callable[..., PairBatch]:
    """Random pairs of uneven lengths; ``augmented`` adds augmented prompts with other prompts."""

    def make(n: int = 5, *, seed: int = 0, augmented: bool = False, longest: int = 12) -> PairBatch:
        generator = torch.Generator().manual_seed(seed)

        def tokens(low: int) -> list[int]:
            length = int(torch.randint(low, longest, (1,), generator=generator))
            return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()

        def view(chosen: list, rejected: list) -> PairBatch:
            prompts = [[1, *tokens(1)] for _ in range(n)]
            flags = [i % 2 for i in range(n)]
            ids = [f"pair-{i}" for i in range(n)]
            return PairBatch.collate(ids, prompts, chosen, rejected, flipped=flags)

        chosen = [[*tokens(1), 2] for _ in range(n)]
        rejected = [[*tokens(1), 2] for _ in range(n)]
        batch = view(chosen, rejected)
        if augmented:
            batch.augmented = view(chosen, rejected)
        return batch

    return make


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")
