"""Command ``pacmr export``: a finished run as a folder for transformers or PEFT, with a model card."""

import copy
import os
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from ..batch import PairBatch
from ..datamodules.tokenization import tokenize_pairs
from ..datamodules.tokenized_pairs import TokenizedPairs
from ..errors import UserError, first_line
from ..files import check_writable, expanded, local_path, replacing
from ..policy import PolicyModel
from ..policy.base_model import is_random, plain_model
from ..policy.chat_template import stop_at_end_tokens
from ..policy.lora import ADAPTER
from ..policy.merged_adapters import KEPT, merge_rounded
from ..policy.numerics import not_finite
from ..runs.finished_run import FinishedRun, PreferenceData, find_run, load_run
from ..runs.folder import SUMMARY, read_summary
from ..runs.model_card import model_card, on_hub
from ..waiting import waiting

READ, MEASURED = 128, 8
"""Validation pairs that are read, and the number of the shortest on which a merge is measured."""

Dtype = Literal["float32", "bfloat16", "float16"]


def export(
    run: str,
    out: str,
    merged: bool = False,
    checkpoint: str = "last",
    dtype: Dtype | None = None,
    base: str | None = None,
) -> None:
    """Writes the policy of a finished preference run, its tokenizer and a model card to a new folder.

    VNet is written too, as ``vnet.safetensors``; the card shows how to load it. "hf upload OWNER/NAME OUT", a
    command of huggingface_hub, puts the folder on the Hub.

    Args:
        run: folder of a preference run.
        out: folder to write, new or empty. It appears when it is complete.
        merged: write a whole model, with the adapter merged into the stored base, instead of a PEFT adapter.
        checkpoint: name, without .ckpt, of a file in the run's folder ``checkpoints``.
        dtype: dtype of the merged weights; default: that of the base in the run. Adapters are float32.
        base: Hub id of the base, for a run that read it from a folder.

    Raises:
        UserError: ``out`` exists, the run's files do not fit, or the policy is not finite.
    """
    run, out = expanded([run, out])
    if dtype is not None and not merged:
        raise UserError(f"dtype is {dtype}, but adapters are float32; add --merged, or leave it out.")
    if base is not None and not on_hub(base):
        raise UserError(f"base is {base}, but it must be a Hub id such as OWNER/NAME.")
    finished = find_run(run, checkpoint)
    bottom = plain_model(finished.base)
    hub_base = base or (bottom if on_hub(bottom) else None)
    path = local_path(out)
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise UserError(f"out is {out}, which exists and is not an empty folder; name another one.")
    check_writable("out", out, path, replaced=True)
    print(f"Loading {finished.base} and {finished.checkpoint}")
    stored = copy.deepcopy(finished)
    if merged:
        # Merging into 4-bit weights would round to 4 bits again, so use the stored base.
        stored.model["init_args"]["policy"]["init_args"]["quantization"] = None
    module, data, step = load_run(stored)
    vnet = {} if module.vnet is None else dict(module.vnet.named_parameters())
    if not_finite({**module.policy.adapter(), **vnet}):
        raise UserError(
            f"{finished.checkpoint} has weights that are not finite: the run diverged; name an earlier "
            "checkpoint with --checkpoint."
        )
    summary = read_summary(run) if (Path(run) / SUMMARY).is_file() else None
    if summary is not None and summary["metrics"].get("val/guard/restored_step", summary["steps"]) != step:
        summary = {"metrics": {}, "counts": summary.get("counts")}  # those were of another state
    print(f"Writing {'a merged model' if merged else 'an adapter'} after {step:,} updates")
    with replacing(path) as folder:
        folder.mkdir()
        stop_at_end_tokens(module.policy.model.generation_config, data.tokenizer)
        if base is not None and bottom == finished.base:
            finished.base = base
        loaded = None if merged else base or bottom
        card = model_card(finished, module, step, summary, name=out, hub_base=hub_base, loaded=loaded)
        data.tokenizer.save_pretrained(folder)
        if module.vnet is not None:
            save_file(
                {key: w.cpu() for key, w in module.vnet.state_dict().items()}, folder / "vnet.safetensors"
            )
        if merged:
            kind = getattr(torch, dtype) if dtype else module.policy.dtype
            merge(module.policy, bottom, kind, finished, data).save_pretrained(folder)
        else:
            if base is not None:
                module.policy.peft.peft_config[ADAPTER].base_model_name_or_path = base
            # By default PEFT looks up the base's vocabulary size on the Hub.
            module.policy.peft.save_pretrained(str(folder), save_embedding_layers=False)
            module.policy.model.generation_config.save_pretrained(folder)
        # Last, since PEFT writes its own card.
        (folder / "README.md").write_text(card, encoding="utf-8")
    call = f'AutoModelForCausalLM.from_pretrained("{loaded or out}")'
    if not merged:  # PEFT's auto class adds embeddings where the tokenizer has more tokens
        call = f'PeftModel.from_pretrained({call}, "{out}")'
    print(f"{out} is complete; load it with {call}.")
    if not merged and hub_base is None:
        print(
            f"The adapter needs its base, {os.path.abspath(bottom)} (base_model_name_or_path in "
            "adapter_config.json); to load it elsewhere give the base's Hub id with --base, or --merged."
        )


def merge(
    policy: PolicyModel, bottom: str, dtype: torch.dtype, run: FinishedRun, data: PreferenceData
) -> PreTrainedModel:
    """Merge the built policy, in place, into one plain model, and print what is left of its margins.

    ``bottom`` is the base model's name; ``run`` and ``data`` are those that the policy was trained by.
    """
    options, values, effect = run.model["init_args"]["policy"]["init_args"], None, None
    quantization = options.get("quantization")
    try:
        pairs = _some_pairs(data)
        values = partial(_margins, policy, pairs)
        if quantization:
            trained = copy.deepcopy(run)
            trained.model["init_args"]["policy"]["init_args"]["dtype"] = "float32"
            quantized = load_run(trained)[0].policy
            effect = _margins(quantized, pairs)
            with quantized.reference():
                effect -= _margins(quantized, pairs)
            del quantized
        why = "there is too little memory, or the policy equals its reference on these pairs"
    except (UserError, OSError) as error:
        values, why = None, first_line(error)
    with waiting("Merging, and comparing margins before and after"):
        model, share = merge_rounded(policy.peft, dtype, values, effect)
    name = str(dtype).removeprefix("torch.")
    of = f"a base in {quantization} into the stored base" if quantization else "its base"
    line = f"The adapter is merged from {of}, in {name}" if quantization else f"The merged weights are {name}"
    exact = "" if name == "float32" else "; --dtype float32 rounds nothing"
    if share is None:
        print(f"{line}; what is left of the policy's margins was not measured ({why}){exact}.")
    else:
        print(
            f"{line}: {share:.1%} of the policy's implicit margins are left ({len(pairs.ids)} validation "
            f"pairs){exact if share < KEPT else ''}."
        )
    # Restore the cache and dropout, which training disables.
    original = AutoConfig.from_pretrained(bottom).to_dict()
    for key in model.config.to_dict():
        if key in original and (key == "use_cache" or is_random(key)):
            setattr(model.config, key, original[key])
    return model


def _some_pairs(data: PreferenceData) -> PairBatch:
    """Return the shortest of the first validation pairs, whose log-probabilities cost least."""
    dataset = data.source.load("validation")
    first = dataset.select(range(min(READ, len(dataset))))
    rows, _ = tokenize_pairs(first, data.tokenizer, data.max_length, tokenization=data.tokenization)
    pairs = TokenizedPairs(rows, data.tokenizer.pad_token_id)
    tokens = [len(row["prompt_ids"] + row["chosen_ids"] + row["rejected_ids"]) for row in rows]
    return pairs.batch(sorted(range(len(pairs)), key=tokens.__getitem__)[:MEASURED])


@torch.no_grad()
def _margins(policy: PolicyModel, pairs: PairBatch) -> Tensor:
    """Return (N,) log-probabilities of the chosen minus the rejected responses, with LoRA in float32."""
    with policy.lora_in_float32():
        log_probs = policy.log_probs(pairs)
    return log_probs.chosen - log_probs.rejected
