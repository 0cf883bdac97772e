"""Who is measured by gpu.py: PreferenceModule by attention and token layout, and TRL's DPOTrainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from flops import needed
from lightning.fabric.utilities import move_data_to_device
from machine import median_time
from pacmr_step import PinnedCoverage
from timed_runs import Shape, make_data, quiet, train, write_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.weighting import GhostDotProduct, VNetWeighting

COLUMNS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES = {
    "tiny": (64, 160, 2, 4, 2, 512, True),
    "small": (512, 1376, 4, 8, 2, 32_000, False),
    "0.5B": (896, 4864, 24, 14, 2, 151_936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "3B": (2048, 11_008, 36, 16, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
}
"""Two for trying, and Qwen2.5's: the columns, key-value heads, vocabulary, whether it ties its embeddings."""
EVERY, META_PAIRS = 10, 64
WARM_UP = 6
"""Steps in which kernels are compiled and chosen: batches differ in length."""

OURS: dict[str, dict[str, Any]] = {
    "sdpa, shared prompts": {"attn_implementation": "sdpa", "layout": "shared"},
    "sdpa, shared prompts, compiled": {"attn_implementation": "sdpa", "layout": "shared", "compile": True},
    "sdpa, one sequence a row": {"attn_implementation": "sdpa", "layout": "separate"},
    "flex, shared prompts": {"attn_implementation": "flex_attention", "layout": "shared"},
    "flex, shared prompts, compiled": {
        "attn_implementation": "flex_attention",
        "layout": "shared",
        "compile": True,
    },
    "flash 2, packed": {"attn_implementation": "flash_attention_2", "layout": "packed"},
}
OURS |= {f"{name}, recomputed": {**OURS[name], "gradient_checkpointing": True} for name in tuple(OURS)[:1]}
"""Options of ``PolicyModel``; recomputed: activations, in the backward pass."""
TRL: dict[str, dict[str, Any]] = {
    "TRL, sdpa": {},
    "TRL, sdpa, bf16 autocast": {"bf16": True},
    "TRL, flash 2": {"attention": "flash_attention_2"},
    "TRL, flash 2, Liger": {"attention": "flash_attention_2", "use_liger_kernel": True},
    "TRL, sdpa, recomputed": {"gradient_checkpointing": True},
}
"""Options of ``DPOConfig``, whose default is bf16 autocast, and TRL's attention."""
ON_CPU = ("sdpa, shared prompts", "sdpa, one sequence a row", "TRL, sdpa")


def write_model(folder: Path, size: str, dtype: str, device: str) -> None:
    """A random model, and a tokenizer that has a word for each token."""
    *columns, groups, vocabulary, tied = SIZES[size]
    config = LlamaConfig(  # AutoTokenizer would take Qwen2's own tokenizer for a Qwen2Config
        **dict(zip(COLUMNS, columns, strict=True)),
        num_key_value_heads=groups,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    with torch.device(device):
        AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)
    write_tokenizer(folder, vocabulary)


def fastest_product(device: str, dtype: str) -> float:
    """Floating-point operations a second of one large matrix product."""
    n = 8192 if device == "cuda" else 512
    a, b = (torch.randn(n, n, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    return 2 * n**3 / median_time(lambda: a @ b, device, repetitions=15, warm_up=5)


def reset_peak(device: str) -> None:
    """Memory from here on."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak(device: str) -> float | None:
    """GiB that torch had allocated at most; None on a CPU, where it does not keep the books."""
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None


def measure(
    folder: Path, shape: Shape, options: dict[str, Any], device: str, steps: int, coverages: list[float]
) -> dict[str, Any]:
    """Seconds and memory of DPO's and PACMR-DPO's steps, or why there are none."""
    quiet()
    try:
        policy = PolicyModel(str(folder), rank=shape.rank, dtype=shape.dtype, **options)
        policy.build()
        policy.to(device)
        data = make_data(folder, shape)
        reset_peak(device)
        seconds = train(policy, data, shape, WARM_UP + steps, device=device)[WARM_UP:]
        batch = move_data_to_device(data.train_pairs.batch(range(shape.pairs)), device)
        found = {
            "way": str(policy._plan),
            "as_asked": policy._plan.layout == options["layout"],
            "parameters": sum(p.numel() for p in policy.parameters() if not p.requires_grad),
            "tokens": batch.token_count,
            "needed": needed(policy, batch),
            "dpo_seconds": seconds,
            "dpo_peak": peak(device),
            "pacmr": {},
        }
        for coverage in coverages:
            data = make_data(folder, shape, EVERY, META_PAIRS)
            weighting = VNetWeighting(PinnedCoverage(coverage), GhostDotProduct(), every=EVERY)
            reset_peak(device)
            seconds = train(policy, data, shape, 2 * EVERY, weighting=weighting, device=device)[EVERY:]
            found["pacmr"][f"{coverage:.0%}"] = {"seconds": seconds, "peak": peak(device)}
        return found
    except Exception as error:  # out of memory, not installed, refused: others go on
        return failure(error)


def measure_trl(
    folder: Path, shape: Shape, options: dict[str, Any], device: str, steps: int
) -> dict[str, Any]:
    """The same of TRL's DPO."""
    quiet()
    transformers.logging.set_verbosity_error()
    try:
        from trl_step import Clock, make_trl  # the extra ``bench``

        rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
        options = dict(options)
        attention = options.pop("attention", "sdpa")
        trainer = make_trl(folder, rows, shape, {}, device, WARM_UP + steps, **options)
        trainer.model.get_base_model().set_attn_implementation(attention)
        clock = Clock(device)
        trainer.add_callback(clock)
        trainer.remove_callback(transformers.PrinterCallback)
        reset_peak(device)
        trainer.train()
        return {"dpo_seconds": clock.seconds[WARM_UP:], "dpo_peak": peak(device)}
    except Exception as error:
        return failure(error)


def failure(error: Exception) -> dict[str, Any]:
    """Why there are no numbers."""
    return {"error": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"}
