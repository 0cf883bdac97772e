"""Seconds of a probe's forward pass over random pairs, and its ratio to a pass through all layers.

    OMP_NUM_THREADS=1 python benchmarks/probe.py

The default is 1,000 pairs of 2 x 60 tokens after a prompt of 20, on a random Llama of SmolLM2-135M's sizes,
in float32. Both sides run in turns on the same batches.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from machine import describe, spread
from timed_runs import quiet
from transformers import AutoModelForCausalLM, LlamaConfig

from pacmr_lightning.batch import PairBatch
from pacmr_lightning.datamodules.cached_values import CPU_BATCH_TOKENS
from pacmr_lightning.policy import PolicyModel


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--prompt", type=int, default=20)
    parser.add_argument("--response", type=int, default=60)
    parser.add_argument("--turns", type=int, default=3, help="parts of the pairs, each by both sides")
    options = parser.parse_args()
    quiet()
    print(describe())
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(Path(folder))
        policy = PolicyModel(folder, rank=1, dtype="float32")
        policy.build(announce=False)
    tokens = options.prompt + 2 * options.response
    batches = [_random(max(1, CPU_BATCH_TOKENS // tokens), options, seed) for seed in range(options.turns)]
    policy.rows(batches[0])  # the self-check
    per_turn = options.pairs // options.turns // len(batches[0].ids)
    middle, all_layers = [], []
    for batch in batches:
        middle.append(_seconds(lambda batch=batch: policy.reference_states(batch), per_turn))
        rows = policy.rows(batch)
        every = lambda rows=rows: policy.model.base_model(**policy._inputs(rows), output_hidden_states=True)  # noqa: E731
        all_layers.append(_seconds(every, per_turn))
    pairs = per_turn * len(batches[0].ids)
    whole = options.pairs / pairs
    print(f"{options.pairs:,} pairs of {options.prompt} + 2 x {options.response} tokens, seconds:")
    print(f"  up to the middle layer {spread([whole * s for s in middle])}")
    print(f"  all layers             {spread([whole * s for s in all_layers])}")
    print(f"  ratio                  {spread([a / b for a, b in zip(middle, all_layers, strict=True)])}")


def _random(pairs: int, options: argparse.Namespace, seed: int) -> PairBatch:
    random = torch.Generator().manual_seed(seed)
    parts = [
        torch.randint(2, 49152, (pairs, length), generator=random).tolist()
        for length in (options.prompt, options.response, options.response)
    ]
    return PairBatch.collate([str(i) for i in range(pairs)], *parts)


@torch.no_grad()
def _seconds(run: object, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        run()  # type: ignore[operator]
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
