"""The stages of gpu_first.py: each yields names of rows, and what measures them."""

from __future__ import annotations

import contextlib
import copy
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning
import pandas as pd
import torch
import torch.nn.functional as F
import transformers
import yaml
from estimators import ESTIMATORS, call_of, exact, prepare
from flops import needed
from lightning.fabric.utilities import move_data_to_device
from machine import median_time
from pacmr_step import PinnedCoverage
from timed_runs import Shape, make_data, make_policy, quiet, random_rows, train, write_rows, write_tokenizer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from pacmr_lightning.batch import PairBatch, Segment
from pacmr_lightning.evaluation.generation import Decoding, respond
from pacmr_lightning.evaluation.prompt_batch import PromptBatch
from pacmr_lightning.meta_gradient import GhostDotProduct
from pacmr_lightning.meta_gradient import step_pairs as kept_gradients
from pacmr_lightning.objectives import DPO
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.policy import model as policy_module
from pacmr_lightning.policy.attention import shared_mask, use_attention
from pacmr_lightning.policy.rows import shared_rows
from pacmr_lightning.weighting import Unweighted, VNetWeighting
from pacmr_lightning.weighting.weighted_gradient import weighted_gradient

Row = dict[str, Any]
Measured = Iterator[tuple[str, Callable[[], Row]]]
ROOT = Path(__file__).parents[1]
LENGTHS: list[list[int]] = json.loads(Path(__file__).with_name("tldr_lengths.json").read_text())
"""Tokens of prompt, chosen and rejected of 128 random pairs of TL;DR under SmolLM2's tokenizer."""
COLUMNS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES = {
    "tiny": (64, 160, 2, 4, 2, 512, True),
    "small": (512, 1376, 4, 8, 2, 4096, False),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
}
"""Two for trying, and Qwen2.5's: the columns, key-value heads, vocabulary, whether it ties its embeddings."""


@dataclass
class Place:
    """Where a stage runs, and what it need not measure."""

    folder: Path
    """For bases, pairs, caches and runs; removed when the stage has ended."""
    device: str
    done: set[str] = field(default_factory=set)
    """Names of rows."""
    text: Path | None = None
    """Folder with ``model/`` and ``pairs.jsonl``."""

    def __post_init__(self) -> None:
        quiet()
        transformers.logging.set_verbosity_error()

    @property
    def on_gpu(self) -> bool:
        """False where tiny shapes show that the stages run."""
        return self.device == "cuda"


def machine(device: str) -> Row:
    """The card and versions, which stand in every row."""
    versions = ", ".join(f"{m.__name__} {m.__version__}" for m in (torch, transformers, lightning))
    card = torch.cuda.get_device_name() if device == "cuda" else "a CPU, tiny shapes"
    return {"machine": f"{card}; {versions}"}


def new_base(size: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """A random Llama, made on the device."""
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
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def shared_copy(base: PreTrainedModel) -> PreTrainedModel:
    """The same model with layers of its own, which adapters change, and the same weights in memory."""
    return copy.deepcopy(base, {id(p): p for p in base.parameters()})


def serve(bases: dict[torch.dtype, PreTrainedModel]) -> None:
    """Let policies have a copy of these bases, by dtype, in place of what a folder holds; none is hashed."""

    def load(name: str, dtype: torch.dtype, attention: str | None, *_: Any) -> PreTrainedModel:
        model = shared_copy(bases[dtype])
        if attention is not None:
            use_attention(model, attention)
        return model

    policy_module.load_base = load
    policy_module.weights_digest = lambda model: f"random weights in {model.dtype}"


# --- probes -----------------------------------------------------------------------------------------------


def probes(place: Place) -> Measured:
    """Ceilings of the device, and attention's kernels at new and at repeated shapes."""
    yield "matrix product", partial(matrix_product, place)
    yield "copy", partial(copied, place)
    kernels = ("CUDNN_ATTENTION", "EFFICIENT_ATTENTION") if place.on_gpu else ("FLASH_ATTENTION",)
    for kernel in (*kernels, "MATH"):
        yield f"masked attention, {kernel}", partial(masked_attention, place, getattr(SDPBackend, kernel))
    yield "packed shared prompts", partial(packed_shared_prompts, place)


def matrix_product(place: Place) -> Row:
    """Operations a second of one large bf16 product."""
    n = 8192 if place.on_gpu else 256
    a, b = (torch.randn(n, n, device=place.device, dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * n**3 / median_time(lambda: a @ b, place.device, repetitions=15, warm_up=5)
    return {"flops": rate, "says": f"{rate / 1e12:.3g} TFLOP/s in bf16"}


def copied(place: Place) -> Row:
    """Bytes a second that are read and written."""
    a = torch.zeros(2**29 if place.on_gpu else 2**20, device=place.device)
    rate = 8 * len(a) / median_time(a.clone, place.device, repetitions=10, warm_up=2)
    return {"says": f"{rate / 1e9:.3g} GB/s"}


def masked_attention(place: Place, kernel: SDPBackend) -> Row:
    """Milliseconds forward and backward of one layer, by rows x tokens: at first, and repeated."""
    heads, scale = (12, 1) if place.on_gpu else (2, 8)
    said = []
    for rows, length in product((8, 7), (512 // scale, 448 // scale)):
        q, k, v = (
            torch.randn(rows, heads, length, 128, device=place.device, dtype=torch.bfloat16).requires_grad_()
            for _ in range(3)
        )
        mask = torch.zeros(rows, 1, length, length, device=place.device, dtype=torch.bfloat16)

        def step(inputs: tuple[Tensor, ...] = (q, k, v), mask: Tensor = mask) -> None:
            with sdpa_kernel(kernel):
                out = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
            torch.autograd.grad(out.sum(), inputs)

        first = 1e3 * median_time(step, place.device, repetitions=1, warm_up=0)
        again = 1e3 * median_time(step, place.device)
        said.append(f"{rows} x {length}: {first:.3g}, then {again:.3g}")
    return {"says": "ms at first, and again: " + "; ".join(said)}


def looped_attention(q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor) -> Tensor:
    """What ``varlen_attn`` computes, a sequence at a time: the last query sees all keys of its sequence."""
    found = []
    for (a, b), (c, d) in zip(ends_q.unfold(0, 2, 1).tolist(), ends_k.unfold(0, 2, 1).tolist(), strict=True):
        mask = torch.ones(b - a, d - c, dtype=torch.bool, device=q.device).tril(d - c - (b - a))
        heads = (part.transpose(0, 1)[None] for part in (q[a:b], k[c:d], v[c:d]))
        found.append(F.scaled_dot_product_attention(*heads, attn_mask=mask)[0].transpose(0, 1))
    return torch.cat(found)


def packed_shared_prompts(place: Place) -> Row:
    """Three sequences a pair without padding (``varlen_attn``; on a CPU a loop) against the masked rows."""
    lengths = LENGTHS[:8] if place.on_gpu else [[n // 16 + 1 for n in pair] for pair in LENGTHS[:3]]
    dtype, heads, size = (torch.bfloat16, 12, 128) if place.on_gpu else (torch.float64, 2, 16)
    columns = [[[2] * n for n in column] for column in zip(*lengths, strict=True)]
    batch = PairBatch.collate([str(i) for i in range(len(lengths))], *columns)
    rows = shared_rows(move_data_to_device(batch, place.device))
    mask = shared_mask(rows, LlamaConfig(attn_implementation="sdpa"), dtype)
    real = rows.segment_ids != Segment.PAD
    places, start = [], 0
    for p, c, r in lengths:
        prompt, end = range(start, start + p), start + p + c
        places += [*prompt, *prompt, *range(start + p, end), *prompt, *range(end, end + r)]
        start = end + r
    gathered = torch.tensor(places, device=place.device)
    queries = torch.tensor(lengths, device=place.device)
    keys = queries + torch.tensor([0, 1, 1], device=place.device) * queries[:, :1]
    ends = [F.pad(n.flatten().cumsum(0), (1, 0)).int() for n in (queries, keys)]
    torch.manual_seed(0)
    inputs = [
        torch.randn(start, heads, size, dtype=dtype, device=place.device, requires_grad=True) for _ in "qkv"
    ]

    def masked() -> Tensor:
        padded = [
            x.new_zeros(*real.shape, heads, size).masked_scatter(real[..., None, None], x) for x in inputs
        ]
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in padded), attn_mask=mask)
        return out.transpose(1, 2)[real]

    def packed() -> Tensor:
        q, k, v = inputs[0], inputs[1][gathered], inputs[2][gathered]
        if not place.on_gpu:
            return looped_attention(q, k, v, *ends)
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(q, k, v, *ends, int(queries.max()), int(keys.max()), window_size=(-1, 0))

    values, said = [], []
    for way in (masked, packed):
        out = way()
        gradients = torch.autograd.grad(out.square().sum(), inputs)
        values.append(torch.cat([x.detach().double().flatten() for x in (out, *gradients)]))
        took = median_time(lambda way=way: torch.autograd.grad(way().sum(), inputs), place.device)
        said.append(f"{way.__name__} {1e3 * took:.3g} ms")
    error = float((values[1] - values[0]).norm() / values[0].norm())
    right = error <= (2e-2 if place.on_gpu else 1e-12)
    return {"right": right, "says": f"differ by {error:.1e}; {', '.join(said)}"}


# --- correctness ------------------------------------------------------------------------------------------

PLAIN = ("sdpa", "separate", False)
WAYS = (PLAIN, ("sdpa", "shared", False))
COMPILED = (("sdpa", "shared", True), ("flex_attention", "shared", False), ("flex_attention", "shared", True))
"""Attention, token layout, and whether layers are compiled."""
FLOAT32_ERROR = 1e-3
"""Accepted relative error of a gradient in fp32: sums in another order, no TF32."""
ANSWERS, ANSWER_TOKENS = 12, 24


class Correctness:
    """Ways of one 4-layer model, compared with one sequence a row in fp32."""

    shape = Shape(pairs=16, vocabulary=SIZES["small"][5], micro_batch=8)

    def __init__(self, place: Place):
        self.place = place

    @cached_property
    def folder(self) -> Path:
        """Tokenizer and pairs; policies get the base of the first call."""
        if not self.place.on_gpu:
            self.shape = replace(self.shape, prompt=(20, 40), response=(5, 10))
        base = new_base("small", torch.float32, self.place.device)
        serve({torch.float32: base, torch.bfloat16: copy.deepcopy(base).bfloat16()})
        write_tokenizer(self.place.folder, self.shape.vocabulary)
        write_rows(self.place.folder / "rows.jsonl", random_rows(64, self.shape))
        return self.place.folder

    def policy(self, dtype: str, attention: str, layout: Any, compiled: bool) -> PolicyModel:
        """One that computes so, if it can."""
        shape = replace(self.shape, dtype=dtype)
        options = {"attn_implementation": attention, "compile": compiled}
        return make_policy(self.folder, shape, layout, self.place.device, **options)

    @cache  # noqa: B019
    def update(self, dtype: str, way: tuple[str, str, bool]) -> tuple[dict[str, Tensor], str]:
        """u and the gradients of DPO and of VNet, and the way that computed them."""
        policy = self.policy(dtype, *way)
        data = make_data(self.folder, self.shape, 1, 16)
        batch = move_data_to_device(next(iter(data.train_dataloader())), self.place.device)
        batch_train = batch.train.with_reference(policy.reference_log_probs(batch.train))
        pairs = kept_gradients.StepPairs.of(policy, DPO(0.1), batch_train, self.shape.micro_batch, often=True)
        gradient = weighted_gradient(pairs, Unweighted()).gradient
        torch.manual_seed(0)
        weighting = VNetWeighting(PinnedCoverage(0.7), GhostDotProduct(clip=None))
        weighting.to(torch.device(self.place.device))
        weighting.update(pairs, batch.meta, 1e-4)
        vnet = [p.grad for p in weighting.vnet.parameters() if p.grad is not None]
        parts = {"u": [pairs.rewards.u], "DPO's gradient": gradient.values(), "VNet's": vnet}
        found = {n: torch.cat([x.detach().double().cpu().flatten() for x in v]) for n, v in parts.items()}
        plan = policy._plan
        return found, "" if (plan.attention, plan.layout) == way[:2] else f"fell back to {plan}; "

    def errors(self, dtype: str, way: tuple[str, str, bool]) -> dict[str, float]:
        """Relative distance from the plain way in fp32."""
        found, truth = self.update(dtype, way)[0], self.update("float32", PLAIN)[0]
        return {name: float((found[name] - truth[name]).norm() / truth[name].norm()) for name in truth}

    def check(self, dtype: str, way: tuple[str, str, bool]) -> Row:
        """In bf16 a way may be twice as far from the truth as the plain way in bf16."""
        errors = self.errors(dtype, way)
        allowed = dict.fromkeys(errors, FLOAT32_ERROR)
        if dtype != "float32":
            allowed = {name: 2 * error for name, error in self.errors(dtype, PLAIN).items()}
        fell_back = self.update(dtype, way)[1]
        says = fell_back + ", ".join(f"{name} off by {error:.1e}" for name, error in errors.items())
        right = not fell_back and all(errors[name] <= allowed[name] for name in errors)
        return {"right": right, "says": says, "errors": errors}

    def rows(self, ways: tuple[tuple[str, str, bool], ...]) -> Measured:
        """An update by each way and dtype."""
        for dtype, way in product(("float32", "bfloat16"), ways):
            named = f"{way[0]}, {way[1]}{', compiled' * way[2]}, {dtype}"
            yield f"update: {named}", partial(self.check, dtype, way)

    def estimators(self, dtype: str) -> Row:
        """Relative errors of c against float64, d_meta of length 1; the ghost is held to the kept graph's."""
        policy, batch, direction = prepare(str(self.folder), dtype, self.place.device, 8)
        truth = exact(policy, batch, direction)
        errors = {
            name: float((call_of(name, policy, batch, direction)().double() - truth).norm() / truth.norm())
            for name in ESTIMATORS
        }
        right = errors["ghost dot-product"] <= max(FLOAT32_ERROR, 2 * errors["graph retained"])
        return {"right": right, "says": ", ".join(f"{name} {error:.1e}" for name, error in errors.items())}

    def generation(self) -> Row:
        """Greedy answers in fp32 of a batch of prompts of many lengths, against each prompt's alone."""
        policy = self.policy("float32", "sdpa", "auto", False).eval()
        data = make_data(self.folder, self.shape)
        step = 15 if self.place.on_gpu else 1
        rows = data.train_pairs.rows[:ANSWERS]
        prompts = [ids[: 5 + step * i] for i, ids in enumerate(rows["prompt_ids"])]

        def answers(places: list[int]) -> list[str]:
            texts = [data.tokenizer.decode(prompts[i]) for i in places]
            tokens = [prompts[i] for i in places]
            batch = PromptBatch.collate(
                list(map(str, places)), texts, tokens, pad_id=data.tokenizer.pad_token_id
            )
            batch = move_data_to_device(batch, self.place.device)
            return [a.text for a in respond(policy, data.tokenizer, batch, ANSWER_TOKENS, Decoding())]

        together = answers(list(range(ANSWERS)))
        same = sum(answers([i]) == [together[i]] for i in range(ANSWERS))
        # Rounding may decide between two tokens of a random model.
        return {"right": same >= ANSWERS - 1, "says": f"{same} of {ANSWERS} answers are the same in a batch"}


def correct(place: Place) -> Measured:
    """Gradients, estimators and generation in this process, and whole runs in others beside it."""
    runs = Runs(place)
    ways = Correctness(place)
    yield from ways.rows(WAYS)
    for dtype in ("float32", "bfloat16"):
        yield f"estimators: {dtype}", partial(ways.estimators, dtype)
    yield "generation", ways.generation
    for name in RUNS:
        yield f"run: {name}", lambda name=name: runs.started[name].result()


STEPS, HALF = 6, 3
ZERO_ERROR = 0.05
"""Accepted relative difference of what is trained: ZeRO's AdamW is another kernel, the base may be bf16."""
RUNS = {
    "fit": "",
    "again": "fit",
    **{f"ZeRO-{stage}": "fit" for stage in (1, 2, 3)},
    "audit": "fit",
    "resumed": "fit",
    "ZeRO-2 resumed": "ZeRO-2",
}
"""Whole runs, and the run that each is compared with or starts from."""


class Runs:
    """``pacmr fit`` and ``pacmr audit`` of a small model, started at once unless all are done."""

    def __init__(self, place: Place):
        self.place, self.root = place, place.folder / "runs"
        size = "small" if place.on_gpu else "tiny"
        self.shape = Shape(prompt=(40, 80), response=(10, 20), vocabulary=SIZES[size][5])
        self.started: dict[str, Future[Row]] = {}
        self._slots = threading.Semaphore(5 if place.on_gpu else 1)
        if all(f"run: {name}" in place.done for name in RUNS):
            return
        new_base(size, torch.float32, "cpu").save_pretrained(self.root / "model")
        write_tokenizer(self.root / "model", self.shape.vocabulary)
        write_rows(self.root / "short.jsonl", random_rows(64, self.shape))
        pool = ThreadPoolExecutor(len(RUNS))
        for name in RUNS:
            self.started[name] = pool.submit(self._run, name, RUNS[name])

    def _run(self, name: str, whole: str) -> Row:
        zero = ["--config", f"strategies/zero{name[5]}"] if name.startswith("ZeRO") else []
        if name == "audit":
            self.started[whole].result()
            self._pacmr("audit", whole, "--scorer", "policy", "--output", name)
            pairs = pd.read_parquet(self.root / name / "pairs.parquet")
            return {"right": bool(pairs["u"].notna().all()), "says": f"{len(pairs)} pairs"}
        if name.endswith("resumed"):
            self.started[whole].result()
            zero += ["--ckpt_path", f"{whole}/checkpoints/step-{HALF}.ckpt"]
        self._fit(name, *zero)
        if name == "fit":
            return {"says": f"{STEPS} updates"}
        self.started[whole].result()
        error = self._difference(name, whole)
        if name == "again":  # no error where kernels add in any order
            return {"says": f"differs by {error:.1e} from the same run"}
        allowed = ZERO_ERROR
        if name == "resumed":
            self.started["again"].result()
            allowed = 2 * self._difference("again", whole)
        return {"right": error <= allowed, "says": f"differs by {error:.1e} from {whole}"}

    def _fit(self, name: str, *more: str) -> None:
        accelerator = "gpu" if self.place.on_gpu else "cpu"
        words = f"""--config preference --config methods/pacmr {" ".join(more)}
            --data.source.train short.jsonl --data.max_length 100 --data.global_batch_size 8
            --data.meta_batch_size 16 --model.policy.model model --model.learning_rate 1e-3
            --model.weighting.every 2 --model.max_new_tokens 16 --trainer.max_epochs -1
            --trainer.max_steps {STEPS} --trainer.val_check_interval {STEPS}
            --trainer.check_val_every_n_epoch null --trainer.log_every_n_steps 2 --trainer.devices 1
            --trainer.accelerator {accelerator} --trainer.default_root_dir {name.replace(" ", "-")}
            --checkpoint.every_n_train_steps {HALF} --checkpoint.save_top_k -1"""
        self._pacmr("fit", *words.split())

    def _pacmr(self, *words: str) -> None:
        with self._slots:
            pacmr(self.root, *words)

    def _difference(self, name: str, other: str) -> float:
        def trained(run: str) -> Tensor:
            folder = self.root / run.replace(" ", "-")
            checkpoint = torch.load(folder / "checkpoints/last.ckpt", map_location="cpu")
            parts = [*checkpoint["state_dict"].values(), *checkpoint["weighting"]["vnet"].values()]
            return torch.cat([value.double().flatten() for value in parts])

        a, b = trained(name), trained(other)
        return float((a - b).norm() / b.norm())


def pacmr(folder: Path, *words: str) -> str:
    """Run a command in a folder; returns what it printed.

    Raises:
        RuntimeError: it fails.
    """
    command = [sys.executable, "-m", "pacmr_lightning", *words]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if found.returncode:
        said = (found.stderr.strip() or found.stdout.strip()).splitlines() or [""]
        raise RuntimeError(f"pacmr {words[0]} ended with status {found.returncode}: {said[-1]}")
    return found.stdout


# --- speed ------------------------------------------------------------------------------------------------

MICRO_BATCH, PAIRS, META_PAIRS, COUNTED = 8, 32, 64, 3


class Speed:
    """Ours and TRL on one base in this process, with the same rows, in turns."""

    def __init__(self, place: Place, size: str):
        self.place, self.size = place, size if place.on_gpu else "tiny"
        self.dtype = "bfloat16" if place.on_gpu else "float32"
        lengths = LENGTHS if place.on_gpu else [[n // 24 + 2 for n in pair] for pair in LENGTHS]
        self.shape = Shape(
            pairs=PAIRS,
            prompt=(1, max(prompt for prompt, *_ in lengths)),
            response=(1, max(max(responses) for _, *responses in lengths)),
            vocabulary=SIZES[self.size][5],
            micro_batch=MICRO_BATCH,
            dtype=self.dtype,
        )
        self.pairs = random_rows(len(lengths), self.shape, lengths=lengths)

    @cached_property
    def base(self) -> PreTrainedModel:
        """One for all, whose weights are shared; the folder gets tokenizer and pairs."""
        # Of neither contestant: it may plan anew for every shape, which the stage probes measures.
        torch.backends.cuda.enable_cudnn_sdp(False)
        write_tokenizer(self.place.folder, self.shape.vocabulary)
        write_rows(self.place.folder / "rows.jsonl", self.pairs)
        made = new_base(self.size, getattr(torch, self.dtype), self.place.device)
        serve({made.dtype: made})
        return made

    @cache  # noqa: B019
    def policy(self, **options: Any) -> PolicyModel:
        """Ours."""
        assert self.base is not None
        options = {"attn_implementation": "sdpa", **options}
        return make_policy(self.place.folder, self.shape, "shared", self.place.device, **options)

    @cache  # noqa: B019
    def trainer(self, recomputed: bool) -> Any:
        """TRL's, with bf16 autocast on a GPU, SDPA and a precomputed reference."""
        import trl.trainer.dpo_trainer
        from trl_step import Clock, make_trl  # the extra ``bench``

        trl.trainer.dpo_trainer.hash_module = lambda model: "random weights"
        options = {"bf16": self.place.on_gpu, "gradient_checkpointing": recomputed}
        model = shared_copy(self.base)
        steps = 1 + COUNTED
        made = make_trl(
            self.place.folder, self.pairs, self.shape, {}, self.place.device, steps, model=model, **options
        )
        made.remove_callback(transformers.PrinterCallback)
        made.add_callback(Clock(self.place.device))
        return made

    def train(self, policy: PolicyModel, every: int | None, steps: int, **options: Any) -> Row:
        """Seconds of our updates, all of them, and GiB that torch had allocated at most."""
        data = make_data(self.place.folder, self.shape, every, META_PAIRS)
        run = partial(train, policy, data, self.shape, steps, device=self.place.device, **options)
        seconds, peak = self.peak(run)
        return {"updates": seconds, "peak": peak}

    def ours(self, **options: Any) -> Row:
        """A turn of DPO: its first update is not counted."""
        policy = self.policy(**options)
        found = self.train(policy, None, 1 + COUNTED)
        batch = make_data(self.place.folder, self.shape).train_pairs.batch(range(len(self.pairs)))
        share = PAIRS / len(self.pairs)
        found |= {"updates": found["updates"][1:], "way": str(policy._plan)}
        return found | {"tokens": share * batch.token_count, "needed": share * needed(policy, batch)}

    def trl(self, recomputed: bool) -> Row:
        """A turn of TRL's DPO: its first update is not counted."""
        from trl_step import Clock

        trainer = self.trainer(recomputed)
        (clock,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, Clock))
        _, peak = self.peak(trainer.train)
        # Each call wraps the model's forward in autocast, the next one again.
        trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
        return {"updates": clock.seconds[-COUNTED:], "peak": peak}

    def with_vnet(self, kept: bool) -> Row:
        """PACMR-DPO with VNet's update at every second; the first two updates are not counted."""
        weighting = VNetWeighting(PinnedCoverage(0.7), GhostDotProduct(), every=2)
        kept_gradients._affordable = lambda *_: kept
        policy = self.policy(gradient_checkpointing=True)
        found = self.train(policy, 2, 6, weighting=weighting)
        seconds = found.pop("updates")[2:]
        return found | {"vnet": seconds[::2], "plain": seconds[1::2]}

    def profiled(self) -> Row:
        """The kernels that two of our updates spend most time in, of which the first warms up."""
        kind = "self_device_time_total" if self.place.on_gpu else "self_cpu_time_total"
        policy = self.policy(gradient_checkpointing=True)
        with torch.profiler.profile() as profile:
            self.train(policy, None, 2)
        averages = profile.key_averages()
        time = {event.key: getattr(event, kind) for event in averages}
        largest = sorted(time, key=time.__getitem__, reverse=True)[:12]
        total = sum(time.values())
        return {"says": "; ".join(f"{time[key] / total:.0%} {key[:60]}" for key in largest)}

    def peak(self, run: Callable[[], Any]) -> tuple[Any, float | None]:
        """What a call returns, and GiB that torch had allocated at most; a CPU's are not counted."""
        if not self.place.on_gpu:
            return run(), None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return run(), torch.cuda.max_memory_allocated() / 2**30


def speed(place: Place, size: str) -> Measured:
    """DPO of ours and of TRL in turns, and PACMR-DPO; activations recomputed, then kept."""
    of = Speed(place, size)

    def turns(number: int, recomputed: bool) -> Measured:
        named = "recomputed" if recomputed else "activations kept"
        yield f"ours, {named}, turn {number}", partial(of.ours, gradient_checkpointing=recomputed)
        yield f"TRL, {named}, turn {number}", partial(of.trl, recomputed)

    yield from turns(1, True)
    yield "ghost, 70% confident, gradients kept", partial(of.with_vnet, True)
    yield from turns(2, True)
    if size == "1.5B":
        yield "ghost, 70% confident, pairs run again", partial(of.with_vnet, False)
        yield from turns(1, False)
        yield "profile", of.profiled
        yield from turns(3, True)


def compiled(place: Place) -> Measured:
    """torch.compile and FlexAttention, which may take long to compile: right, and how fast at 1.5B."""
    yield from Correctness(place).rows(COMPILED if place.on_gpu else ())
    of = Speed(place, "1.5B")
    for attention, _, compile in COMPILED if place.on_gpu else (("sdpa", "shared", False),):
        options = {"attn_implementation": attention, "compile": compile, "gradient_checkpointing": True}
        for turn in (1, 2):
            name = f"ours, recomputed; {attention}{', compiled' * compile}, turn {turn}"
            yield name, partial(of.ours, **options)


# --- real text --------------------------------------------------------------------------------------------


def text(place: Place) -> Measured:
    """DPO, PACMR-DPO and refine with three seeds on film reviews, side by side."""
    yield "sweep", partial(sweep, place)


def sweep(place: Place) -> Row:
    """The sweep of film reviews with pairs that were prepared on a CPU."""
    assert place.text is not None
    spec = yaml.safe_load((ROOT / "research/sweeps/sentiment_seeds.yaml").read_text())
    del spec["prepare"], spec["options"]["model.policy.attn_implementation"]
    spec |= {"base": ["sentiment/preference"], "output": "sweep", "anchor": "dpo"}
    spec["methods"] = {name: spec["methods"][name] for name in ("dpo", "refined", "pacmr")}
    spec["options"] |= {
        "model.policy.model": str(place.text.resolve() / "model"),
        "data.source.train": str(place.text.resolve() / "pairs.jsonl"),
        "model.policy.dtype": "auto",
    }
    if not place.on_gpu:
        spec["seeds"] = spec["seeds"][:1]
        spec["options"]["trainer.callbacks.samples"] = 8
    (place.folder / "sweep.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    with contextlib.suppress(RuntimeError):  # what has failed is found below
        pacmr(place.folder, "sweep", "sweep.yaml", "--jobs", "9" if place.on_gpu else "1")
    values: dict[str, list[list[float]]] = {}
    failed = ""
    for log in sorted((place.folder / "sweep").glob("*/log.txt")):
        summary = log.with_name("summary.json")
        if not summary.exists():
            failed += f"; {log.parent.name}: {(log.read_text().splitlines() or [''])[-1]}"
            continue
        metrics = json.loads(summary.read_text())["metrics"]
        found = [metrics["val/gold_reward"], metrics["val/sequence_kl"]]
        values.setdefault(log.parent.name.partition("-")[0], []).append(found)
    said = [f"{name}: {', '.join(f'{r:.2f} ({kl:.1f})' for r, kl in v)}" for name, v in values.items()]
    if not values:
        raise RuntimeError(f"no run of the sweep was done{failed}")
    return {"right": not failed, "says": f"reward (KL) by seed: {'; '.join(said)}{failed}", "values": values}


STAGES: dict[str, Callable[[Place], Measured]] = {
    "probes": probes,
    "correct": correct,
    "1.5B": partial(speed, size="1.5B"),
    "7B": partial(speed, size="7B"),
    "compiled": compiled,
    "text": text,
}
