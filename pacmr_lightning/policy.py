"""The policy: a causal language model with a LoRA adapter; the reference is the same model without it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from . import scoring
from .attention import FLEX, AskedLayout, Way, check_attention, plain_attention, use_attention
from .base_model import load_base, recompute_activations, weights_digest
from .batch import LogProbs, PairBatch
from .compiled import compile_layers
from .errors import UserError
from .gradient import max_over_ranks
from .lora import check_lora, lora_linears
from .rows import Layout, rows_of
from .selfcheck import choose_way
from .sharding import is_sharded


class PolicyModel(nn.Module):
    """Any Hugging Face causal LM with a PEFT LoRA adapter (paper, section 5.4).

    The base weights are frozen and the adapter starts as the identity, so a fresh policy equals the
    reference. Dropout is off everywhere: the virtual step and the central difference compare forward passes
    at nearby parameters, which dropout would drown.

    Args:
        model: folder or Hub id of the base model. A PEFT adapter folder is merged into its base first, so
            that the reference is one plain model.
        rank: LoRA rank.
        alpha: LoRA alpha; the adapter's output is scaled by alpha / rank.
        target_modules: names of the linear layers that get an adapter; "all-linear" means all but the head.
        lora_options: further keys of ``peft.LoraConfig``. Variants that do not go through plain LoRA linears
            are refused, since the method moves those linears' outputs.
        dtype: of the frozen base; adapters are fp32 always. "bfloat16" is for GPUs.
        gradient_checkpointing: recompute activations in backward, for memory.
        attn_implementation: as in transformers ("sdpa", "eager", "flash_attention_2", "flex_attention", ...);
            "auto" takes flex_attention or flash_attention_2 on a GPU where they work, and transformers' own
            choice (sdpa) otherwise, after a check on a real pair, and prints it.
        layout: "shared" computes a prompt once for both responses, "separate" runs one sequence a row,
            "packed" puts the sequences into one row without padding (for FlashAttention), "auto" takes the
            attention's best one after the same check.
        logit_chunk: rows of logits (response tokens) that exist at a time.
        compile: run the layers through torch.compile. VNet's update, which works through hooks, does not.

    Raises:
        UserError: an argument is out of its range, or the attention cannot do what is asked.
    """

    def __init__(
        self,
        model: str,
        rank: int = 16,
        alpha: float = 32,
        target_modules: str | list[str] = "all-linear",
        lora_options: dict[str, Any] | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        gradient_checkpointing: bool = False,
        attn_implementation: str = "auto",
        layout: AskedLayout = "auto",
        logit_chunk: int = 512,
        compile: bool = False,
    ):
        super().__init__()
        if rank < 1:
            raise UserError(f"LoRA rank is {rank}, but it must be at least 1 (the paper uses 16).")
        if logit_chunk < 1:
            raise UserError(f"logit_chunk is {logit_chunk}, but it must be at least 1.")
        self.dtype = getattr(torch, dtype)
        check_attention(attn_implementation, layout, self.dtype)
        self.name = str(model)
        self.lora = {
            **(lora_options or {}),
            "r": rank,
            "lora_alpha": alpha,
            "target_modules": target_modules,
            "lora_dropout": 0.0,
            "task_type": "CAUSAL_LM",
        }
        self.gradient_checkpointing = gradient_checkpointing
        self.attn_implementation = attn_implementation
        self.layout = layout
        self.logit_chunk = logit_chunk
        self.compiles = compile
        self._way: Way | None = None

    def build(self) -> None:
        """Loads the base and adds the adapter. Does nothing the second time.

        Raises:
            UserError: the model cannot be loaded, or the LoRA options are not plain LoRA.
        """
        if hasattr(self, "peft"):
            return
        asked = None if self.attn_implementation == "auto" else self.attn_implementation
        base = load_base(self.name, self.dtype, asked)
        base.requires_grad_(False)
        base.config.use_cache = False
        try:
            config = LoraConfig(**self.lora)
        except TypeError as error:
            raise UserError(f"lora_options has a key that peft.LoraConfig does not know: {error}.") from None
        self.peft = get_peft_model(base, config)
        check_lora(self.peft)
        # A dict and a list, not submodules: the modules are registered in self.peft already.
        self._linears = lora_linears(self)
        self._lora_layers = [module for module in self.modules() if isinstance(module, LoraLayer)]
        if self.gradient_checkpointing:
            recompute_activations(self.model)
        if self.compiles:
            compile_layers(self.model)
        self.train()
        rank_zero_info(f"Reference: {self.name} without adapter; policy: the same with LoRA r={config.r}.")

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model, with LoRA layers inside."""
        return self.peft.get_base_model()

    @property
    def attention(self) -> str:
        """The attention implementation that the model uses now."""
        return self.model.config._attn_implementation

    def lora_linears(self) -> dict[str, nn.Linear]:
        """The A and B linears of every LoRA layer by parameter name (omega is their weights)."""
        return self._linears

    def adapter(self) -> dict[str, nn.Parameter]:
        """The trainable parameters omega by name."""
        return {name: linear.weight for name, linear in self._linears.items()}

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, the model is the reference: the same weights with the adapter off."""
        # What peft's own disable_adapter does, without its walk through all modules on every step.
        for layer in self._lora_layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._lora_layers:
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

    def log_probs(self, batch: PairBatch) -> LogProbs:
        """Summed response log-probabilities of N pairs under the current model, as (N,) values in nats."""
        return self.log_probs_in(self._way_for(batch).layout, batch)

    @torch.no_grad()
    def reference_log_probs(self, batch: PairBatch) -> LogProbs:
        """Those of the batch if it brings them, else computed now with the adapter off."""
        if batch.reference is not None:
            return batch.reference
        with self.reference():
            return self.log_probs(batch)

    def reference_digest(self) -> str:
        """A hash of the reference's weights, by name and byte; the adapter is no part of it."""
        return weights_digest(self.model)

    def log_prob_options(self, batch: PairBatch) -> dict[str, Any]:
        """What changes a log-probability beside weights and tokens; ways are tried on ``batch``."""
        way = self._way_for(batch)
        config = self.model.config.to_dict()
        # Where the model lies and who wrote the file changes nothing.
        ignored = ("_name_or_path", "transformers_version", "use_cache")
        return {
            "layout": way.layout,
            "dtype": str(self.dtype),
            "attention": way.attention,
            "compile": self.compiles,
            "config": {name: config[name] for name in sorted(config) if name not in ignored},
        }

    def token_pairs(self, batch: PairBatch) -> Tensor:
        """(R, T) number of the pair that each token belongs to, in the rows that the model gets."""
        return rows_of(self._way_for(batch).layout, batch).token_pair

    def log_probs_in(self, layout: Layout, batch: PairBatch) -> LogProbs:
        """The same in a given layout, with the attention that the model uses now."""
        return scoring.log_probs(self, rows_of(layout, batch), layout == "plain")

    @torch.no_grad()
    def judged(self, batch: PairBatch) -> tuple[LogProbs, LogProbs, Tensor]:
        """What held-out pairs are judged by: log-probabilities of both models, and the KL between them.

        Returns:
            See ``scoring.judged``; the reference's are those that the batch brings, if any.
        """
        layout = self._way_for(batch).layout
        return scoring.judged(self, rows_of(layout, batch), layout == "plain", batch.reference)

    def _way_for(self, batch: PairBatch) -> Way:
        """What the self-check chose on the first batch it saw."""
        if self._way is None:
            if self.compiles and self.is_sharded:
                raise UserError(
                    "ZeRO-3 gathers parameters through hooks, with which no layer is compiled; set compile "
                    "to false, or use a lower stage."
                )
            self._way = choose_way(self, batch)
        return self._way

    @torch.no_grad()
    def generate(self, **options: Any) -> Tensor:
        """transformers' ``generate`` of the current model; returns prompt and continuation.

        Of the model's own ``generation_config`` only the special tokens count: its penalties and cut-offs are
        no part of the policy. FlexAttention, which would compile for every length, leaves this to SDPA.
        """
        was_training, own, attention = self.training, self.model.generation_config, self.attention
        special = {name: getattr(own, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        if self.attn_implementation in ("auto", FLEX):
            use_attention(self.model, plain_attention(self.model))
        self.eval()
        self.model.generation_config = GenerationConfig(**special)
        try:
            return self.peft.generate(**options, use_cache=True)
        finally:
            use_attention(self.model, attention)
            self.model.generation_config = own
            self.train(was_training)
