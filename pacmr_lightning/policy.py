"""The policy: a causal language model with a LoRA adapter; the reference is the same model without it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from .batch import LogProbs, PairBatch
from .errors import UserError
from .gradient import max_over_ranks
from .logprobs import Rows, attention_mask, separate_rows, shared_rows, token_log_probs, upcast
from .lora import check_lora, lora_linears
from .selfcheck import choose_layout
from .sharding import is_sharded, whole

Layout = Literal["auto", "shared", "separate"]


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
        attn_implementation: as in transformers ("sdpa", "eager", "flash_attention_2", ...).
        layout: "shared" computes a prompt once for both responses, "separate" runs one sequence a row,
            "auto" takes the shared one after a check on a real pair that the model honours its mask.
        logit_chunk: rows of logits (response tokens) that exist at a time.
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
        attn_implementation: str = "sdpa",
        layout: Layout = "auto",
        logit_chunk: int = 512,
    ):
        super().__init__()
        if rank < 1:
            raise UserError(f"LoRA rank is {rank}, but it must be at least 1 (the paper uses 16).")
        if logit_chunk < 1:
            raise UserError(f"logit_chunk is {logit_chunk}, but it must be at least 1.")
        self.name = str(model)
        self.lora = {
            **(lora_options or {}),
            "r": rank,
            "lora_alpha": alpha,
            "target_modules": target_modules,
            "lora_dropout": 0.0,
            "task_type": "CAUSAL_LM",
        }
        self.dtype = getattr(torch, dtype)
        self.gradient_checkpointing = gradient_checkpointing
        self.attn_implementation = attn_implementation
        self.layout = layout
        self.logit_chunk = logit_chunk
        self._chosen_layout: Literal["shared", "separate", "plain"] | None = None

    def build(self) -> None:
        """Loads the base and adds the adapter. Does nothing the second time.

        Raises:
            UserError: the model cannot be loaded, or the LoRA options are not plain LoRA.
        """
        if hasattr(self, "peft"):
            return
        base = self._load_base()
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
        self._trains_head = any(p.requires_grad for p in self.model.get_output_embeddings().parameters())
        if self.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.train()
        rank_zero_info(f"Reference: {self.name} without adapter; policy: the same with LoRA r={config.r}.")

    def _load_base(self) -> PreTrainedModel:
        folder = Path(self.name)
        looks_local = self.name.startswith((".", "/", "~")) or self.name.count("/") > 1
        if looks_local and not folder.is_dir():
            raise UserError(f"The model folder {self.name} does not exist; run SFT first or name another.")
        options: dict[str, Any] = {"dtype": self.dtype, "attn_implementation": self.attn_implementation}
        try:
            if (folder / "adapter_config.json").exists():
                rank_zero_info(f"Merging the adapter {self.name} into its base to get the reference.")
                return AutoPeftModelForCausalLM.from_pretrained(self.name, **options).merge_and_unload()
            config = AutoConfig.from_pretrained(self.name)
            for key, value in config.to_dict().items():
                if isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
                    setattr(config, key, 0.0)
            return AutoModelForCausalLM.from_pretrained(self.name, config=config, **options)
        except (OSError, ImportError) as error:
            first_line = str(error).strip().splitlines()[0]
            if self.attn_implementation != "sdpa" and isinstance(error, ImportError):
                first_line = f"{first_line.rstrip('.')}; or set attn_implementation to sdpa."
            raise UserError(f"The model {self.name} cannot be loaded: {first_line}") from None

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model, with LoRA layers inside."""
        return self.peft.get_base_model()

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
        return self.log_probs_in(self._layout_for(batch), batch)

    @torch.no_grad()
    def reference_log_probs(self, batch: PairBatch) -> LogProbs:
        """Those of the batch if it brings them, else computed now with the adapter off."""
        if batch.reference is not None:
            return batch.reference
        with self.reference():
            return self.log_probs(batch)

    def reference_digest(self) -> str:
        """A hash of the reference's weights, by name and byte; the adapter is no part of it."""
        digest = hashlib.sha256()
        with torch.no_grad():
            for name, value in self.model.state_dict(keep_vars=True).items():
                if "lora_" in name:
                    continue
                with whole([value]):
                    digest.update(
                        name.encode() + str(value.dtype).encode() + str(tuple(value.shape)).encode()
                    )
                    digest.update(value.contiguous().cpu().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    def log_prob_options(self, batch: PairBatch) -> dict[str, Any]:
        """What changes a log-probability beside weights and tokens; a layout is tried on ``batch``."""
        config = self.model.config.to_dict()
        # Where the model lies and who wrote the file changes nothing.
        ignored = ("_name_or_path", "transformers_version", "use_cache")
        return {
            "layout": self._layout_for(batch),
            "dtype": str(self.dtype),
            "attention": self.attn_implementation,
            "config": {name: config[name] for name in sorted(config) if name not in ignored},
        }

    def log_probs_in(self, layout: Literal["shared", "separate", "plain"], batch: PairBatch) -> LogProbs:
        """The same in a given layout; "plain" is "separate" with the model's own, whole logits."""
        rows = shared_rows(batch) if layout == "shared" else separate_rows(batch)
        states, head = self._predictions(layout, rows)
        frozen = layout != "plain" and not self._trains_head
        return rows.log_probs(token_log_probs(states, head, rows.targets, self._pieces(rows), frozen))

    @torch.no_grad()
    def judged(self, batch: PairBatch) -> tuple[LogProbs, LogProbs, Tensor]:
        """What held-out pairs are judged by, from one forward pass of the policy and one of the reference.

        Returns:
            Summed response log-probabilities of N pairs under the policy and under the reference (those that
            the batch brings, if any), in nats, and the (N,) KL(pi || pi_ref) of the next token in nats,
            averaged over the pair's response positions.
        """
        layout = self._layout_for(batch)
        rows = shared_rows(batch) if layout == "shared" else separate_rows(batch)
        states, head = self._predictions(layout, rows)
        with self.reference():
            states_reference, _ = self._predictions(layout, rows)
        parts = []
        pieces = self._pieces(rows)
        for h, h_reference, target in zip(
            *(x.tensor_split(pieces) for x in (states, states_reference, rows.targets)), strict=True
        ):
            log_p = upcast(head(h)).log_softmax(1)
            with self.reference():
                log_q = upcast(head(h_reference)).log_softmax(1)
            chosen = (log.gather(1, target[:, None])[:, 0] for log in (log_p, log_q))
            parts.append(torch.stack([*chosen, (log_p.exp() * (log_p - log_q)).sum(1)]))
        tokens_p, tokens_q, tokens_kl = torch.cat(parts, dim=1)
        pair = rows.owner % rows.pairs
        sums = tokens_kl.new_zeros(rows.pairs).index_add(0, pair, tokens_kl)
        kl = sums / torch.bincount(pair, minlength=rows.pairs)
        return rows.log_probs(tokens_p), batch.reference or rows.log_probs(tokens_q), kl

    def _pieces(self, rows: Rows) -> int:
        """How often the head is asked; as often on every rank where it is gathered each time."""
        pieces = -(-len(rows.targets) // self.logit_chunk)
        return max_over_ranks(pieces, rows.targets.device) if self.is_sharded else pieces

    def _layout_for(self, batch: PairBatch) -> Literal["shared", "separate", "plain"]:
        """The layout that the self-check chose on the first batch it saw."""
        if self._chosen_layout is None:
            self._chosen_layout = choose_layout(self, batch)
        return self._chosen_layout

    def _inputs(self, rows: Rows) -> dict[str, Any]:
        mask = attention_mask(rows, self.model.config, self.model.dtype)
        return {"input_ids": rows.input_ids, "attention_mask": mask, "position_ids": rows.position_ids}

    def _predictions(
        self, layout: Literal["shared", "separate", "plain"], rows: Rows
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """(K, H) states that predict the response tokens, and what makes logits of them."""
        if layout == "plain":
            return self.model(**self._inputs(rows), use_cache=False).logits[rows.source], nn.Identity()
        hidden = self.model.base_model(**self._inputs(rows), use_cache=False).last_hidden_state
        return hidden[rows.source], self._head

    def _head(self, hidden: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(hidden)

    @torch.no_grad()
    def generate(self, **options: Any) -> Tensor:
        """transformers' ``generate`` of the current model; returns prompt and continuation.

        Of the model's own ``generation_config`` only the special tokens count: its penalties and cut-offs are
        no part of the policy.
        """
        was_training, own = self.training, self.model.generation_config
        special = {name: getattr(own, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        self.eval()
        self.model.generation_config = GenerationConfig(**special)
        try:
            return self.peft.generate(**options, use_cache=True)
        finally:
            self.model.generation_config = own
            self.train(was_training)
