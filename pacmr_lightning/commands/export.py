"""Export of a finished run to a folder that plain transformers or PEFT loads, with a model card."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import AutoConfig, PreTrainedModel

from ..chat_template import stop_at_end_tokens
from ..command_line.exceptions import full_disk
from ..command_line.parser import run_tool
from ..errors import UserError
from ..policy import PolicyModel
from ..policy.base_model import adapter_chain
from ..policy.lora import ADAPTER
from ..policy.merged_adapters import untie_head
from ..runs.finished_run import find_run, load_run
from ..runs.folder import SUMMARY, read_summary
from ..runs.hub_upload import check_repository
from ..runs.hub_upload import push as upload
from ..runs.model_card import model_card, on_hub, weighting_settings
from ..weighting.vnet import VNet, save_vnet

Dtype = Literal["float32", "bfloat16", "float16"]


def export(
    run: str,
    out: str,
    merged: bool = False,
    checkpoint: str = "last",
    dtype: Dtype | None = None,
    base: str | None = None,
    push: str | None = None,
    private: bool = False,
) -> None:
    """Writes the policy of a finished preference run, its tokenizer and a model card into a new folder.

    With a VNet, that is written too (``vnet_folder.load_vnet`` reads it). If an upload fails, it stays.

    Args:
        run: folder of a preference run.
        out: folder to write, which must not exist or be empty. It appears when it is complete.
        merged: write a whole model with the adapter merged into the base as it is stored, not a PEFT adapter.
        checkpoint: which of the folder ``checkpoints``, by its name without .ckpt.
        dtype: of the merged weights; default: the base's in the run. Adapters are float32 always.
        base: id of the base at the Hub, for a run that has read it from a folder.
        push: repository at the Hub, OWNER/NAME, to upload the folder to; made where it does not exist. The
            token is that of HF_TOKEN, or of hf auth login.
        private: make a private repository.

    Raises:
        UserError: ``out`` is taken, the run's files do not fit, the policy is not finite, the adapter's base
            cannot be found by others, or the Hub refuses the upload.
    """
    run, out = str(run), str(out)
    if dtype is not None and not merged:
        raise UserError(
            f"dtype is {dtype}, but an adapter is float32 always; give --merged too, or leave it out."
        )
    if base is not None and not on_hub(base):
        raise UserError(f"base is {base}, but that is no id of a model at the Hub, such as OWNER/NAME.")
    if push is not None:
        check_repository(push, "push")
    elif private:
        raise UserError("private is given without push; name the repository with --push, or leave it out.")
    found = find_run(run, checkpoint)
    bottom = adapter_chain(found.base)[-1]
    hub_base = base or (bottom if on_hub(bottom) else None)
    if push is not None and not merged and hub_base is None:
        raise UserError(
            f"The base {found.base} is a folder, which nobody finds who loads the adapter from {push}; give "
            "the base's id at the Hub with --base, or export a whole model with --merged."
        )
    with _new_folder(out) as folder:
        print(f"Loading {found.base} and {found.checkpoint}")
        quantization = found.model["init_args"]["policy"]["init_args"].get("quantization")
        stored = copy.deepcopy(found)
        if merged:
            # Merging into 4-bit weights would round to 4 bits again, so use the stored base.
            stored.model["init_args"]["policy"]["init_args"]["quantization"] = None
        module, data, step = load_run(stored)
        learned = [*module.policy.adapter().values(), *(module.vnet.parameters() if module.vnet else ())]
        if not all(torch.isfinite(value).all() for value in learned):
            raise UserError(
                f"{found.checkpoint} holds weights that are no finite numbers, for the run diverged; name an "
                "earlier one with --checkpoint."
            )
        if merged and quantization:
            print(
                f"The run trained its adapter on a base in {quantization}, but it is merged into the base as "
                f"stored: the merged model differs from the trained one by what {quantization} rounds away.",
            )
        print(f"Writing {'a merged model' if merged else 'an adapter'} after {step:,} updates")
        stop_at_end_tokens(module.policy.model.generation_config, data.tokenizer)
        if base is not None and bottom == found.base:
            found.base = base
        summary = read_summary(run) if (Path(run) / SUMMARY).is_file() else None
        card = model_card(found, module, step, summary, name=push or out, hub_base=hub_base, merged=merged)
        data.tokenizer.save_pretrained(folder)
        if module.vnet is not None:
            settings = {"beta": module.objective.beta, "step": step, "method": module.method}
            settings["weighting"] = weighting_settings(found, module)
            # Always the weighting's own network.
            save_vnet(folder, cast(VNet, module.vnet), settings)
        if merged:
            model = merge(module.policy, bottom, getattr(torch, dtype) if dtype else module.policy.dtype)
            model.save_pretrained(folder)
        else:
            if base is not None:
                module.policy.peft.peft_config[ADAPTER].base_model_name_or_path = base
            # Else PEFT asks the Hub whether the vocabulary was changed, which it never is.
            module.policy.peft.save_pretrained(str(folder), save_embedding_layers=False)
            module.policy.model.generation_config.save_pretrained(folder)
        # Last, since PEFT writes its own card.
        (folder / "README.md").write_text(card, encoding="utf-8")
    loader = "AutoModelForCausalLM" if merged else "AutoPeftModelForCausalLM"
    print(f'{out} is complete; load it with {loader}.from_pretrained("{out}").')
    if not merged and hub_base is None:
        print(
            f"The adapter finds its base, {found.base}, by base_model_name_or_path in adapter_config.json; "
            "--merged writes a model that needs no other.",
        )
    if push is not None:
        files = {path.name: path for path in sorted(Path(out).iterdir())}
        upload(files, push, "model", private, f"{Path(out)} is kept; hf upload sends it.")
        print(f"Uploaded to {push}.")


def merge(policy: PolicyModel, bottom: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return the built policy as one plain model, and use it up; ``bottom`` is the model under it."""
    untie_head(policy.model)
    if dtype != policy.dtype:
        policy.model.float()
    peft: Any = policy.peft  # forwards to its LoraModel
    model: PreTrainedModel = peft.merge_and_unload().to(dtype)
    for name, value in model.state_dict().items():
        if not torch.isfinite(value).all():
            raise UserError(f"The merged weight {name} is too large for {dtype}; choose another --dtype.")
    # Restore what training switched off: the cache, and dropout.
    original = AutoConfig.from_pretrained(bottom).to_dict()
    for key in model.config.to_dict():
        if key in original and (key == "use_cache" or "dropout" in key or key.endswith("pdrop")):
            setattr(model.config, key, original[key])
    return model


@contextmanager
def _new_folder(out: str) -> Iterator[Path]:
    """Yield a temporary folder beside ``out`` that takes its name when the block ends without an error."""
    path = Path(os.path.realpath(out))
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    new_parents = [parent for parent in path.parents if not os.path.lexists(parent)]
    try:
        if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
            raise UserError(f"{out} is there already and is no empty folder; name another one.")
        partial.mkdir(parents=True)
        yield partial
        os.replace(partial, path)
    except OSError as error:
        if error.strerror is None or full_disk(error):
            raise
        raise UserError(f"{out} cannot be written ({error.strerror}); name another folder.") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in new_parents:
            with suppress(OSError):  # not empty: the folder is there
                parent.rmdir()


def main(arguments: list[str]) -> None:
    """``pacmr export RUN OUT`` and the options of ``export``."""
    run_tool("export", export, arguments, positional=True)
