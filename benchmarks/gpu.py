"""DPO and PACMR-DPO steps on one GPU by attention and token layout, against TRL: time, arithmetic, memory.

    python benchmarks/gpu.py --output gpu/ [--sizes 0.5B 1.5B 3B 7B] [--micro-batch 8]

(with the extra ``bench`` for TRL) makes random Llamas of Qwen2.5's shapes, bf16, with LoRA on all linear
layers, and trains each contestant with PreferenceModule in a process of its own: DPO, of which the first
steps are not counted, then PACMR-DPO over two VNet periods with 70% of the meta pairs confident, of which the
second is counted. The reference is cached for all. ``--device cpu --sizes tiny`` shows that it runs.

Tokens count a prompt once for both responses, for every contestant, and so does the arithmetic that the step
needs (``flops.needed``); its share of what the device reaches on one large bf16 matrix product is the model
FLOP utilisation. Peak memory is what torch had allocated at most during the steps, model included.

Writes ``gpu.md`` and ``gpu.json`` after every contestant, so that a run that stops leaves what it found.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is on the Hub; TRL would report its use

import torch
import transformers
from flops import needed
from lightning.fabric.utilities import move_data_to_device
from machine import describe, in_fresh_process, median_time, spread
from pacmr_step import PinnedCoverage
from timed_runs import Shape, make_data, quiet, random_rows, train, write_rows, write_tokenizer
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig

from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.weighting import GhostDotProduct, VNetWeighting

COLUMNS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES = {
    "tiny": (64, 160, 2, 4, 2, 512, True),
    "0.5B": (896, 4864, 24, 14, 2, 151_936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "3B": (2048, 11_008, 36, 16, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
}
"""Qwen2.5's: the columns, heads of keys and values, vocabulary, and whether the head is the embeddings."""
EVERY, META_PAIRS, CONFIDENT = 10, 64, 0.7
WARM_UP = 4
"""Steps in which kernels are compiled and chosen: batches differ in length."""

CONTESTANTS: dict[str, dict[str, Any]] = {
    "flex, shared prompts": {"attn_implementation": "flex_attention", "layout": "shared"},
    "flex, shared prompts, compiled": {
        "attn_implementation": "flex_attention",
        "layout": "shared",
        "compile": True,
    },
    "flash 2, packed": {"attn_implementation": "flash_attention_2", "layout": "packed"},
    "sdpa, shared prompts": {"attn_implementation": "sdpa", "layout": "shared"},
    "sdpa, shared prompts, compiled": {"attn_implementation": "sdpa", "layout": "shared", "compile": True},
    "sdpa, one sequence a row": {"attn_implementation": "sdpa", "layout": "separate"},
}
ON_CPU = ("sdpa, shared prompts", "sdpa, one sequence a row")
TRL = {"TRL DPOTrainer, sdpa": "sdpa", "TRL DPOTrainer, flash 2": "flash_attention_2"}


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


def measure(folder: Path, shape: Shape, options: dict[str, Any], device: str, steps: int) -> dict[str, Any]:
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
        }
        data = make_data(folder, shape, EVERY, META_PAIRS)
        weighting = VNetWeighting(PinnedCoverage(CONFIDENT), GhostDotProduct(), every=EVERY)
        reset_peak(device)
        seconds = train(policy, data, shape, 2 * EVERY, weighting=weighting, device=device)
        return found | {"pacmr_seconds": seconds[EVERY:], "pacmr_peak": peak(device)}
    except Exception as error:  # out of memory, not installed, refused: others go on
        return {"error": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"}


def measure_trl(folder: Path, shape: Shape, attention: str, device: str, steps: int) -> dict[str, Any]:
    """The same of TRL's DPO."""
    quiet()
    transformers.logging.set_verbosity_error()
    try:
        from trl_step import Clock, make_trl  # the extra ``bench``

        rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
        trainer = make_trl(folder, rows, shape, {}, device, WARM_UP + steps)
        trainer.model.get_base_model().set_attn_implementation(attention)
        clock = Clock(device)
        trainer.add_callback(clock)
        trainer.remove_callback(transformers.PrinterCallback)
        reset_peak(device)
        trainer.train()
        return {"dpo_seconds": clock.seconds[WARM_UP:], "dpo_peak": peak(device)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"}


def table_of(size: str, found: dict[str, dict[str, Any]], shape: Shape, product: float) -> str:
    """Markdown."""
    known = next((result for result in found.values() if "needed" in result), {})
    tokens, work = known.get("tokens", 0), known.get("needed", 0.0)
    times = [statistics.median(found[n]["dpo_seconds"]) for n in TRL if "dpo_seconds" in found.get(n, {})]
    trl = min(times, default=float("nan"))
    lines = [
        f"## {size}: {known.get('parameters', 0):,} parameters; {shape.pairs} pairs, {tokens:,} tokens",
        "",
        "| | DPO, s a step | tokens/s | MFU | GiB | TRL's time over it | PACMR-DPO, s with VNet's | mean of "
        f"{EVERY} steps | over DPO's | GiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, result in found.items():
        if "error" in result:
            lines.append(f"| {name} | {result['error']} |" + " |" * 8)
            continue
        step = statistics.median(result["dpo_seconds"])
        cells = [
            name if result.get("as_asked", True) else f"{name}: fell back to {result['way']}",
            spread(result["dpo_seconds"]),
            f"{tokens / step:,.0f}",
            f"{work / step / product:.1%}",
            _gib(result["dpo_peak"]),
            f"{trl / step:.2f}",
        ]
        if "pacmr_seconds" in result:
            with_vnet, mean = result["pacmr_seconds"][0], statistics.mean(result["pacmr_seconds"])
            cells += [f"{with_vnet:.3g}", f"{mean:.3g}", f"{mean / step:.2f}", _gib(result["pacmr_peak"])]
        lines.append("| " + " | ".join(cells) + " |" + " |" * (10 - len(cells)))
    return "\n".join(lines)


def _gib(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def main() -> None:
    """Measures all sizes and contestants and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for gpu.md and gpu.json")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["0.5B", "1.5B", "3B", "7B"])
    parser.add_argument("--contestants", nargs="+", choices=[*CONTESTANTS, *TRL])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--steps", type=int, default=10, help="DPO steps that are counted")
    parser.add_argument("--pairs", type=int, default=32, help="of a step")
    parser.add_argument("--micro-batch", type=int, default=8, help="pairs of a forward pass")
    parser.add_argument("--prompt", type=int, nargs=2, default=(200, 400), metavar=("MIN", "MAX"))
    parser.add_argument("--response", type=int, nargs=2, default=(25, 50), metavar=("MIN", "MAX"))
    options = parser.parse_args()
    device, dtype = options.device, "bfloat16" if options.device == "cuda" else "float32"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu --sizes tiny shows that the benchmark runs.")
    names = options.contestants or [*(CONTESTANTS if device == "cuda" else ON_CPU), *TRL]
    quiet()
    options.output.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "machine": describe(),
        "options": {name: str(value) for name, value in vars(options).items()},
        "matrix_product": in_fresh_process(fastest_product, device, dtype),
        "sizes": {},
    }
    tables: dict[str, str] = {}
    for size in options.sizes:
        shape = Shape(
            pairs=options.pairs,
            prompt=tuple(options.prompt),
            response=tuple(options.response),
            vocabulary=SIZES[size][5],
            micro_batch=options.micro_batch,
            dtype=dtype,
        )
        found: dict[str, dict[str, Any]] = {}
        report["sizes"][size] = {"pairs": asdict(shape), "contestants": found}
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            in_fresh_process(write_model, folder, size, dtype, device)
            write_rows(folder / "rows.jsonl", random_rows(2 * max(options.pairs, META_PAIRS), shape))
            for name in tqdm(names, desc=size):
                arguments = (folder, shape, TRL.get(name) or CONTESTANTS[name], device, options.steps)
                try:
                    found[name] = in_fresh_process(measure_trl if name in TRL else measure, *arguments)
                except Exception as error:  # the process was killed
                    found[name] = {"error": f"{type(error).__name__}: the process ended"}
                tables[size] = table_of(size, found, shape, report["matrix_product"])
                head = (
                    f"{report['machine']}\n\n{dtype} base; one large matrix product: "
                    f"{report['matrix_product'] / 1e12:.3g} TFLOP/s; micro-batches of {options.micro_batch}; "
                    f"prompts of {options.prompt[0]} to {options.prompt[1]} tokens, responses of "
                    f"{options.response[0]} to {options.response[1]}"
                )
                (options.output / "gpu.md").write_text("\n\n".join([head, *tables.values()]) + "\n")
                (options.output / "gpu.json").write_text(json.dumps(report, indent=2))
    print((options.output / "gpu.md").read_text())


if __name__ == "__main__":
    main()
