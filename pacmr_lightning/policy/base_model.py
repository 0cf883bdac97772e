"""The frozen base that a policy and its reference share."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from lightning.pytorch.utilities import rank_zero_info
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import cached_file, find_adapter_config_file

from ..batch import PairBatch, Segment
from ..errors import UserError
from ..strategies.sharding import is_sharded, whole
from .attention import use_attention
from .loading import loading, pretrained
from .quantized import AskedQuantization, prepare_quantized, quantization_options

MERGE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Accepted mean difference of a token's log-probability, in nats, between two forms of a model, by dtype."""
CHECKED = 256
"""Tokens of a pair on which they are compared, at most."""


def load_base(
    name: str,
    dtype: torch.dtype,
    attention: str | None,
    quantization: AskedQuantization | None = None,
    pair: PairBatch | None = None,
) -> PreTrainedModel:
    """Return a model without dropout, loaded by ``load_model``.

    Args:
        name: see ``load_model``, as the following.
        dtype: of the weights.
        attention: as in transformers.
        quantization: of the linear layers but the head.
        pair: what a merged adapter is compared on.
    """
    model = load_model(name, dtype, attention, quantization, pair)
    _switch_off_dropout(model)
    return model


def load_model(
    name: str,
    dtype: torch.dtype,
    attention: str | None = None,
    quantization: AskedQuantization | None = None,
    pair: PairBatch | None = None,
) -> PreTrainedModel:
    """Return the plain causal language model that a name stands for; adapters are merged.

    An adapter means what PEFT computes with it: the merged model is compared with the unmerged one. The base
    of an adapter may be an adapter itself.

    Args:
        name: folder or Hub id of a model or of a PEFT adapter.
        dtype: of the weights.
        attention: as in transformers, whose own choice None is.
        quantization: of the linear layers but the head.
        pair: a batch whose first pair is compared; None for ids from all over the vocabulary.

    Raises:
        UserError: the model cannot be loaded or its adapter not merged, or it does not support the attention
            or the quantization.
    """
    adapter = is_adapter(name)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    if quantization is not None:
        if adapter:
            raise UserError(
                f"The model {name} is an adapter, which would be rounded where it is merged into 4 bits; "
                "merge it first (pacmr export RUN OUT --merged, or PEFT's merge_and_unload) and name the "
                "merged model."
            )
        options |= quantization_options(dtype)
    with loading(name, attention):
        if adapter:
            # Compared on whatever device it is loaded on, where kernels for GPUs may not run.
            model = _merged(adapter_chain(name), pair, options | {"attn_implementation": None})
            if attention is not None:
                use_attention(model, attention)
        else:
            model = pretrained(name, **options)
    if quantization is not None:
        prepare_quantized(model, dtype)
    elif getattr(model, "is_loaded_in_4bit", False):
        raise UserError(
            f"The model {name} is stored in 4 bits; set quantization to 4bit to train it (merging needs a "
            "model that is stored in full)."
        )
    return model


def is_adapter(name: str) -> bool:
    """Whether a folder or Hub id is a PEFT adapter and no model of its own.

    Raises:
        UserError: there is no such folder, or the Hub has nothing of that name.
    """
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not Path(name).exists():
        raise UserError(
            f"The model folder {name} does not exist; check the path, run SFT first, or give a Hub id."
        )
    with loading(name):
        return find_adapter_config_file(name) is not None


def adapter_base(name: str) -> str:
    """Folder or Hub id of the model that an adapter was trained on, which may be an adapter itself.

    Raises:
        UserError: the adapter's configuration names none, or none that is there.
    """
    base = PeftConfig.from_pretrained(name).base_model_name_or_path
    if not base:
        raise UserError(
            f"The adapter {name} does not name the model that it was trained on; set base_model_name_or_path "
            "in its adapter_config.json."
        )
    try:
        is_adapter(base)
    except UserError as error:
        raise UserError(
            f"The adapter {name} was trained on {base}, which is not there ({str(error).rstrip('.')}); set "
            "base_model_name_or_path in its adapter_config.json."
        ) from None
    return str(base)


def adapter_chain(name: str) -> list[str]:
    """The name, the base of the adapter that it is, that one's base, ..., and last a plain model.

    Raises:
        UserError: see ``adapter_base``; or the adapters are each other's base.
    """
    chain = [name]
    while is_adapter(chain[-1]):
        base = adapter_base(chain[-1])
        if base in chain:
            raise UserError(
                f"The adapter {base} has itself among its bases; set base_model_name_or_path in its "
                "adapter_config.json to a plain model."
            )
        chain.append(base)
    return chain


def _merged(chain: list[str], pair: PairBatch | None, options: dict[str, Any]) -> PreTrainedModel:
    """The plain model at the end of an ``adapter_chain``, with the adapters before it inside of its weights.

    Raises:
        UserError: see ``_with_adapter``.
    """
    configs: list[Any] = [PeftConfig.from_pretrained(name) for name in chain[:-1]]
    for name, config in zip(chain, configs, strict=False):
        if config.task_type not in (None, "CAUSAL_LM"):
            raise UserError(
                f"The adapter {name} is for the task {config.task_type}, not for a causal language model; "
                "name another."
            )
    model = pretrained(chain[-1], revision=configs[-1].revision, **options)
    for place in reversed(range(len(configs))):
        model = _with_adapter(model, chain[place], chain[place + 1], configs[place], pair)
    return model


def _with_adapter(
    model: PreTrainedModel, name: str, base: str, config: Any, pair: PairBatch | None
) -> PreTrainedModel:
    """A base with one adapter inside of its weights.

    Raises:
        UserError: this kind of adapter is no change of weights, the base is stored in 4 bits, or the merged
            model differs from what PEFT computes.
    """
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
    _make_room(model, name)
    added = _embeddings(model).weight[known:].clone()
    tokens = compared_tokens(model, pair, getattr(config, "trainable_token_indices", None))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            adapted = PeftModel.from_pretrained(model, name)
    except (RuntimeError, UserWarning) as error:  # other shapes, or other names
        raise UserError(
            f"The adapter {name} does not fit its base {base} ({str(error).strip().splitlines()[0][:200]}); "
            "set base_model_name_or_path in its adapter_config.json to the model that it was trained on."
        ) from None
    if not hasattr(adapted, "merge_and_unload"):
        raise UserError(
            f"The adapter {name} is of PEFT's kind {config.peft_type.value}, which cannot be merged into the "
            "model that it was trained on; name a LoRA adapter, or a whole model."
        )
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
            f"The tokenizer in {name} has {len(added)} tokens that its base {base} does not know, and the "
            "adapter has no embeddings for them, so they would be random; save the base that the adapter was "
            "trained on, with these tokens, and name it in adapter_config.json."
        )
    found = next_token_log_probs(merged, tokens)
    check_same(expected, found, f"The adapter {name}, merged into {base},", "PEFT without merging")
    return merged


def _embeddings(model: PreTrainedModel) -> nn.Embedding:
    return cast("nn.Embedding", model.get_input_embeddings())


def _make_room(model: PreTrainedModel, adapter: str) -> None:
    """Grows the embeddings where the adapter's own tokenizer has more tokens, as PEFT's auto classes do."""
    # From a folder, or from the Hub's cache; an adapter without a tokenizer has its base's.
    if cached_file(adapter, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False) is None:
        return
    size = len(AutoTokenizer.from_pretrained(adapter))
    if size > _embeddings(model).num_embeddings:
        model.resize_token_embeddings(size)


def untie_head(model: PreTrainedModel) -> None:
    """Give the head a weight of its own where it shares the embeddings' and an adapter changes one of them.

    Unmerged, such an adapter changes that one alone.
    """
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


def compared_tokens(
    model: PreTrainedModel, pair: PairBatch | None, own: list[int] | dict[str, list[int]] | None = None
) -> Tensor:
    """(L,) token ids on which two forms of a model are compared, on the CPU.

    Args:
        model: what must know the ids, and their number.
        pair: a batch whose first prompt and chosen response are taken; None for ids from all over the
            vocabulary.
        own: ids that an adapter changes by themselves (``trainable_token_indices``); some come first.
    """
    size = _embeddings(model).num_embeddings
    own = [i for ids in own.values() for i in ids] if isinstance(own, dict) else own or []
    if pair is None:
        tokens = torch.linspace(0, size - 1, 32, device="cpu").long()
    else:
        segments = pair.segment_ids[0]
        kept = (segments == Segment.PROMPT) | (segments == Segment.CHOSEN)
        tokens = pair.input_ids[0, kept][:CHECKED].cpu()
    # Lightning builds a model with its own device as torch's default.
    ids = torch.cat([torch.tensor(own[:8], dtype=torch.long, device="cpu"), tokens])
    return ids[ids < size][: getattr(model.config.get_text_config(), "max_position_embeddings", None)]


def check_same(expected: Tensor, found: Tensor, what: str, like: str) -> None:
    """Compare (L,) log-probabilities in nats, which have the dtype of the models that gave them.

    Raises:
        UserError: they differ by more than rounding does.
    """
    error = float((found - expected).abs().mean())
    if not error <= MERGE_TOLERANCE[expected.dtype]:
        raise UserError(
            f"{what} gives other log-probabilities than {like} ({error:.1e} nats a token); merge the model "
            "yourself, save it and name its folder."
        )


@torch.no_grad()
def next_token_log_probs(model: nn.Module, tokens: Tensor) -> Tensor:
    """(L - 1,) log-probabilities of each token after those before it, in nats, by a plain forward pass."""
    ids = tokens[None].to(next(model.parameters()).device)
    logits = model(input_ids=ids).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].to(logits.dtype)


def _switch_off_dropout(model: PreTrainedModel) -> None:
    """Of layers, of the probabilities that are kept as numbers, and what else is random in training."""
    # OPT skips whole layers, and Mixtral, MiniMax and DBRX multiply a router's inputs by noise.
    others = ("pdrop", "layerdrop", "input_jitter_noise", "moe_jitter_eps")
    for holder in (model.config, *model.modules()):
        if isinstance(holder, nn.Dropout):
            holder.p = 0.0
        for name, value in list(vars(holder).items()):
            if isinstance(value, float) and (
                "dropout" in name or name.endswith(others) or name == "jitter_noise"
            ):
                setattr(holder, name, 0.0)


def weights_digest(model: PreTrainedModel) -> str:
    """Return a hash (XXH3, 128 bits) of the model's weights, by name and byte; LoRA is no part of it.

    It is the same on every device and under every strategy. Another dtype or quantization makes other bytes.
    """
    digest = xxhash.xxh3_128()
    with torch.no_grad():
        for name, value in model.state_dict(keep_vars=True).items():
            if "lora_" in name:
                continue
            with whole([value]):
                digest.update(name.encode() + str(value.dtype).encode() + str(tuple(value.shape)).encode())
                # Detached it is a plain tensor; bitsandbytes' own takes its layer's scales along to the CPU.
                plain = value.detach().contiguous().cpu()
                digest.update(plain.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def recompute_activations(model: PreTrainedModel, recomputed: bool = True, dropout: bool = False) -> None:
    """Set whether activations inside of a layer are computed again in backward, or kept.

    Args:
        model: the base.
        recomputed: compute them again.
        dropout: the layers draw random numbers, so that checkpoints keep the generators' state.
    """
    # transformers calls activation checkpointing what it called gradient checkpointing at first.
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if recomputed:
        getattr(model, f"{kind}_checkpointing_enable")(
            {"use_reentrant": False, "preserve_rng_state": dropout}
        )
    else:
        getattr(model, f"{kind}_checkpointing_disable")()
