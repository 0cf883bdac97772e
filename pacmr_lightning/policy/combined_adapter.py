"""One adapter in place of several, each trained on the model that the one before it was merged into."""

from __future__ import annotations

from typing import Any, cast

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from ..errors import UserError
from .base_model import check_same, compared_tokens, next_token_log_probs
from .loading import pretrained
from .lora import ADAPTER


def save_with_bases(policy: PeftModel, chain: list[str], folder: str, **options: Any) -> None:
    """Save a policy's adapter together with those merged into its base, as one adapter for the plain model.

    By itself the policy's adapter fits a model that is nowhere on disk. LoRA's changes of weights add up, so
    that their matrices side by side are one adapter, of the ranks' sum. What is saved is compared with the
    policy first.

    Args:
        policy: the base with the merged adapters, and on it the policy's own.
        chain: see ``base_model.adapter_chain``, of the base.
        folder: see ``PeftModel.save_pretrained``.
        options: of the same.

    Raises:
        UserError: they are not one LoRA adapter, for one of them is of another kind.
    """
    *adapters, plain = chain
    model = cast("PreTrainedModel", policy.get_base_model())
    base = pretrained(plain, dtype=model.dtype)
    tokens = compared_tokens(base, None)
    names = [f"base_{number}" for number in range(len(adapters))]
    try:
        if base.get_input_embeddings().weight.shape != model.get_input_embeddings().weight.shape:
            raise ValueError("one of them adds tokens")
        found = PeftModel.from_pretrained(base, adapters[-1], adapter_name=names[0])
        for adapter, name in zip(adapters[-2::-1], names[1:], strict=True):
            found.load_adapter(adapter, name)
        found.add_adapter("policy", policy.peft_config[ADAPTER])
        own = {
            name.replace(f".{ADAPTER}.", ".policy."): p
            for name, p in policy.named_parameters()
            if "lora_" in name
        }
        with torch.no_grad():
            for name, parameter in found.named_parameters():
                if name in own:
                    parameter.copy_(own[name])
        found.add_weighted_adapter([*names, "policy"], [1.0] * len(chain), ADAPTER, "cat")
        found.set_adapter(ADAPTER)
        expected = next_token_log_probs(policy, tokens).cpu()
        check_same(expected, next_token_log_probs(found.eval(), tokens), "One LoRA adapter", "the policy")
    except (ValueError, TypeError, RuntimeError, UserError) as error:
        raise UserError(
            f"The policy's base is the adapter {chain[0]}, and the two are not one LoRA adapter for {plain} "
            f"({str(error).strip().splitlines()[0]}); save the whole model with pacmr export RUN OUT "
            "--merged, or in Python with policy.peft.merge_and_unload().save_pretrained(FOLDER)."
        ) from None
    own_config = policy.peft_config[ADAPTER]
    found.peft_config[ADAPTER].base_model_name_or_path = own_config.base_model_name_or_path
    found.save_pretrained(folder, selected_adapters=[ADAPTER], **options)
