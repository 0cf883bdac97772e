"""Estimate of a run's memory: storages are counted on fake tensors, under transformers' own code."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from ..errors import UserError, first_line
from ..meta_gradient.step_pairs import affordable
from ..policy import PolicyModel
from ..policy.attention import is_flash
from ..policy.base_model import adapter_chain, recompute_activations
from ..policy.chunked_log_probs import token_log_probs, upcast
from ..policy.mixed_precision_lora import BF16, LoraDtype, compute_in_base_dtype
from ..policy.token_layout import PROMPT_ONCE

GIB = 2**30
FP32 = 4
GPU_FREE = 78.0
"""GiB that are free on a GPU of 80 GB."""
FREE = 0.9
"""Share of a device's free memory that a step may be estimated to take; not everything is counted."""
LIVE = 10**9
"""Parameters that DeepSpeed keeps gathered at ZeRO-3 (default of stage3_max_live_parameters)."""
COUNTED = (2, 4)
"""Numbers of layers whose activations are counted, where all are equal."""
BUSY = 4096
"""Tokens of a forward pass with fewer of which an H100 waits for Python (measured at 1.5B parameters)."""
BUCKET = 50_000_000
"""Numbers in a gradient buffer: ``reduce_bucket_size`` of the strategies in configs/."""


@dataclass
class DeviceMemory:
    """Bytes of one process at the peak of a step, by use."""

    base: float
    gathered: float
    """Parameters of other processes, at ZeRO-3."""
    adapter: float
    """Whole, with ZeRO's own copy of a part of it."""
    optimizer: float
    gradients: float
    """Tensors of the adapter's size: gradients, directions, the virtual step's copy."""
    buffers: float
    activations: float
    """Saved for backward, with the logits."""
    host: float = 0.0
    """In the host's memory, under ZeRO's offloading."""

    @property
    def device(self) -> float:
        """Total on the device."""
        return sum(value for name, value in vars(self).items() if name != "host")


def model_config(model: str) -> PretrainedConfig:
    """Return a model's configuration, without its weights; ``llama-2-7b`` needs no files."""
    if model == "llama-2-7b" and not Path(model).exists():
        return LlamaConfig()  # its defaults are this model's
    try:
        return AutoConfig.from_pretrained(adapter_chain(model)[-1])
    except (OSError, ValueError) as error:
        raise UserError(f"The configuration of {model} cannot be read: {first_line(error)}.") from None


def build(
    config: PretrainedConfig,
    rank: int,
    target_modules: str | list[str],
    dtype: torch.dtype,
    lora_compute_dtype: LoraDtype = "base",
) -> PeftModel:
    """Return the policy as ``PolicyModel`` makes it, on the meta device."""
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=dtype)
        base.requires_grad_(False)
        base.config.use_cache = False
        lora = LoraConfig(r=rank, target_modules=target_modules, lora_dropout=0.0, task_type="CAUSAL_LM")
        policy = get_peft_model(base, lora)
    if lora_compute_dtype == "base" and dtype == BF16:
        compute_in_base_dtype(layer for layer in policy.modules() if isinstance(layer, LoraLayer))
    return policy


def four_bit_base(config: PretrainedConfig, dtype: torch.dtype) -> tuple[int, int]:
    """Return bytes of a base in 4 bits by bitsandbytes, and of its largest such weight when unpacked.

    All linear layers but the head are in 4 bits: two weights share a byte, 64 have a scale of a byte, and 256
    scales one of 4 bytes. A layer also has its scales' mean and both codes' tables (16 and 256 numbers).
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    kept = get_keys_to_not_convert(model)
    packed = {
        f"{name}.weight"
        for name, layer in model.named_modules()
        if (type(layer) is nn.Linear or isinstance(layer, Conv1D)) and should_convert_module(name, kept)
    }
    total = largest = 0
    for name, p in model.named_parameters():
        if name not in packed:
            total += p.numel() * p.element_size()
            continue
        scales = -(-p.numel() // 64)
        total += -(-p.numel() // 2) + scales + FP32 * (-(-scales // 256) + 1 + 16 + 256)
        largest = max(largest, p.numel() * p.element_size())
    return total, largest


def held(
    policy: PeftModel,
    stage: Literal[0, 1, 2, 3],
    devices: int,
    activations: float,
    *,
    vnet: bool = True,
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
    base: float | None = None,
    kept: int = 0,
) -> DeviceMemory:
    """Return the memory of each of ``devices`` processes, at ZeRO's ``stage`` (0 for DDP).

    ``activations`` are those of a micro-batch, ``base`` bytes that replace the frozen parameters' and
    ``kept`` the pairs whose gradients VNet's update keeps. ``offload_optimizer`` moves AdamW's state and
    ZeRO's copy of the adapter to the host, ``offload_parameters`` also the parts of the base (stage 3).
    """
    frozen = [p for p in policy.parameters() if not p.requires_grad]
    base = float(sum(p.numel() * p.element_size() for p in frozen)) if base is None else float(base)
    adapter = float(FP32 * sum(p.numel() for p in policy.parameters() if p.requires_grad))
    part = 1 / devices
    found = DeviceMemory(
        base=base,
        gathered=0,
        adapter=adapter,
        optimizer=2 * adapter,
        # Gradients of two micro-batches, and their sum; with VNet the virtual step's direction, and the moved
        # copy of the adapter, or its shift.
        gradients=(5 + kept if vnet else 3) * adapter,
        buffers=adapter if devices > 1 else 0,
        activations=activations,
    )
    if stage == 0:
        return found
    # Each process uses the whole adapter and has an fp32 copy of its part, which AdamW steps.
    found.adapter += part * adapter
    found.optimizer *= part
    found.gradients += adapter if stage == 1 else part * adapter
    # Below stage 3 a second buffer is filled during sending.
    found.buffers = FP32 * BUCKET * (1 if stage == 3 else 2)
    if stage == 3:
        elements, largest = sum(p.numel() for p in frozen), max(p.numel() for p in frozen)
        alive = min(elements, LIVE + largest) / elements
        found.base *= part
        found.gathered = base * (alive if offload_parameters else max(0.0, alive - alive * part))
        found.adapter += part * adapter
    if offload_optimizer:
        found.host += devices * (found.optimizer + 2 * part * adapter)
        found.adapter -= part * adapter
        found.gradients -= part * adapter
        found.optimizer = 0
    if offload_parameters:
        found.host += devices * (found.base + part * adapter)
        found.adapter -= part * adapter
        found.base = 0
    return found


def decided(
    policy: PeftModel,
    stage: Literal[0, 1, 2, 3],
    devices: int,
    activations: Mapping[bool, float],
    pairs: int,
    free: float,
    **options: Any,
) -> tuple[DeviceMemory, bool, int]:
    """Return a step's memory on a GPU as a run decides on it.

    Args:
        policy: see ``held``.
        stage: see ``held``.
        devices: see ``held``.
        activations: bytes by whether they are recomputed; with both, it is decided.
        pairs: of an update, on each device.
        free: bytes on a device before the run.
        options: others of ``held``.

    Returns:
        The memory, whether activations are recomputed, and how many pairs' gradients a VNet update keeps.
    """
    for recomputed in sorted(activations):
        found = held(policy, stage, devices, activations[recomputed], **options)
        if found.device <= FREE * free:
            break
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    keeps = options.get("vnet", True) and stage < 3 and affordable(pairs, trained, free - found.device)
    kept = pairs if keeps else 0
    return held(policy, stage, devices, activations[recomputed], **options, kept=kept), recomputed, kept


def computes_prompt_once(policy: PolicyModel) -> bool:
    """Return whether both responses share one prompt; with FlashAttention, auto is packed."""
    return policy.layout in PROMPT_ONCE and not is_flash(policy.attn_implementation)


def ways_to_step(share: int, tokens: int, recompute: bool | Literal["auto"]) -> list[tuple[int, bool]]:
    """Return pairs of a micro-batch and whether to recompute, in the order that a run on a GPU tries.

    ``share`` is a device's pairs of an update, ``tokens`` those of a pair with both responses. With
    ``recompute`` "auto", activations are kept only in passes of at least ``BUSY`` tokens or all pairs.
    """
    sizes = [n for n in range(share, 0, -1) if share % n == 0]
    if recompute != "auto":
        return [(n, recompute) for n in sizes]
    return [*((n, False) for n in sizes if n == share or n * tokens >= BUSY), *((n, True) for n in sizes)]


def step_bytes(
    policy: PolicyModel,
    pairs: int,
    prompt_tokens: int,
    response_tokens: int,
    devices: int,
    zero: Mapping[str, Any] | None = None,
    recomputed: bool = False,
) -> float:
    """Return bytes of an unbuilt policy's step on each device.

    ``zero`` is DeepSpeed's ``zero_optimization``; None for a single device or DDP.
    """
    config = model_config(policy.name)
    lora = policy.lora["r"], policy.lora["target_modules"]
    model = build(config, *lora, policy.dtype, policy.lora_compute_dtype)
    base, unpacked = four_bit_base(config, policy.dtype) if policy.quantization else (None, 0)
    activations = activation_bytes(
        model,
        pairs=pairs,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        shared=computes_prompt_once(policy),
        gradient_checkpointing=recomputed,
        logit_chunk=policy.logit_chunk,
    )
    zero = zero or {}
    parts = {
        name: (zero.get(key) or {}).get("device", "none") != "none"
        for name, key in (("offload_optimizer", "offload_optimizer"), ("offload_parameters", "offload_param"))
    }
    return held(model, zero.get("stage", 0), devices, activations + unpacked, base=base, **parts).device


def sft_step_bytes(
    model: PreTrainedModel | PeftModel,
    *,
    rows: int,
    tokens: int,
    responses: int,
    devices: int,
    mixed: torch.dtype | None,
) -> float:
    """Bytes that a step of supervised fine-tuning holds on each device if no activations are recomputed.

    Args:
        model: on the meta device; all weights that require a gradient are trained. It cannot be used again.
        rows: of a batch.
        tokens: of each row.
        responses: tokens of each row that have a loss.
        devices: number of processes; one, or DDP's.
        mixed: dtype of the trainer's mixed precision, if it has one.
    """
    model.train()
    with FakeTensorMode():
        _replace_by_fake(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        inputs = torch.zeros(rows, tokens, dtype=torch.long)
        predicted = torch.zeros(rows * responses, dtype=torch.long)

        def step() -> None:
            with torch.autocast("cpu", mixed, enabled=mixed is not None):
                out = model(input_ids=inputs, attention_mask=torch.ones_like(inputs), use_cache=False)
                logits = upcast(out.logits[predicted, predicted])
                del out
                loss = cross_entropy(logits, predicted, reduction="none").sum()
            torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])

        activations = _peak(model, step)
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    # AdamW's two moments, accumulated gradients, and the buffer of their exchange.
    return held + (4 if devices > 1 else 3) * FP32 * sum(p.numel() for p in trained) + activations


def activation_bytes(
    policy: PeftModel,
    *,
    pairs: int,
    prompt_tokens: int,
    response_tokens: int,
    shared: bool,
    gradient_checkpointing: bool,
    logit_chunk: int,
) -> int:
    """Return the peak of one micro-batch's forward and backward pass, its gradient included.

    Allocators round up and keep some more. Attention counts as a kernel that keeps inputs, output and mask
    (FlashAttention and others), not the scores. ``shared`` is one row per pair, else two.
    """
    model = cast(PreTrainedModel, policy.get_base_model())
    recompute_activations(model, gradient_checkpointing)
    policy.train()
    with FakeTensorMode():
        _replace_by_fake(policy)
        pieces = -(-2 * pairs * response_tokens // logit_chunk)

        def step() -> None:
            values = response_values(model, pairs, prompt_tokens, response_tokens, shared, shared, pieces)
            torch.autograd.grad(values.sum(), [p for p in policy.parameters() if p.requires_grad])

        return _peak(policy, step)


def _peak(model: nn.Module, step: Callable[[], None]) -> int:
    """Bytes that a step makes at its peak; of many equal layers two numbers of them are counted.

    The peak then grows by the same bytes with each layer.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    shapes = {tuple((p.shape, p.dtype, p.requires_grad) for p in layer.parameters()) for layer in layers}
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and list(m) == layers]

    def counted() -> int:
        with LiveBytes(model) as live:
            step()
        return live.peak

    few, some = COUNTED
    if len(stacks) != 1 or len(shapes) != 1 or len(layers) <= some:
        return counted()
    del stacks[0][some:]
    more = counted()
    del stacks[0][few:]
    less = counted()
    stacks[0].extend(layers[few:])
    return more + (len(layers) - some) * (more - less) // (some - few)


def response_values(
    model: PreTrainedModel,
    pairs: int,
    prompt_tokens: int,
    response_tokens: int,
    shared: bool,
    full_mask: bool,
    pieces: int = 1,
) -> Tensor:
    """Return log-probabilities of the response tokens of dummy pairs; ``full_mask`` is row by row."""
    rows, length = pairs, prompt_tokens + 2 * response_tokens
    if not shared:
        rows, length = 2 * pairs, prompt_tokens + response_tokens
    tokens = torch.zeros(rows, length, dtype=torch.long)
    predicted = torch.zeros(2 * pairs * response_tokens, dtype=torch.long)
    mask = torch.zeros(rows, 1, length, length, dtype=model.dtype) if full_mask else torch.ones_like(tokens)
    inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": tokens}
    states = model.base_model(**inputs, use_cache=False).last_hidden_state[predicted, predicted]
    # Not called as a module: torch's flop counter cannot take a gradient inside its module hooks.
    head = model.get_output_embeddings().forward
    return token_log_probs(states, head, predicted, pieces, frozen=True)


class LiveBytes(TorchDispatchMode):
    """Mode that counts the bytes of all storages that operations make: alive ``now``, and their ``peak``."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.now = self.peak = 0
        kept = [*module.parameters(), *module.buffers()]
        self._known: dict[int, Any] = {t.untyped_storage()._cdata: t for t in kept}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def freed(_: Any) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


def _replace_by_fake(module: nn.Module) -> None:
    """Replace meta tensors by fake CPU ones; for meta ones attention has only a wasteful kernel."""
    made: dict[int, nn.Parameter] = {}  # tied ones stay tied
    for part in module.modules():
        for name, p in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if id(p) not in made:
                made[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype), p.requires_grad)
            setattr(part, name, made[id(p)])
        for name, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(part, name, torch.empty(buffer.shape, dtype=buffer.dtype))
