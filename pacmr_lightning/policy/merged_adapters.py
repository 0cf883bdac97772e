"""An adapter merged into its base, with one rounding, and saved with the policy's as one."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_info
from peft import PeftConfig, PeftModel, load_peft_weights
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import cached_file

from ..errors import UserError, first_line
from ..strategies.sharding import is_sharded
from .lora import ADAPTER, LoraLayer
from .memory import free_memory
from .numerics import not_finite

MERGE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Accepted mean difference of a token's log-probability between two forms of a model, in nats."""
COMPARED = 32
"""Number of tokens compared."""
KEPT = 0.95
"""Share of an adapter's effect under which a message names the remedy."""


def merge_adapter(model: PreTrainedModel, name: str, base: str) -> PreTrainedModel:
    """Merge the adapter ``name`` into its base (``base`` in messages); raises UserError if PEFT's differs."""
    config: Any = PeftConfig.from_pretrained(name)
    rank_zero_info(f"Merging the adapter {name} into its base {base}.")
    if getattr(model, "is_loaded_in_4bit", False):
        raise UserError(
            f"The adapter {name} was trained on {base}, which is stored in 4 bits, "
            "where it would be rounded away; load that model in full, put the adapter on it (PEFT's "
            "PeftModel.from_pretrained and merge_and_unload), save it, and name its folder."
        )
    if any(is_sharded(parameter) for parameter in model.parameters()):
        raise UserError(
            f"The model {name} is an adapter, which cannot be merged into a base that ZeRO-3 keeps in parts; "
            "merge it first (PEFT's merge_and_unload) and name the merged model."
        )
    known = _embeddings(model).num_embeddings
    own = getattr(config, "trainable_token_indices", None) or []
    own = [i for ids in own.values() for i in ids] if isinstance(own, dict) else own
    # An adapter without a tokenizer uses its base's.
    file = cached_file(name, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False)
    if file is not None and (size := len(AutoTokenizer.from_pretrained(name))) > known:
        shapes = [weight.shape for weight in load_peft_weights(name, "cpu").values()]
        # Gemma 3 has no row for its last token, and adapters are trained without it.
        if max(own, default=0) >= known or any(size in shape for shape in shapes):
            model.resize_token_embeddings(size)
    added = _embeddings(model).weight[known:].clone()
    tokens = compared_tokens(model, own)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            adapted = PeftModel.from_pretrained(model, name)
    except (RuntimeError, UserWarning) as error:  # other shapes or names
        raise UserError(
            f"The adapter {name} does not fit its base {base} ({first_line(error)[:200]}); "
            "set base_model_name_or_path in its adapter_config.json to the model that it was trained on."
        ) from None
    if not hasattr(adapted, "merge_and_unload"):
        raise UserError(
            f"The adapter {name} is of PEFT's kind {config.peft_type.value}, which cannot be merged into the "
            "model that it was trained on; name a LoRA adapter, or a whole model."
        )
    check_mergeable(adapted)
    expected = next_token_log_probs(adapted, tokens)
    untie_head(model)
    try:
        merged = cast("PreTrainedModel", adapted.merge_and_unload())
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise UserError(
            f"The adapter {name} cannot be merged into its base {base} ({str(error).strip().rstrip('.')}); "
            "name a LoRA adapter, or a whole model."
        ) from None
    if len(added) and torch.equal(_embeddings(merged).weight[known:], added):
        raise UserError(
            f"The tokenizer in {name} has {len(added)} tokens that its base {base} lacks, and the "
            "adapter has no embeddings for them, so they would be random; save the base that the adapter was "
            "trained on, with these tokens, and name it in adapter_config.json."
        )
    actual = next_token_log_probs(merged, tokens)
    check_same(expected, actual, f"The adapter {name}, merged into {base},", "PEFT without merging")
    return merged


def _embeddings(model: PreTrainedModel) -> nn.Embedding:
    return cast("nn.Embedding", model.get_input_embeddings())


def untie_head(model: PreTrainedModel) -> None:
    """Untie head and embeddings where an adapter changes only one of them."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not any(isinstance(part, (BaseTunerLayer, AuxiliaryTrainingWrapper)) for part in (embeddings, head)):
        return
    embedded = {id(weight) for weight in embeddings.parameters()}
    for layer in head.modules():
        weight = dict(layer.named_parameters(recurse=False)).get("weight")
        if weight is not None and id(weight) in embedded:
            layer.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
            for config in (model.config, model.config.get_text_config()):
                config.tie_word_embeddings = False


def check_mergeable(model: Any) -> None:
    """Raise UserError if layers with adapters of their own share a weight, as Zamba's do."""
    head = model.get_base_model().get_output_embeddings()  # merging unties it
    layers = {name: x for name, x in model.named_modules() if isinstance(x, LoraLayer) and x is not head}
    owners = {getattr(x.get_base_layer(), "weight", x): name for name, x in layers.items()}
    if shared := sorted(layers.keys() - set(owners.values())):
        raise UserError(
            f"{shared[0]} shares its weight with a layer that has an adapter of its own, so they cannot be "
            "merged; leave such layers out (exclude_modules), or export the policy without --merged."
        )


def merge_rounded(
    model: Any, dtype: torch.dtype, values: Callable[[], Tensor] | None, effect: Tensor | None = None
) -> tuple[PreTrainedModel, float | None]:
    """Merge an adapter in place, in float32, and round once to ``dtype``.

    Args:
        model: a ``PeftModel``.
        dtype: of the merged weights.
        values: returns (n,) values of the model as it is, such as log-probabilities; None: not measured.
        effect: (n,) the adapter's effect on them; None measures it here.

    Returns:
        The merged model, and the share of the effect that is left: the slope of the merged model's effect on
        the adapter's. None if it is not measured: no ``values``, no effect on them, or no memory for the
        weights in float32.

    Raises:
        UserError: a merged weight is not finite in ``dtype``, or has two adapters.
    """
    check_mergeable(model)
    parameters = sum(p.numel() for p in model.parameters())
    measured = values is not None and (4 - model.dtype.itemsize) * parameters < free_memory()
    if measured or dtype != model.dtype:
        model.float()
    with torch.no_grad():
        if values is not None and measured:
            with model.disable_adapter():
                reference = values().double()
            effect = values().double() - reference if effect is None else effect.double()
        untie_head(model.get_base_model())
        merged: Any = model.merge_and_unload().to(dtype)
        if name := not_finite(merged.state_dict()):
            raise UserError(f"The merged weight {name} overflows {dtype}; choose another --dtype.")
        if values is None or effect is None or not measured or not effect.any():
            return merged, None
        merged.float()
        share = float((values().double() - reference) @ effect / (effect @ effect))
        return merged.to(dtype), share


def save_with_base(policy: PeftModel, adapter: str, plain: str, folder: str, **options: Any) -> None:
    """Save the policy's adapter and the one merged into its base as one adapter of the ``plain`` model.

    LoRA updates add up, so the concatenated matrices form one adapter whose rank is the sum of the ranks. An
    adapter with other weights than A and B is refused, and the result is compared with the policy.
    """
    model = cast("PreTrainedModel", policy.get_base_model())
    base = AutoModelForCausalLM.from_pretrained(plain, dtype=model.dtype, trust_remote_code=False)
    tokens = compared_tokens(base)
    try:
        if base.get_input_embeddings().weight.shape != model.get_input_embeddings().weight.shape:
            raise ValueError("one of them adds tokens")
        plain_names = ("lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B")
        if more := [name for name in load_peft_weights(adapter, "cpu") if not name.endswith(plain_names)]:
            raise ValueError(f"one has more than A and B, such as {more[0]}")
        combined: Any = PeftModel.from_pretrained(base, adapter, adapter_name="base")
        combined.add_adapter("policy", policy.peft_config[ADAPTER])
        parameters = dict(combined.named_parameters())
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_" in name:
                    parameters[name.replace(f".{ADAPTER}.", ".policy.")].copy_(parameter)
        # Its options become those of the result, whose scaling is 1.
        combined.peft_config["base"].use_rslora = False
        combined.add_weighted_adapter(["base", "policy"], [1.0, 1.0], ADAPTER, "cat")
        if any(x.scaling.get(ADAPTER) != 1 for x in combined.modules() if isinstance(x, LoraLayer)):
            raise ValueError("layers_to_transform or exclude_modules of one leave out layers of the other")
        combined.set_adapter(ADAPTER)
        expected = next_token_log_probs(policy, tokens).cpu()
        check_same(expected, next_token_log_probs(combined.eval(), tokens), "One LoRA adapter", "the policy")
    except (KeyError, ValueError, TypeError, RuntimeError, UserError) as error:
        raise UserError(
            f"The policy's base is the adapter {adapter}, and the two are not one LoRA adapter for {plain} "
            f"({first_line(error)}); save the whole model with pacmr export RUN OUT "
            "--merged, or in Python with policy.peft.merge_and_unload().save_pretrained(FOLDER)."
        ) from None
    combined.peft_config[ADAPTER].base_model_name_or_path = policy.active_peft_config.base_model_name_or_path
    combined.save_pretrained(folder, selected_adapters=[ADAPTER], **options)


def compared_tokens(model: PreTrainedModel, own: Sequence[int] = ()) -> Tensor:
    """Return (L,) token ids on the CPU for comparing two forms of a model.

    They are from the whole vocabulary, after some of ``own``, ids that an adapter changes directly.
    """
    size = _embeddings(model).num_embeddings
    # Lightning sets its own device as torch's default.
    tokens = torch.linspace(0, size - 1, COMPARED, device="cpu").long()
    ids = torch.cat([torch.tensor(own[:8], dtype=torch.long, device="cpu"), tokens])
    return ids[ids < size][: getattr(model.config.get_text_config(), "max_position_embeddings", None)]


@torch.no_grad()
def next_token_log_probs(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return (L - 1,) next-token log-probabilities in nats."""
    ids = tokens[None].to(next(model.parameters()).device)
    logits = model(input_ids=ids).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].to(logits.dtype)


def check_same(expected: Tensor, found: Tensor, what: str, like: str) -> None:
    """Raise UserError if (L,) log-probabilities differ by more than rounding in their dtype."""
    error = float((found - expected).abs().mean())
    if not error <= MERGE_TOLERANCE[expected.dtype]:
        raise UserError(
            f"{what} gives other log-probabilities than {like} ({error:.1e} nats per token); merge the model "
            "yourself, save it and name its folder."
        )
