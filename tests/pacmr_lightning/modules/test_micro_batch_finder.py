"""micro_batch_size and gradient_checkpointing auto: tried on a GPU; its allocator alone is simulated."""

import weakref
from pathlib import Path

import pytest
import torch
import yaml
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from pacmr_lightning import cli
from pacmr_lightning.errors import UserError
from pacmr_lightning.modules import micro_batch_finder as finder
from pacmr_lightning.modules import preference
from pacmr_lightning.modules.micro_batch_finder import RAN_OUT, Way, first_that_fits, peak_bytes
from pacmr_lightning.policy import PolicyModel, model

from ...conftest import fails, files, short_fit, write_lines

CPU = torch.device("cpu")
GIB = 2**30
TOTAL = 100 * GIB


class Gpu:
    """A GPU's memory: a layer with gradient takes ``GiB`` per row, less if it is recomputed."""

    def __init__(self, patch):
        self.per_row = 0.0
        self.peak = 0
        self.tried: list[tuple[int, object]] = []
        numbers = {"mem_get_info": lambda device: (TOTAL, TOTAL), "memory_reserved": lambda device: 0}
        numbers |= {"memory_allocated": lambda device: 0, "max_memory_allocated": lambda device: self.peak}
        numbers |= {"reset_peak_memory_stats": self.reset, "empty_cache": lambda: None}
        for name, value in numbers.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(preference, "can_be_tried", lambda device: True)
        patch.setattr(model, "recomputes", lambda asked: asked == "auto" or asked)  # "auto" starts recomputed
        choose = model.choose_plan
        patch.setattr(model, "choose_plan", lambda *of: self.unwatched(choose, *of))
        self.watches = True

    def unwatched(self, check, *of):
        """The self-check of a layout, whose passes are not of a step."""
        self.watches = False
        try:
            return check(*of)
        finally:
            self.watches = True

    def reset(self, device) -> None:
        self.peak = 0

    def hook(self, module, inputs) -> None:
        of_step = self.watches and torch.is_grad_enabled()
        if not of_step or not isinstance(module, GradientCheckpointingLayer):
            return
        recomputed = module.gradient_checkpointing
        if recomputed and "context_fn" in module._gradient_checkpointing_func.keywords:
            recomputed = "selective"
        self.tried.append((inputs[0].shape[0], recomputed))
        share = {False: 1, "selective": 0.6, True: 0.1}[recomputed]
        needed = int(inputs[0].shape[0] * self.per_row * share * GIB)
        if needed > TOTAL:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")
        self.peak = max(self.peak, needed)


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu(monkeypatch)
    handle = register_module_forward_pre_hook(made.hook)
    yield made
    handle.remove()


@pytest.fixture
def fit(tiny_llama, inside, monkeypatch, pair_rows, caplog):
    """Runs a fit of 8 pairs per update with both options auto; returns its config, adapter and words."""
    monkeypatch.setattr(finder, "BUSY", 1)
    tiny_llama("model", num_hidden_layers=2)
    write_lines(inside / "pairs.jsonl", pair_rows(40, augmented_prompt="Again: what is the best of books?"))

    def run(folder, *more, method="dpo"):
        words = f"""{files("pairs.jsonl")} --config methods/{method}
            --data.global_batch_size 8 --data.meta_batch_size 8
            --model.micro_batch_size auto --model.policy.gradient_checkpointing auto --trainer.max_steps 2
            --model.learning_rate 1e-3 --trainer.callbacks RunSummary --trainer.default_root_dir {folder}"""
        caplog.clear()
        cli.main([*short_fit("model", words), *more])
        options = yaml.safe_load(Path(folder, "config.yaml").read_text())["model"]["init_args"]
        state = torch.load(Path(folder, "checkpoints", "last.ckpt"), weights_only=True)["state_dict"]
        said = [line for line in caplog.text.splitlines() if "auto is" in line and "dtype" not in line]
        return options, state, said

    return run


def choice(options) -> tuple[int, object]:
    return options["micro_batch_size"], options["policy"]["init_args"]["gradient_checkpointing"]


@pytest.mark.parametrize(
    ("method", "per_row", "expected", "peak"),
    [
        ("dpo", 12, (4, False), 48),  # 8 take 96 of 100 GiB, which leaves too little
        ("dpo", 110, (1, "selective"), 66),  # even one is too large with kept activations
        ("dpo", 950, (1, True), 95),  # the last way may fill the GPU
        ("pacmr", 30, (2, False), 60),
    ],
)
def test_a_fit_takes_what_fits(method, per_row, expected, peak, gpu, fit):
    """The command trains with what it chose, on the same GPU; the adapter is that of a fit told so."""
    gpu.per_row = per_row
    more = ["--model.weighting.every", "1"] if method == "pacmr" else []
    options, found, said = fit("tried", *more, method=method)
    assert choice(options) == expected
    (line,) = said
    size, recomputed = expected
    assert line.endswith(
        f"micro_batch_size auto is {size} and gradient_checkpointing auto is {str(recomputed).lower()}: a "
        f"step with the longest rows took {peak:.3g} of the GPU's 100 GiB (measured); overrule by "
        "--model.micro_batch_size and --model.policy.gradient_checkpointing."
    )
    sizes = [8, 4, 2, 1]
    ways = [(n, recomputed) for recomputed in (False, "selective", True) for n in sizes]
    assert list(dict.fromkeys(gpu.tried)) == ways[: ways.index(expected) + 1]
    if per_row not in (30, 110):
        return
    given = ["--model.micro_batch_size", str(size), "--model.policy.gradient_checkpointing", str(recomputed)]
    _, same, silent = fit("given", *more, *given, method=method)
    assert not silent
    torch.testing.assert_close(found, same, rtol=0, atol=0)


def test_only_what_was_asked_for_is_tried(gpu, fit, monkeypatch):
    gpu.per_row = 40
    options, _, (said,) = fit("size", "--model.policy.gradient_checkpointing", "true")
    assert choice(options) == (8, True) and "gradient_checkpointing" not in said
    options, _, (said,) = fit("way", "--model.micro_batch_size", "4")
    assert choice(options) == (4, True) and "micro_batch_size" not in said
    tokens = ["--model.micro_batch_size", "null", "--model.micro_batch_tokens", "90"]
    assert choice(fit("tokens", *tokens)[0]) == (None, False)
    # A GPU that waits for Python gains nothing by kept activations.
    monkeypatch.setattr(finder, "BUSY", 4096)
    assert choice(fit("run")[0]) == (8, True)


def test_nothing_fits(gpu, fit, capsys, tmp_path):
    gpu.per_row = 2000
    words = "--model.micro_batch_size auto --trainer.default_root_dir run --data.global_batch_size 8"
    said = fails(capsys, short_fit("model", f"{files('pairs.jsonl')} {words}"))
    assert "Out of memory: 1 of the longest rows in one forward pass do not fit into the GPU's 100" in said
    assert "set gradient_checkpointing to true" in said and not Path("run").exists()


def test_a_resumed_fit_keeps_the_choice(gpu, fit):
    gpu.per_row = 40
    fit("run")
    gpu.per_row, gpu.tried = 1, []
    options, _, (said,) = fit("run", "--trainer.max_steps", "4", "--ckpt_path", "last")
    assert choice(options) == (2, False) and set(gpu.tried) == {(2, False)}
    assert "micro_batch_size auto is 2 and gradient_checkpointing auto is false: the checkpoint's" in said


def test_the_default_without_a_gpu(fit):
    options, _, (said,) = fit("run", "--data.global_batch_size", "6")
    assert choice(options) == (2, False)
    assert "micro_batch_size auto is 2" in said and "the default without a GPU" in said


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "Triton Error [CUDA]: out of memory",
        "The size of tensor a (3) must match the size of tensor b (4)",
    ],
)
def test_memory_that_runs_out(said, gpu):
    """It is free again, although the error's traceback holds the step's frames, and these its tensors."""
    left = []

    def step():
        tensor = torch.zeros(3)
        left.append(weakref.ref(tensor))
        cycle = [tensor]
        cycle.append(cycle)
        raise RuntimeError(said)

    if "must match" in said:
        with pytest.raises(RuntimeError, match="must match"):
            peak_bytes(step, CPU)
    else:
        assert peak_bytes(step, CPU) == RAN_OUT and left[0]() is None


def test_parts_of_a_model_are_tried_up_to_what_one_pair_shows(gpu):
    """Under ZeRO-3 a rank without memory would leave the others waiting in the middle of a pass."""
    ways = [Way(n, True) for n in (8, 4, 2, 1)]
    tried = []

    def step(way, per_pair):
        tried.append(way.size)
        gpu.peak = way.size * per_pair * GIB

    for per_pair, sizes in ((10, [1, 8]), (20, [1, 4]), (60, [1, 1]), (95, [1, 1])):
        tried.clear()
        found = first_that_fits(ways, lambda way, p=per_pair: step(way, p), CPU, sharded=True)
        assert tried == sizes and found.way.size == sizes[-1]


def test_a_model_that_cannot_recompute(tiny_llama, tmp_path, monkeypatch):
    tiny_llama(tmp_path)
    monkeypatch.setattr(LlamaForCausalLM, "supports_gradient_checkpointing", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    policy = PolicyModel(str(tmp_path), gradient_checkpointing="auto", dtype="float32")
    policy.build()
    assert not policy.gradient_checkpointing and not policy.asks_gradient_checkpointing
    with pytest.raises(UserError, match="LlamaForCausalLM cannot recompute activations"):
        PolicyModel(str(tmp_path), gradient_checkpointing=True).build()
