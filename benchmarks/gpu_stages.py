"""The stages of gpu_first.py: each yields names of rows, and what measures them."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch
import yaml
from end_with_parent import end_with_parent
from flops import needed
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, Trainer
from machine import describe, median_time, spread
from pacmr_step import PinnedCoverage
from timed_runs import (
    Shape,
    make_data,
    make_policy,
    quiet,
    random_rows,
    train,
    write_model,
    write_rows,
    write_tokenizer,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from pacmr_lightning.meta_gradient import GhostDotProduct
from pacmr_lightning.meta_gradient.step_pairs import StepPairs
from pacmr_lightning.modules.micro_batch_finder import fit_pairs
from pacmr_lightning.objectives import DPO
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.policy import model as policy_module
from pacmr_lightning.policy.attention import use_attention
from pacmr_lightning.policy.numerics import Recomputed
from pacmr_lightning.policy.packed_attention import VARLEN
from pacmr_lightning.weighting import Unweighted, VNetWeighting
from pacmr_lightning.weighting.algorithm_1 import weighted_gradient

MICRO_BATCH = 8
Row = dict[str, Any]
Measured = Iterator[tuple[str, Callable[[], Row]]]
Place = Namespace
"""The options of gpu_first.py; ``folder`` is for what a stage writes, and is removed when it has ended."""
ROOT = Path(__file__).parents[1]
LENGTHS: list[list[int]] = json.loads(Path(__file__).with_name("tldr_lengths.json").read_text())
"""Tokens of prompt, chosen and rejected of 128 random pairs of TL;DR under SmolLM2's tokenizer."""
SHORT = [[n // 24 + 2 for n in pair] for pair in LENGTHS]
"""For a CPU."""
COLUMNS = """hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
vocab_size tie_word_embeddings"""
SIZES = {
    "tiny": (64, 160, 2, 4, 2, 512, True),
    "small": (512, 1376, 4, 8, 2, 4096, False),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
}
"""Two for trying, and Qwen2.5's."""
PLAIN, SHARED, PACKED = "sdpa, separate", "sdpa, shared", "auto, shared"
HALF_LORA, BOTH = f"{SHARED}, LoRA in bf16", f"{PACKED}, LoRA in bf16"
COMPILED, SELECTIVE = f"{BOTH}, compiled", f"{BOTH}, selective"
"""Ways to compute: attention, token layout, LoRA in the base's dtype, and compiled or recomputed in part.

"auto" packs shared rows on a GPU, in half precision.
"""


def machine(place: Place) -> str:
    """Processor, card and versions; raises RuntimeError if there is no GPU."""
    quiet()
    if place.on_gpu and not torch.cuda.is_available():
        raise RuntimeError("there is no GPU; --device cpu runs tiny shapes")
    return "tiny shapes; " * (not place.on_gpu) + describe()


def measured(place: Place, measure: Callable[[], Row]) -> Row:
    """A row's measurements, and on a GPU the peak GiB that torch had allocated."""
    if not place.on_gpu:
        return measure()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return {**measure(), "peak": torch.cuda.max_memory_allocated() / 2**30}


def shared_copy(base: PreTrainedModel) -> PreTrainedModel:
    """The same model with layers of its own, which adapters change, and the same weights in memory."""
    return copy.deepcopy(base, {id(p): p for p in base.parameters()})


class Bench:
    """Random pairs of TL;DR's lengths in a folder, and policies on a random base in memory."""

    def __init__(self, place: Place, size: str, pairs: int, *dtypes: str):
        self.on_gpu, self.device, self.folder = place.on_gpu, place.device, place.folder / size
        self.folder.mkdir()
        # Of no contestant: it may plan anew for every shape.
        torch.backends.cuda.enable_cudnn_sdp(False)
        columns = dict(zip(COLUMNS.split(), SIZES[size], strict=True))
        # AutoTokenizer would take Qwen2's own tokenizer for a Qwen2Config.
        config = LlamaConfig(**columns, pad_token_id=0, eos_token_id=1)
        torch.manual_seed(0)
        with torch.device(self.device):
            self.base = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtypes[0])).eval()
        bases = [self.base, *(copy.deepcopy(self.base).to(getattr(torch, dtype)) for dtype in dtypes[1:])]
        lengths = LENGTHS if self.on_gpu else SHORT
        prompt, *responses = (max(column) for column in zip(*lengths, strict=True))
        bounds = {"prompt": (1, prompt), "response": (1, max(responses))}
        options = {"vocabulary": config.vocab_size, "micro_batch": MICRO_BATCH, "dtype": dtypes[0]}
        self.shape = Shape(pairs, **bounds, **options)
        self.pairs = random_rows(len(lengths), self.shape, lengths=lengths)
        write_tokenizer(self.folder, config.vocab_size)
        config.save_pretrained(self.folder)  # by which a run's parameters are counted
        write_rows(self.folder / "rows.jsonl", self.pairs)

        def load(name: str, dtype: torch.dtype, attention: str | None, *_: Any) -> PreTrainedModel:
            model = shared_copy(next(base for base in bases if base.dtype == dtype))
            if attention is not None:
                use_attention(model, attention)
            return model

        policy_module.load_base = load
        policy_module.weights_digest = lambda model: f"random weights in {model.dtype}"  # none is hashed

    def policy(self, way: str, dtype: str, **options: Any) -> PolicyModel:
        """One that computes so, if it can."""
        attention, layout, *more = way.split(", ")
        options |= {"attn_implementation": attention, "compile": "compiled" in more}
        options["lora_compute_dtype"] = "base" if "LoRA in bf16" in more else "float32"
        if "selective" in more:
            options["gradient_checkpointing"] = "selective"
        return make_policy(self.folder, replace(self.shape, dtype=dtype), layout, self.device, **options)


def off(found: Tensor, truth: Tensor) -> float:
    """Relative distance."""
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def flat(tensors: Any) -> Tensor:
    """All in one vector on the CPU."""
    return torch.cat([x.detach().double().cpu().flatten() for x in tensors])


# --- probes -----------------------------------------------------------------------------------------------


def probes(place: Place) -> Measured:
    """The device's ceiling."""
    yield "matrix product", partial(matrix_product, place)


def matrix_product(place: Place) -> Row:
    """Operations per second of one large bf16 product."""
    n = 8192 if place.on_gpu else 256
    a = torch.randn(n, n, device=place.device, dtype=torch.bfloat16)
    rate = 2 * n**3 / median_time(lambda: a @ a.T, place.device, repetitions=15, warm_up=5)
    return {"flops": rate, "says": f"{rate / 1e12:.3g} TFLOP/s in bf16"}


# --- correctness ------------------------------------------------------------------------------------------

FLOAT32_ERROR = 1e-3
"""Accepted relative error of a gradient in fp32: sums in another order, no TF32."""
DTYPES = "float32", "bfloat16"


class Correctness(Bench):
    """Ways of one model, compared with one sequence a row in fp32."""

    recomputed = False

    @cache  # noqa: B019
    def update(self, dtype: str, way: str) -> tuple[dict[str, Tensor], str]:
        """u, DPO's gradient and c; and the way that computed them, if it is another one."""
        policy = self.policy(way, dtype, gradient_checkpointing=self.recomputed)
        data = make_data(self.folder, self.shape, 1, 16)
        batch = move_data_to_device(next(iter(data.train_dataloader())), self.device)
        batch_train = batch.train.with_reference(policy.reference_log_probs(batch.train))
        pairs = StepPairs(policy, DPO(0.1), batch_train, self.shape.micro_batch, keep="auto")
        inner = weighted_gradient(pairs, Unweighted())
        with policy.shifted(inner.gradient, -1e-4):
            meta = PinnedCoverage(0.7).gradient(policy, 0.1, batch.meta, self.shape.micro_batch)
        # Not VNet's gradient: a few sums of c, which come out right or wrong by chance.
        c = pairs.along(meta.d_meta)
        parts = {"u": [inner.rewards.u], "DPO's gradient": inner.gradient.values(), "c": [c]}
        plan = f"{policy._plan.attention}, {policy._plan.layout}"
        expected = f"{VARLEN}, packed" if self.on_gpu and dtype != "float32" else SHARED
        fell_back = "" if way.replace(PACKED, expected).startswith(plan) else f"fell back to {plan}; "
        return {name: flat(values) for name, values in parts.items()}, fell_back

    def check(self, dtype: str, way: str) -> Row:
        """In bf16 a way may be twice as far from the truth as the plain way in bf16."""
        truth, plain = (self.update(of, PLAIN)[0] for of in ("float32", dtype))
        found, says = self.update(dtype, way)
        errors = {name: off(found[name], truth[name]) for name in truth}
        right = not says
        for name, error in errors.items():
            right &= error <= (FLOAT32_ERROR if dtype == "float32" else 2 * off(plain[name], truth[name]))
        says += ", ".join(f"{name} off by {error:.1e}" for name, error in errors.items())
        return {"right": right, "says": says, "errors": errors}

    def rows(self, *ways: str, dtypes: tuple[str, ...] = DTYPES, of: str = "update") -> Measured:
        """An update by each way and dtype."""
        for dtype, way in product(dtypes, ways):
            yield f"{of}: {way}, {dtype}", partial(self.check, dtype, way)


def correct(place: Place) -> Measured:
    """Gradients."""
    ways = Correctness(place, "small", 16, *DTYPES)
    yield from ways.rows(PLAIN, SHARED, PACKED, HALF_LORA, BOTH)
    del ways
    deep = Correctness(place, "1.5B" if place.on_gpu else "tiny", 16, *DTYPES)
    deep.recomputed = True  # fp32 activations of 28 layers
    yield from deep.rows(PLAIN, HALF_LORA, BOTH, dtypes=DTYPES[1:], of="update at 1.5B")


def whole_runs(place: Place) -> Measured:
    """Commands in processes of their own, side by side."""
    runs = {} if all(f"run: {name}" in place.done for name in RUNS) else started_runs(place)
    for name in RUNS:
        yield f"run: {name}", lambda name=name: runs[name].result()


STEPS, HALF = 6, 3
ZERO_ERROR = 0.05
"""Accepted relative difference of what is trained: ZeRO's AdamW is another kernel, the base may be bf16."""
RUNS = {
    "fit": "",
    "again": "fit",
    **{f"ZeRO-{stage}": "fit" for stage in (3, 2, 1)},
    "audit": "fit",
    "resumed": "fit",
    "ZeRO-2 resumed": "ZeRO-2",
}
"""Whole runs, and the run that each is compared with or starts from."""


def started_runs(place: Place) -> dict[str, Future[Row]]:
    """Start ``pacmr fit`` and ``pacmr audit`` of a small model, each once the runs that it needs are done."""
    root, started = place.folder / "runs", {}
    width, layers = (512, 4) if place.on_gpu else (64, 2)
    shape = Shape(prompt=(40, 80), response=(10, 20), width=width, layers=layers, vocabulary=8 * width)
    write_model(root / "model", shape)
    write_rows(root / "short.jsonl", random_rows(64, shape))

    def trained(name: str) -> Tensor:
        checkpoint = torch.load(root / name / "checkpoints/last.ckpt", map_location="cpu")
        return flat([*checkpoint["state_dict"].values(), *checkpoint["weighting"]["vnet"].values()])

    def run(name: str, whole: str) -> Row:
        folder, more = name.replace(" ", "-"), ""
        if name == "audit":
            started[whole].result()
            pacmr(root, f"audit {whole} --scorer policy --output {folder}")
            pairs = pd.read_parquet(root / folder / "pairs.parquet")
            return {"right": bool(pairs["u"].notna().all()), "says": f"{len(pairs)} pairs"}
        if name.startswith("ZeRO"):
            more = f"--config strategies/zero{name[5]}"
        if name.endswith("resumed"):
            started[whole].result()
            more += f" --ckpt_path {whole}/checkpoints/step-{HALF}.ckpt"
        accelerator = "gpu" if place.on_gpu else "cpu"
        pacmr(
            root,
            f"""fit --config preference --config methods/pacmr {more}
            --data.source.train short.jsonl --data.max_length 100 --data.global_batch_size 8
            --data.meta_batch_size 16 --model.policy.model model --model.learning_rate 1e-3
            --model.weighting.every 2 --model.max_new_tokens 16 --trainer.max_epochs -1
            --trainer.max_steps {STEPS} --trainer.val_check_interval {STEPS}
            --trainer.check_val_every_n_epoch null --trainer.log_every_n_steps 2 --trainer.devices 1
            --trainer.accelerator {accelerator} --trainer.default_root_dir {folder}
            --checkpoint.every_n_train_steps {HALF} --checkpoint.save_top_k -1""",
        )
        if name == "fit":
            return {"says": f"{STEPS} updates"}
        started[whole].result()
        error, allowed = off(trained(folder), trained(whole)), ZERO_ERROR
        if name == "again":  # no error where kernels add in any order
            return {"says": f"differs by {error:.1e} from the same run"}
        if name == "resumed":
            started["again"].result()
            allowed = 2 * off(trained("again"), trained(whole))
        return {"right": error <= allowed, "says": f"differs by {error:.1e} from {whole}"}

    pool = ThreadPoolExecutor(len(RUNS))
    for name, whole in RUNS.items():
        started[name] = pool.submit(run, name, whole)
    return started


def pacmr(folder: Path, words: str) -> None:
    """Run a command in a folder; raises RuntimeError with what it said last if it fails."""
    command = [sys.executable, "-m", "pacmr_lightning", *words.split()]
    # Last, for the reward in examples/.
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    options = {"capture_output": True, "text": True, "preexec_fn": end_with_parent}
    options["env"] = os.environ | {"PYTHONPATH": path}
    found = subprocess.run(command, cwd=folder, **options)
    if found.returncode:
        said = " / ".join((found.stderr.strip() or found.stdout.strip()).splitlines())
        raise RuntimeError(f"pacmr {command[3]} ended with status {found.returncode}: {said[-250:]}")


# --- speed ------------------------------------------------------------------------------------------------

PAIRS, META_PAIRS, COUNTED = 32, 64, 3
SETTINGS: dict[str, tuple[Recomputed, int]] = {
    "selective, 32 at once": ("selective", 32),
    "kept, 4 at once": (False, 4),
    "kept, 8 at once": (False, 8),
    "kept, 16 at once": (False, 16),
    "kept, 32 at once": (False, 32),
}
"""Settings by name: what is recomputed of activations, and pairs of a forward pass."""


class Speed(Bench):
    """Ours and TRL on one base in this process, with the same rows, in turns."""

    @cache  # noqa: B019
    def policy_of(self, recomputed: Recomputed, way: str) -> PolicyModel:
        """Ours."""
        return self.policy(way, self.shape.dtype, gradient_checkpointing=recomputed)

    @cache  # noqa: B019
    def trainer(self, recomputed: bool, at_once: int, liger: bool) -> Any:
        """TRL's, with bf16 autocast on a GPU, SDPA and a precomputed reference; or with Liger's kernels."""
        import trl.trainer.dpo_trainer
        from trl_step import make_trl  # the extra ``bench``

        trl.trainer.dpo_trainer.hash_module = lambda model: "random weights"
        options = {"bf16": self.on_gpu, "gradient_checkpointing": recomputed, "steps": 1 + COUNTED}
        options["use_liger_kernel"] = liger
        model, shape = shared_copy(self.base), replace(self.shape, micro_batch=at_once)
        return make_trl(self.folder, self.pairs, shape, {}, self.device, model=model, **options)

    def seconds(
        self, setting: str, way: str, steps: int, every: int | None = None, **more: Any
    ) -> list[float]:
        """Seconds of our updates."""
        recomputed, at_once = SETTINGS[setting]
        data = make_data(self.folder, self.shape, every, META_PAIRS)
        shape = replace(self.shape, micro_batch=at_once)
        return train(self.policy_of(recomputed, way), data, shape, steps, device=self.device, **more)

    def ours(self, setting: str, way: str) -> Row:
        """A turn of DPO: its first update, in which code may be compiled, stands apart."""
        first, *updates = self.seconds(setting, way, 1 + COUNTED)
        policy = self.policy_of(SETTINGS[setting][0], way)
        batch = make_data(self.folder, self.shape).train_pairs.batch(range(len(self.pairs)))
        share = PAIRS / len(self.pairs)
        found = {"tokens": share * batch.token_count, "needed": share * needed(policy, batch)}
        return {"updates": updates, "way": str(policy._plan), "first": first, **found}

    def trl(self, setting: str, liger: bool = False) -> Row:
        """A turn of TRL's DPO: its first update is not counted."""
        from trl_step import trl_turn

        return {"updates": trl_turn(self.trainer(*SETTINGS[setting], liger))}

    def with_vnet(self, setting: str, way: str) -> Row:
        """PACMR-DPO with VNet's update at every second; the first two updates are not counted."""
        weighting = VNetWeighting(PinnedCoverage(0.7), GhostDotProduct(), every=2, keep_gradients=True)
        seconds = self.seconds(setting, way, 6, 2, weighting=weighting)[2:]
        vnet, plain = seconds[::2], seconds[1::2]
        says = f"{spread(plain)} s an update, {spread(vnet)} with VNet's; ten updates over DPO's "
        over = (9 * median(plain) + median(vnet)) / median(plain) / 10
        return {"vnet": vnet, "plain": plain, "says": f"{says}{over:.2f}"}

    def profiled(self, setting: str, way: str) -> Row:
        """Kernels and calls that one of our updates spends most time in, after one that is not counted."""
        one = OneUpdate()
        _, wall = self.seconds(setting, way, 2, callbacks=[one])
        events, kinds = one.profile.key_averages(), ["self_cpu_time_total"]
        kinds = ["self_device_time_total", *kinds] if self.on_gpu else kinds
        tables, said = {}, []
        for kind, on in zip(kinds, ("CUDA", "CPU") if self.on_gpu else ("CPU",), strict=True):
            own = [event for event in events if event.device_type.name == on]
            own.sort(key=lambda event, kind=kind: getattr(event, kind), reverse=True)
            total, count = sum(getattr(e, kind) for e in own) / 1e6, sum(event.count for event in own)
            tables[on] = {e.key[:120]: (getattr(e, kind) / 1e6, e.count) for e in own[:40]}
            largest = [f"{spent / total:.0%} {key[:60]}" for key, (spent, _) in tables[on].items()][:12]
            said.append(f"{on}: {count:,} calls, {total:.3g} s of {wall:.3g} s: {'; '.join(largest)}")
        return {"profile": tables, "wall": wall, "says": " | ".join(said)}

    def within(self, gigabytes: int) -> Row:
        """The micro-batch and recomputation that auto chooses in a part of the GPU's memory."""
        policy = self.policy(BOTH, self.shape.dtype, gradient_checkpointing="auto")
        pairs = make_data(self.folder, self.shape).longest_pairs(PAIRS)
        share = gigabytes * 10**9 / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(share)
        try:
            options = {"meta": False, "kept": 0}
            found = fit_pairs(policy, pairs, "auto", torch.device("cuda"), **options)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return {"says": f"{found.way.size} at once, gradient_checkpointing {found.way.recomputed}; {found}"}


class OneUpdate(Callback):
    """Profiles the second update alone."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Start with the second."""
        if trainer.global_step == 1:
            self.profile = torch.profiler.profile()
            self.profile.start()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Stop after it."""
        if trainer.global_step == 2:
            self.profile.stop()


def timed(place: Place, size: str) -> Speed:
    """Contestants of this size."""
    return Speed(place, size, PAIRS, "bfloat16") if place.on_gpu else Speed(place, "tiny", PAIRS, "float32")


def speed(place: Place, size: str) -> Measured:
    """DPO of ours, before and after each change, and PACMR-DPO."""
    small = size != "7B"
    if small and place.on_gpu:  # compiled and recomputed in part, against float32
        yield from Correctness(place, "small", 16, *DTYPES).rows(BOTH, COMPILED, SELECTIVE, dtypes=DTYPES[1:])
    of = timed(place, size)
    fits = "kept, 32 at once" if small else "kept, 16 at once"
    can_compile = place.on_gpu or shutil.which("g++")

    def ours(setting: str, way: str, turn: int = 1) -> tuple[str, Callable[[], Row]]:
        return f"ours, {setting}; {way}, turn {turn}", partial(of.ours, setting, way)

    def vnet(setting: str, way: str) -> tuple[str, Callable[[], Row]]:
        return f"PACMR-DPO, {setting}; {way}, gradients kept", partial(of.with_vnet, setting, way)

    yield ours(fits, BOTH)
    if small:
        yield f"profile of an update: {fits}; {BOTH}", partial(of.profiled, fits, BOTH)
    if can_compile:
        yield ours(fits, COMPILED)
    yield ours("selective, 32 at once", BOTH)
    yield ours(fits, BOTH, 2)
    yield vnet(fits, BOTH)
    if can_compile:
        yield ours(fits, COMPILED, 2)
        yield vnet(fits, COMPILED)
    if small and place.on_gpu:
        for gigabytes in (8, 24):
            yield f"auto in {gigabytes} GB", partial(of.within, gigabytes)


def against_trl(place: Place, size: str, liger: bool = False) -> Measured:
    """DPO of TRL with kept activations, and of ours in the same process, in turns."""
    of = timed(place, size)
    at_once = {("1.5B", False): (8, 16), ("1.5B", True): (16, 32), ("7B", False): (4,), ("7B", True): (8,)}
    fits = "kept, 16 at once" if size == "7B" else "kept, 32 at once"
    name = "TRL with Liger" if liger else "TRL"
    ours = f"ours, {fits}; {BOTH}, turn 1", partial(of.ours, fits, BOTH)
    yield ours
    for pairs in at_once[size, liger]:
        setting = f"kept, {pairs} at once"
        yield f"{name}, {setting}, turn 1", partial(of.trl, setting, liger and place.on_gpu)
    yield f"ours, {fits}; {BOTH}, turn 2", ours[1]


# --- votes of people --------------------------------------------------------------------------------------


def votes(place: Place) -> Measured:
    """Policies on single votes (``research/sweeps/vote_policies.yaml``), all methods side by side."""
    yield "sweep", partial(sweep, place)
    yield "table", partial(vote_table, place)


def sweep(place: Place) -> Row:
    """Run the cells; model and folds are in the folder that is given."""
    spec = yaml.safe_load((ROOT / "research/sweeps/vote_policies.yaml").read_text())
    for option in ("model.policy.attn_implementation", "model.micro_batch_size"):
        del spec["options"][option]
    if not place.on_gpu:
        spec["seeds"] = spec["seeds"][:1]
        spec["methods"] = {name: spec["methods"][name] for name in ("dpo", "refined")}
        spec["methods"]["dpo"]["vary"] = {"model.objective.beta": [0.1]}
        spec["options"] |= {"model.policy.dtype": "float32", "data.global_batch_size": 32}
    (place.folder / "runs/examples").mkdir(parents=True)
    (place.folder / "runs/examples/model").symlink_to(place.text.resolve() / "model")
    (place.folder / "runs/vote-policies").symlink_to(place.text.resolve() / "folds")
    (place.folder / "sweep.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    pacmr(place.folder, f"sweep sweep.yaml --jobs {8 if place.on_gpu else 1}")
    return {"says": f"{len(list((place.folder / 'runs/sweeps').rglob('summary.json')))} cells"}


def vote_table(place: Place) -> Row:
    """Accuracy, AUROC and KL of each method, and the difference from DPO at its KL."""
    sys.path.append(str(ROOT))
    from research.vote_policies import cells, summary

    os.chdir(place.folder)  # by which the cells name their files
    rows = pd.DataFrame(cells(Path("runs/sweeps/vote_policies"), Path("runs/vote-policies")))
    return {"cells": rows.to_dict("records"), "says": summary(rows).to_string(index=False)}


STAGES: dict[str, Callable[[Place], Measured]] = {
    **{"probes": probes, "correct": correct, "runs": whole_runs, "1.5B": partial(speed, size="1.5B")},
    **{"7B": partial(speed, size="7B"), "TRL-1.5B": partial(against_trl, size="1.5B")},
    **{f"Liger-{size}": partial(against_trl, size=size, liger=True) for size in ("1.5B", "7B")},
    **{"TRL-7B": partial(against_trl, size="7B"), "votes": votes},
}
