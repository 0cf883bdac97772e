"""PolicyModel: what is trained, how it computes log-probabilities, and what it generates."""

from __future__ import annotations

from typing import Any, Literal

import torch
from peft import LoraConfig
from torch import Tensor
from transformers import GenerationConfig

from ..batch import LogProbs, PairBatch
from ..errors import UserError
from ..freed_memory import return_freed_memory
from ..numerics import AskedDtype, base_dtype, numerics, recomputes
from .attention import FLEX, AskedLayout, AttentionPlan, check_attention, plain_attention, use_attention
from .new_adapter import OVERRULED, check_keys
from .quantized import AskedQuantization, check_quantization, quantized_numerics
from .rows import Rows, rows_of
from .scoring import Judged, ScoringModel
from .selfcheck import choose_plan

OWN_KEYS = OVERRULED | {
    "r": "set the option rank instead",
    "lora_alpha": "set the option alpha instead",
    "target_modules": "set the option target_modules, beside lora_options, instead",
    "lora_dropout": "dropout is always off; leave it out",
    "layer_replication": "the reference has the model's own layers; leave it out",
}
"""Keys of ``peft.LoraConfig`` that ``lora_options`` may not have, and what to do about each."""


class PolicyModel(ScoringModel):
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
        dtype: of the frozen base; adapters are fp32 always. "bfloat16" is for GPUs, "auto" takes it on one.
        gradient_checkpointing: recompute activations in backward, for memory; "auto" does so on a GPU, but
            under ``pacmr fit`` only where a step would not fit without it.
        attn_implementation: as in transformers ("sdpa", "eager", "flash_attention_2", "flex_attention", ...);
            "auto" is transformers' own choice (sdpa) on every device. On a GPU others may be faster, which a
            line at the start names.
        layout: "shared" computes a prompt once for both responses, "separate" runs one sequence a row,
            "packed" puts the sequences into one row without padding (for FlashAttention), "auto" takes the
            attention's best one. Either is checked on a real pair first.
        logit_chunk: rows of logits (response tokens) that exist at a time.
        compile: run the layers through torch.compile. VNet's update, which works through hooks, does not.
        quantization: "4bit" keeps the base's linear layers, but the head, in 4 bits (QLoRA: NF4 with
            quantised scales), which compute in ``dtype``; the reference is that model. Needs bitsandbytes.

    Raises:
        UserError: an argument is out of its range, the attention cannot do what is asked, or a package that
            is needed is not installed.
    """

    def __init__(
        self,
        model: str,
        rank: int = 16,
        alpha: float = 32,
        target_modules: str | list[str] = "all-linear",
        lora_options: dict[str, Any] | None = None,
        dtype: AskedDtype = "float32",
        gradient_checkpointing: bool | Literal["auto"] = False,
        attn_implementation: str = "auto",
        layout: AskedLayout = "auto",
        logit_chunk: int = 512,
        compile: bool = False,
        quantization: AskedQuantization | None = None,
    ):
        if rank < 1:
            raise UserError(f"LoRA rank is {rank}, but it must be at least 1 (the paper uses 16).")
        if not alpha > 0:
            raise UserError(f"LoRA alpha is {alpha}, but it must be above 0 (the paper uses 32).")
        if logit_chunk < 1:
            raise UserError(f"logit_chunk is {logit_chunk}, but it must be at least 1.")
        kind = base_dtype(dtype)
        check_attention(attn_implementation, layout, kind)
        check_quantization(quantization)
        if quantization is not None and compile:
            raise UserError(
                "compile and quantization are both set, but no 4-bit layer has been compiled here; set one "
                "of them to its default."
            )
        check_keys("lora_options", lora_options, LoraConfig, OWN_KEYS)
        lora = {
            **(lora_options or {}),
            "r": rank,
            "lora_alpha": alpha,
            "target_modules": target_modules,
            "lora_dropout": 0.0,
            "task_type": "CAUSAL_LM",
        }
        recompute = recomputes(gradient_checkpointing)
        super().__init__(str(model), lora, kind, attn_implementation, recompute, compile, quantization)
        self.layout = layout
        self.logit_chunk = logit_chunk
        self._plan: AttentionPlan | None = None

    def rows(self, batch: PairBatch) -> Rows:
        """The batch in the token layout that the self-check chose on the first batch it saw."""
        return rows_of(self._plan_for(batch).layout, batch)

    def log_probs(self, batch: PairBatch, rows: Rows | None = None, entropies: bool = False) -> LogProbs:
        """Summed response log-probabilities of N pairs under the current model, as (N,) values in nats.

        Args:
            batch: N pairs.
            rows: what ``rows`` made of them, where it has been asked already.
            entropies: of the next token at each position of the responses too, without gradient; they cost
                one more tensor of a chunk's logits.
        """
        layout = self._plan_for(batch).layout
        return self.score(rows_of(layout, batch) if rows is None else rows, layout == "plain", entropies)

    @torch.no_grad()
    def reference_log_probs(self, batch: PairBatch) -> LogProbs:
        """Those of the batch if it brings them, else computed now with the adapter off."""
        if batch.reference is not None:
            return batch.reference
        with self.reference():
            return self.log_probs(batch)

    @torch.no_grad()
    def reference_states(self, batch: PairBatch) -> Tensor:
        """What the reference's layers hold of N pairs' responses: see ``response_states``."""
        layout = self._plan_for(batch).layout
        with self.reference():
            return self.response_states(rows_of(layout, batch))

    def log_prob_options(self, batch: PairBatch) -> dict[str, Any]:
        """What changes a log-probability beside weights and tokens; ways are tried on ``batch``."""
        plan = self._plan_for(batch)
        config = self.model.config.to_dict()
        # Where the model lies and who wrote the file changes nothing.
        ignored = ("_name_or_path", "transformers_version", "use_cache")
        return {
            "layout": plan.layout,
            "dtype": str(self.dtype),
            "attention": plan.attention,
            "compile": self.compiles,
            **quantized_numerics(self.quantization),
            **numerics(self.device),
            "config": {name: config[name] for name in sorted(config) if name not in ignored},
        }

    def judged(self, batch: PairBatch) -> Judged:
        """What held-out pairs and samples are judged by: log-probabilities of both models, and their KL.

        The reference's log-probabilities are those that the batch brings, if any.
        """
        layout = self._plan_for(batch).layout
        return self.score_both(rows_of(layout, batch), layout == "plain", batch.reference)

    def _plan_for(self, batch: PairBatch) -> AttentionPlan:
        """What the self-check chose on the first batch it saw."""
        if self._plan is None:
            if self.compiles and self.is_sharded:
                raise UserError(
                    "ZeRO-3 gathers parameters through hooks, with which no layer is compiled; set compile "
                    "to false, or use a lower stage."
                )
            self._plan = choose_plan(self, batch)
        return self._plan

    @torch.no_grad()
    def generate(self, **options: Any) -> Tensor:
        """transformers' ``generate`` of the current model; returns prompt and continuation.

        Of the model's own ``generation_config`` only the special tokens count: its penalties and cut-offs are
        no part of the policy. FlexAttention, which would compile for every length, leaves this to SDPA.
        """
        was_training, own, attention = self.training, self.model.generation_config, self.attention
        special = {name: getattr(own, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        if self.attn_implementation == FLEX:
            use_attention(self.model, plain_attention(self.model))
        if self.model.device.type == "cpu":
            return_freed_memory()
        self.eval()
        self.model.generation_config = GenerationConfig(**special)
        try:
            return self.peft.generate(**options, use_cache=True)
        finally:
            use_attention(self.model, attention)
            self.model.generation_config = own
            self.train(was_training)
