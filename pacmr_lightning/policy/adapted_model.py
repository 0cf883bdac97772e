"""A base model with a LoRA adapter that can be switched off: two models, policy and reference, in one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_info
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from ..batch import PairBatch
from ..ranks import max_over_ranks
from ..strategies.sharding import is_sharded
from .attention import exclude_cudnn
from .base_model import (
    adapter_chain,
    check_same,
    compared_tokens,
    load_base,
    next_token_log_probs,
    recompute_activations,
    weights_digest,
)
from .combined_adapter import save_with_bases
from .compiled import compile_layers
from .lora import check_hooked, check_lora, lora_linears
from .new_adapter import add_lora
from .quantized import AskedQuantization


class AdaptedModel(nn.Module):
    """The frozen base and its adapter, and what the method and a strategy need to know of them.

    Args:
        name: folder or Hub id of the base.
        lora: keys of ``peft.LoraConfig``.
        dtype: of the base; adapters are fp32.
        attn_implementation: as in transformers, or "auto" for its own choice.
        gradient_checkpointing: recompute activations in backward.
        compile: run the layers through torch.compile.
        quantization: of the base's linear layers.
    """

    def __init__(
        self,
        name: str,
        lora: dict[str, Any],
        dtype: torch.dtype,
        attn_implementation: str,
        gradient_checkpointing: bool,
        compile: bool,
        quantization: AskedQuantization | None = None,
    ):
        super().__init__()
        self.name = name
        self.lora = lora
        self.dtype = dtype
        self.attn_implementation = attn_implementation
        self.gradient_checkpointing = gradient_checkpointing
        self.compiles = compile
        self.quantization = quantization
        self.has_stepped = False
        """Set after this process's first optimizer step, when the device's peak memory is that of a step."""
        self.left_free: int | None = None
        """Bytes of a GPU that such a step left free, where VNet's updates need to know."""
        self.keeps_gradients: bool | None = None
        """The last decision on each pair's gradient that was printed."""
        self._digest: str | None = None

    def build(self, announce: bool = True, pair: PairBatch | None = None) -> None:
        """Load the base and add the adapter. Does nothing the second time.

        Args:
            announce: print which model is the reference, and what of the policy is trained.
            pair: a batch whose first pair the reference is compared on with the model as named; without one
                merged adapters alone are compared, on other tokens.

        Raises:
            UserError: the model cannot be loaded, or the LoRA options are not plain LoRA.
        """
        if hasattr(self, "peft"):
            return
        exclude_cudnn()
        asked = None if self.attn_implementation == "auto" else self.attn_implementation
        base = load_base(self.name, self.dtype, asked, self.quantization, pair)
        base.requires_grad_(False)
        base.config.use_cache = False
        expected = None
        if pair is not None and not is_sharded(next(base.parameters())):
            tokens = compared_tokens(base, pair)
            expected = next_token_log_probs(base, tokens)
        self.peft = add_lora(base, self.lora, "lora_options")
        check_lora(self.peft)
        # Dicts, not submodules: the modules are registered in self.peft already.
        self._linears = lora_linears(self)
        self._lora_layers = {
            name: layer for name, layer in self.model.named_modules() if isinstance(layer, LoraLayer)
        }
        if expected is not None:
            with self.reference():
                found = next_token_log_probs(self.model, tokens)
            check_same(expected, found, f"The reference made of {self.name}", f"{self.name} itself")
        chain = adapter_chain(self.name)
        if len(chain) > 1:
            self.peft.save_pretrained = partial(  # type: ignore[method-assign]
                save_with_bases, self.peft, chain
            )
        if self.gradient_checkpointing:
            recompute_activations(self.model)
        if self.compiles:
            compile_layers(self.model)
        self.train()
        if not announce:
            return
        trained = sum(parameter.numel() for parameter in self.adapter().values())
        # A 4-bit layer's weight has half as many bytes as parameters, which transformers knows.
        total = base.num_parameters()
        rank_zero_info(
            f"Reference: {self.name} without adapter; policy: the same with LoRA r={self.lora['r']}, "
            f"{trained:,} trained of {total:,} parameters."
        )

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model, with LoRA layers inside."""
        return cast("PreTrainedModel", self.peft.get_base_model())

    @property
    def device(self) -> torch.device:
        """Where the adapter is, and so where batches have to be."""
        return next(iter(self.adapter().values())).device

    @property
    def attention(self) -> str:
        """The attention implementation that the model uses now."""
        return self.model.config._attn_implementation

    def lora_linears(self) -> dict[str, nn.Linear]:
        """The A and B linears of every LoRA layer by parameter name (omega is their weights)."""
        return self._linears

    def check_hooked(self) -> None:
        """Check that hooks on the adapter's linears see all that it does; see ``lora.check_hooked``.

        Raises:
            UnhookedLoraError: they do not.
        """
        check_hooked(self._lora_layers)

    def adapter(self) -> dict[str, nn.Parameter]:
        """The trainable parameters omega by name."""
        # torch annotates a linear's weight as any tensor.
        return {name: linear.weight for name, linear in self._linears.items()}  # type: ignore[misc]

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, the model is the reference: the same weights with the adapter off."""
        # What peft's own disable_adapter does, without its walk through all modules on every step.
        for layer in self._lora_layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._lora_layers.values():
                layer.enable_adapters(True)

    @property
    def is_sharded(self) -> bool:
        """Whether ZeRO-3 keeps the parameters in parts: a forward pass then needs all ranks."""
        return any(is_sharded(parameter) for parameter in self.parameters())

    def in_step(self, parts: Iterable[PairBatch], filler: PairBatch) -> Iterator[tuple[PairBatch, bool]]:
        """This rank's micro-batches, and whether each counts.

        Where a forward pass needs all ranks, those with fewer micro-batches than others go on with
        ``filler``, which does not count.
        """
        parts = list(parts)
        rounds = len(parts)
        if self.is_sharded:
            rounds = max_over_ranks(rounds, filler.input_ids.device)
        yield from ((part, True) for part in parts)
        yield from ((filler, False) for _ in range(rounds - len(parts)))

    def reference_digest(self) -> str:
        """A hash of the reference's frozen weights, computed once; the adapter is no part of it."""
        if self._digest is None:
            self._digest = weights_digest(self.model)
        return self._digest
