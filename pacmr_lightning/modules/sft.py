"""Supervised fine-tuning of the reference model for preference training."""

import copy
import inspect
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities import rank_zero_info
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import get_total_norm
from torchmetrics import MeanMetric
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import UserError, check_is
from ..files import check_writable, expanded, local_path, replacing
from ..policy.attention import exclude_cudnn
from ..policy.base_model import check_savable, load_base, plain_model, recompute_activations, weights_digest
from ..policy.chat_template import stop_at_end_tokens
from ..policy.chunked_log_probs import upcast
from ..policy.hub_access import locate, pretrained
from ..policy.lora import SFT_KEYS, add_lora, check_keys, other_parts
from ..policy.merged_adapters import KEPT, check_mergeable, merge_rounded
from ..policy.numerics import AskedDtype, base_dtype, check_weights
from ..policy.positions import choose_by_row
from ..waiting import waiting
from .base import TrainedOnly, check_finite
from .resumed_options import OPTIMIZER, check_options, flat_options, is_fitting, trainer_options
from .schedule import datamodule, log_short_run

IGNORED = -100
"""Label of tokens without loss, as in torch."""

MEASURED = 2
"""Validation rows on which the model that is saved, and the merge of an adapter, are checked."""

LORA = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
"""Defaults of ``lora``."""

OVERRULED_LLAMA = dict.fromkeys(
    ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"), "the tokenizer sets it; leave it out"
) | {"dtype": "set the module's dtype instead"}
"""Keys of LlamaConfig that ``from_scratch`` does not take, with the remedy."""


class SFTModule(TrainedOnly):
    """Train a causal language model on completions and save it as a Hugging Face folder.

    The loss is the mean cross-entropy in nats over an update's response tokens (labels other than -100), all
    ranks and accumulated batches together. Batches are dicts of (N, L) int64 ``input_ids``,
    ``attention_mask`` and ``labels`` (not shifted), as from ``SFTDataModule``.

    At the end (not with ``fast_dev_run``) the last weights are saved with the tokenizer, LoRA merged.
    Checkpoints are for resuming; with LoRA they hold the adapter only. Defaults are OpenRLHF's, which Qu
    et al. build on.

    Args:
        model: folder or Hub id of a pretrained model. Give this or ``from_scratch``.
        from_scratch: keys of ``LlamaConfig`` for a new, randomly initialized model; vocabulary and special
            tokens are the tokenizer's.
        lora: keys of ``peft.LoraConfig`` to train an adapter, on all linear layers unless ``target_modules``
            says otherwise. None trains all weights.
        learning_rate: peak learning rate of AdamW.
        betas: of AdamW.
        weight_decay: of AdamW.
        warmup_ratio: share of the steps in which the learning rate rises to its peak, in [0, 1).
        min_lr_ratio: share of the peak that the cosine falls to by the last step, in [0, 1].
        dtype: of the weights; LoRA adapters are fp32 always. "bfloat16" needs ``lora``, for it rounds small
            updates away; "auto" takes it on a GPU, with ``lora``.
        gradient_checkpointing: recompute activations in backward, for memory.
        save_to: new or empty folder that the model is saved in; None: ``<trainer.default_root_dir>/model``.

    Raises:
        UserError: an option is out of range, or has no effect.
    """

    def __init__(
        self,
        model: str | None = None,
        from_scratch: dict[str, Any] | None = None,
        lora: dict[str, Any] | None = None,
        learning_rate: float = 5e-6,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        warmup_ratio: float = 0.03,
        min_lr_ratio: float = 0.1,
        dtype: AskedDtype = "float32",
        gradient_checkpointing: bool = False,
        save_to: str | None = None,
    ):
        super().__init__(learning_rate, betas, weight_decay, warmup_ratio, min_lr_ratio)
        if (model is None) == (from_scratch is None):
            raise UserError(
                f"model is {model!r} and from_scratch is {from_scratch!r}; give exactly one of them: a "
                "pretrained model, or the shape of a new one."
            )
        if dtype == "bfloat16" and lora is None:
            raise UserError(
                "dtype is bfloat16 without lora, which rounds small updates of the weights away; keep "
                "float32 with trainer.precision bf16-mixed, or give lora."
            )
        known = inspect.signature(LlamaConfig).parameters.keys() - OVERRULED_LLAMA
        check_keys("from_scratch", from_scratch, known, OVERRULED_LLAMA, None)
        check_keys("lora", lora, SFT_KEYS, {}, LoraConfig())
        # A checkpoint keeps plain values only.
        model, save_to = expanded([model, save_to])
        self.save_hyperparameters()
        self.network: PreTrainedModel | PeftModel | None = None
        self.options: dict[str, Any] = {}
        self._base_digest: str | None = None
        self._rotary_by_row = False
        self._saved_to: str | None = None
        """``save_to`` of the run that is resumed."""
        # An adapter's checkpoint lacks the frozen base; on_load_checkpoint checks it.
        self.strict_loading = lora is None
        self._update_loss: Tensor | None = None
        """0-dim part of this rank in the update's loss."""
        self.val_loss = MeanMetric(nan_strategy="disable")  # check_finite refuses NaN

    @property
    def folder(self) -> Path:
        """Folder of the saved model."""
        return Path(self.hparams["save_to"] or Path(self.trainer.default_root_dir) / "model")

    def setup(self, stage: str) -> None:
        """Check what would otherwise fail after the training."""
        self.val_loss.reset()  # an evaluation left inference tensors
        if not hasattr(data := datamodule(self.trainer), "update_tokens"):
            raise UserError(f"datamodule is {data and type(data).__name__}, but must be an SFTDataModule.")
        if stage != "fit":
            return
        self._check_folder(own=True)  # as a resumed run's may be
        check_writable("The folder of the model", str(self.folder), self.folder, replaced=True)
        strategy = self.trainer.strategy
        zero_3 = isinstance(strategy, DeepSpeedStrategy) and strategy.zero_stage_3
        if zero_3 or isinstance(strategy, FSDPStrategy):
            raise UserError(
                f"SFT saves whole weights, but {type(strategy).__name__} splits them over the processes "
                "here; use trainer.strategy ddp or deepspeed_stage_2."
            )
        self.options = self._options() | data.fit_options()
        log_short_run(self.trainer)

    def _check_folder(self, own: bool) -> None:
        folder, root = self.folder.resolve(), Path(self.trainer.default_root_dir).resolve()
        start = local_path(self.hparams["model"] or "").resolve()
        is_own = own and (folder / "config.json").is_file() and folder != start
        is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
        if root.is_relative_to(folder) or not (is_own or is_new):
            raise UserError(
                f"The model would replace {self.folder}, which is more than a model of this run; move that "
                "folder, or set save_to to a new one."
            )

    def configure_model(self) -> None:
        """Load or make the model and add LoRA, once."""
        if self.network is not None:
            return
        exclude_cudnn()
        name, new = self.hparams["model"], self.hparams["from_scratch"]
        try:
            tokenizer = datamodule(self.trainer).tokenizer
        except RuntimeError:  # Lightning's, without a trainer
            check_is(str, "given, or use trainer.validate(module, data, ckpt_path=...)", model=name)
            tokenizer = pretrained(transformers.AutoTokenizer, name, "model")
        parts = tokenizer, base_dtype(self.hparams["dtype"], None if self.hparams["lora"] else False)
        network: PreTrainedModel | PeftModel
        with waiting(f"Loading {name or 'a new model'}"):
            network = _load_pretrained(name, *parts) if new is None else _new_llama(new, *parts)
        if is_fitting(self):
            check_savable(network, tokenizer, name or "from_scratch")
        if self.hparams["gradient_checkpointing"]:
            recompute_activations(network, dropout=True)
        if self.hparams["lora"] is not None:
            with waiting("Hashing the base model's weights"):  # a fit may come after an evaluation
                self._base_digest = weights_digest(network)
            network = add_lora(network, {**LORA, **self.hparams["lora"]}, "lora")
            check_mergeable(network)
        elif others := other_parts(network):
            for name in others:
                network.get_submodule(name).requires_grad_(False)
            rank_zero_info(f"{type(network).__name__} is trained without {', '.join(others)}.")
        self._rotary_by_row = choose_by_row(network, network.config) is not None
        # Loaded models are in eval mode, where dropout and gradient checkpointing are off.
        self.network = network.train()
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in network.parameters()]
        trained, total = sum(size for size, trains in sizes if trains), sum(size for size, _ in sizes)
        rank_zero_info(
            f"Model: {self.hparams['model'] or 'new'}, {trained:,} trained of {total:,} parameters."
        )

    def token_losses(self, batch: dict[str, Tensor], network: nn.Module | None = None) -> Tensor:
        """Return (K,) cross-entropies in nats of a batch's K response tokens, in at least fp32."""
        network = network or self.network
        assert network is not None
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        if self._rotary_by_row:  # padding has the last position
            inputs["position_ids"] = batch["attention_mask"].cumsum(1) - 1
        logits = network(**inputs, use_cache=False).logits
        targets = batch["labels"][:, 1:]
        is_response = targets != IGNORED
        # Selected first: an fp32 copy of all logits would be the step's largest tensor.
        return cross_entropy(upcast(logits[:, :-1][is_response]), targets[is_response], reduction="none")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return a batch's part of the update's mean over response tokens."""
        if seed := os.environ.get("PL_GLOBAL_SEED"):  # dropout is the same after a resume
            torch.manual_seed(hash((int(seed), self.current_epoch, batch_idx, self.global_rank)))
        loss = self.token_losses(batch).sum() / datamodule(self.trainer).update_tokens(batch_idx)
        self._update_loss = loss.detach() + (self._update_loss or 0)
        # Lightning averages over ranks and over the batches of a full update, also in a short one.
        return loss * (self.trainer.world_size * self.trainer.accumulate_grad_batches)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the update's loss; stop all ranks if it or the gradient is not finite."""
        assert self._update_loss is not None
        sums = partial(self.log, prog_bar=True, on_step=True, on_epoch=False, sync_dist=True, reduce_fx="sum")
        sums("train/loss", self._update_loss)
        # A scaler of float16 tries scales, and skips an update whose gradient overflows.
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        check_finite(self._update_loss, None if scaled or not gradients else get_total_norm(gradients))
        self._update_loss = None

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Collect the validation rows' token losses."""
        self.val_loss.update(self.token_losses(batch))
        self.log("val/loss", self.val_loss, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        """Log the perplexity; stop all ranks if the validation loss is not finite."""
        loss = self.val_loss.compute()
        check_finite(loss, of="validation loss")
        self.log("val/perplexity", loss.exp(), sync_dist=True)

    def on_validation_start(self) -> None:
        """Check that the model can read the rows if no fit has done so."""
        if not is_fitting(self):
            self._check_rows()

    def _check_rows(self) -> None:
        assert self.network is not None
        plain = self.network.get_base_model() if isinstance(self.network, PeftModel) else self.network
        datamodule(self.trainer).check_model(self.hparams["model"] or "from_scratch", plain)

    def on_fit_start(self) -> None:
        """Check the rows, and refuse a trainer precision that cast trained weights to half precision."""
        self._check_rows()
        assert self.network is not None
        for name, parameter in self.network.named_parameters():
            if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
                raise UserError(
                    f"The trained weight {name} is {parameter.dtype}, which rounds small updates away; set "
                    "trainer.precision to 32-true or bf16-mixed, and dtype to float32."
                )

    def on_train_start(self) -> None:
        """Refuse to replace another run's model."""
        super().on_train_start()
        self._check_folder(own=self.hparams["save_to"] in (None, self._saved_to))

    def on_fit_end(self) -> None:
        """Save the model on rank zero; it is on the CPU by now."""
        if not self.trainer.is_global_zero or self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        assert self.network is not None
        share = save_model(self.folder, self.network, datamodule(self.trainer).tokenizer, self._some_losses)
        rank_zero_info(f"The model is saved in {self.folder}.")
        if share is not None and share < KEPT:
            rank_zero_info(
                f"{share:.0%} of what the adapter changes are left after merging: {self.hparams['dtype']} "
                "weights round the rest away; train with --model.dtype float32."
            )

    @torch.no_grad()
    def _some_losses(self, network: nn.Module) -> Tensor:
        """Return the losses of a few validation rows, without dropout."""
        batch = next(iter(datamodule(self.trainer).val_dataloader()))
        return self.token_losses({name: rows[:MEASURED] for name, rows in batch.items()}, network.eval())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave the frozen base out; add the options and the base's digest."""
        checkpoint |= {"options": self.options, "base": self._base_digest}
        if self.hparams["lora"] is not None:
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: state[name] for name in self.trained_names()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check for every trained weight and, in a fit, the base and the options."""
        missing = [name for name in self.trained_names() if name not in checkpoint["state_dict"]]
        if missing:
            raise UserError(
                f"The checkpoint lacks {len(missing)} trained weights, the first being {missing[0]}; resume "
                "with the model and lora options that it was made with."
            )
        if not is_fitting(self):
            return
        self._saved_to = checkpoint["hyper_parameters"]["save_to"]
        searches = any(isinstance(each, LearningRateFinder) for each in vars(self.trainer)["callbacks"])
        if searches and checkpoint["global_step"]:  # else its own checkpoint
            raise UserError(
                "LearningRateFinder would find another rate in a resumed run; set model.learning_rate to the "
                "one that it found at first, and take it out of trainer.callbacks."
            )
        check_options(checkpoint["options"], self.options, checkpoint["global_step"])
        if checkpoint["base"] != self._base_digest:
            raise UserError(
                f"The weights of {self.hparams['model']} differ from those that the checkpoint was trained "
                "on; restore them, or start a new run in another folder."
            )

    def _options(self) -> dict[str, Any]:
        names = (*OPTIMIZER, "dtype", "lora", "from_scratch", "gradient_checkpointing")
        trainer = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
        return {
            **flat_options("", {name: self.hparams[name] for name in names}),
            **flat_options("trainer", {name: getattr(self.trainer, name) for name in trainer}),
            **trainer_options(self),
        }


def _new_llama(
    options: dict[str, Any], tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype
) -> PreTrainedModel:
    try:
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        special = {name: getattr(tokenizer, name) for name in names}
        config = LlamaConfig(**options, vocab_size=len(tokenizer), **special)
    except StrictDataclassError as error:
        reason = str(error).strip().splitlines()[-1].strip().rstrip(".")
        raise UserError(f"from_scratch does not describe a Llama model ({reason}); change it.") from None
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _load_pretrained(name: str, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> PreTrainedModel:
    if not tokenizer.name_or_path:
        raise UserError(
            f"The model {name} is pretrained, but the tokenizer is a new one with other tokens; "
            f"set the datamodule's tokenizer to {name}."
        )
    model = load_base(name, dtype, dropout=True)
    rows = cast("nn.Embedding", model.get_input_embeddings()).num_embeddings
    own = {locate(each) for each in (name, plain_model(name))}  # may have unused tokens without embeddings
    if len(tokenizer) > rows and tokenizer.name_or_path not in own:
        raise UserError(
            f"The tokenizer {tokenizer.name_or_path} has {len(tokenizer)} tokens, but the model {name} has "
            f"{rows} embeddings; set the datamodule's tokenizer to {name}."
        )
    if getattr(model.config, "pad_token_id", None) is None:  # Gemma 3 has it in its text_config
        model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def save_model(
    folder: Path,
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    values: Callable[[nn.Module], Tensor] | None = None,
) -> float | None:
    """Save model (adapter merged in a copy) and tokenizer as a Hugging Face folder, replaced atomically.

    Returns:
        The share of the adapter's effect on a model's ``values`` that rounding left; None if not measured.

    Raises:
        UserError: a weight is not finite; the folder is as before.
    """
    share: float | None = None
    plain: Any = model
    check_weights(model.state_dict(), folder)
    if isinstance(model, PeftModel):
        adapted = copy.deepcopy(model)
        # Weights in float32 are not rounded.
        of_half = values if adapted.dtype != torch.float32 else None
        plain, share = merge_rounded(adapted, adapted.dtype, of_half and (lambda: of_half(adapted)))
    if values is not None and not torch.isfinite(values(plain)).all():
        raise UserError(
            f"The loss of the trained model is not finite, so {folder} is not written: the training "
            "diverged; lower the learning rate."
        )
    stop_at_end_tokens(plain.generation_config, tokenizer)
    with replacing(folder) as new:
        plain.save_pretrained(new)
        tokenizer.save_pretrained(new)
    return share
