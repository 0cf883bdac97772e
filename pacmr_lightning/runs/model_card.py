"""The model card of an exported policy, from the run's own files and without paths of this machine."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, cast

import yaml
from huggingface_hub import ModelCardData

from ..meta_gradient import CleanPreference
from ..modules import PreferenceModule
from ..weighting import VNet, VNetWeighting
from ..weighting.features import PAPER
from .finished_run import NO_NOISE, FinishedRun
from .hub_upload import is_repository

_USE = """\
```python
from {library} import {loader}
from transformers import AutoTokenizer

name = {name}  # this folder, or its id on the Hub
tokenizer = AutoTokenizer.from_pretrained(name)
model = {loader}.from_pretrained(name{options})
inputs = tokenizer("Your prompt", return_tensors="pt", return_token_type_ids=False)
output = model.generate(**inputs, max_new_tokens=64{stop})
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```"""

_LOCAL = """\
The base `{base}` is a local model: `base_model_name_or_path` in `adapter_config.json` says where it lay."""

_ADAPTER_4BIT = """\
The adapter was trained on its base in 4 bits (bitsandbytes NF4, double quantisation). Loaded as above the
base is not quantised, so the model differs from the trained one by the quantisation error. For the trained
one pass `quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="{dtype}")` of transformers."""

_MERGED_4BIT = """\
The adapter was trained on the base in 4 bits (bitsandbytes NF4, double quantisation), and merged into the
base as it is stored: this model differs from the trained one by the quantisation error."""

_VNET = """\
## VNet

`vnet.safetensors` and `vnet_config.json` hold the network that weighed the training pairs; generation does
not need it. It maps {inputs} to the weight
g = {weight}:

```python
import torch
from pacmr_lightning.weighting.vnet import load_vnet

g, a, b = load_vnet({name})({values})
```"""

_WEIGHTS = ("weight_mean_unflipped", "weight_mean_flipped", "weight_gap", "flip_auroc", "flip_auroc_u")


def public(value: Any) -> Any:
    """Return a configuration value without nulls, with absolute paths and classes cut to their last part."""
    if isinstance(value, dict) and "class_path" in value:
        return {"class": value["class_path"].rpartition(".")[2], **public(value.get("init_args") or {})}
    if isinstance(value, dict):
        return {key: public(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [public(item) for item in value]
    for kind in (PurePosixPath, PureWindowsPath):
        if isinstance(value, str) and (kind(value).is_absolute() or value.startswith("~")):
            return kind(value).name
    return value


def on_hub(name: str) -> bool:
    """Return whether a model or dataset of a run is on the Hub, not a local folder."""
    return is_repository(name) and not Path(name).exists()


def model_card(
    run: FinishedRun,
    module: PreferenceModule,
    step: int,
    summary: dict[str, Any] | None,
    *,
    name: str,
    hub_base: str | None,
    merged: bool,
) -> str:
    """Return ``README.md`` with the Hub's front matter; ``hub_base`` is the bottom model's id, if any."""
    name, base = public(name), public(run.base)
    quoted = json.dumps(name, ensure_ascii=False)
    dtype = str(module.policy.dtype).removeprefix("torch.")
    if merged:
        kind = f"`{base}` with a LoRA adapter merged into it"
        use = {"library": "transformers", "loader": "AutoModelForCausalLM", "options": "", "stop": ""}
    else:
        kind = f"A LoRA adapter for `{base}`"
        use = {"library": "peft", "loader": "AutoPeftModelForCausalLM", "options": f', dtype="{dtype}"'}
        # The base's generation config lacks the policy's end tokens.
        use["stop"] = f", eos_token_id={module.policy.model.generation_config.eos_token_id}"
    notes = [_LOCAL.format(base=base)] if hub_base is None and not merged else []
    if run.model["init_args"]["policy"]["init_args"].get("quantization"):
        notes.append(_MERGED_4BIT if merged else _ADAPTER_4BIT.format(dtype=dtype))
    settings = yaml.safe_dump(
        _settings(run, module), sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
    )
    sections = [
        f"---\n{_front_matter(run, module, hub_base, merged)}\n---",
        f"# {Path(name).resolve().name}",
        f"{kind}, trained on preference pairs with pacmr-lightning. The weights are those after {step:,} "
        f"policy updates; the reference of the training was `{base}`.",
        "## How to use it",
        _USE.format(name=quoted, **use),
        *notes,
        "## What it was trained on",
        *_data(run, summary),
        "## How it was trained",
        f"```yaml\n{settings}```",
        "## Metrics",
        _metrics(summary, step),
    ]
    if module.vnet is not None:
        vnet = cast(VNet, module.vnet)  # a weighting's own network
        inputs = "Delta and u, the sum and the difference of a pair's implicit rewards,"
        values = "delta=torch.tensor([-3.0]), u=torch.tensor([1.5])"
        if vnet.features != PAPER:
            inputs = f"features of a pair under the policy ({', '.join(vnet.features)})"
            values = ", ".join(f"{feature}=torch.tensor([1.0])" for feature in vnet.features)
        weight = "sigmoid(a u + b)" if vnet.has_slope else "sigmoid(b)"
        sections.append(_VNET.format(name=quoted, inputs=inputs, weight=weight, values=values))
    return "\n\n".join([*sections, "## Versions", _versions(summary)]) + "\n"


def _front_matter(run: FinishedRun, module: PreferenceModule, hub_base: str | None, merged: bool) -> str:
    tags = ["lora", type(module.objective).__name__.lower()]
    if isinstance(module.weighting, VNetWeighting) and module.weighting.vnet.features == PAPER:
        tags.append("mwn-dpo" if isinstance(module.weighting.outer, CleanPreference) else "pacmr-dpo")
    path = (run.data["init_args"]["source"].get("init_args") or {}).get("path")
    return ModelCardData(
        base_model=hub_base,
        library_name="transformers" if merged else "peft",
        pipeline_tag="text-generation",
        datasets=[path] if path and on_hub(path) else None,
        tags=tags,
    ).to_yaml()


def _data(run: FinishedRun, summary: dict[str, Any] | None) -> list[str]:
    def listed(values: dict[str, Any]) -> str:
        return "\n".join(f"- {key}: `{value}`" for key, value in public(values).items())

    options = run.data["init_args"]
    found = ["Preference pairs of the source\n\n" + listed(options["source"])]
    for split, counts in ((summary or {}).get("counts") or {}).items():
        known = ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)
        found.append(f"Rows ({split}): {known}.")
    if noise := {key: options[key] for key in NO_NOISE if options.get(key)}:
        noise["noise_seed"] = options.get("noise_seed")
        found.append("Labels of the training pairs were flipped on purpose:\n\n" + listed(noise))
    else:
        found.append("No noise was injected: the labels are those found in the data.")
    return found


def weighting_settings(run: FinishedRun, module: PreferenceModule) -> dict[str, Any]:
    """Return the weighting's configuration, with its default classes."""
    parts = {name: getattr(module.weighting, name, None) for name in ("outer", "estimator")}
    classes = {name: {"class": type(part).__name__} for name, part in parts.items() if part is not None}
    given = public(run.model["init_args"].get("weighting") or {})
    return {"class": type(module.weighting).__name__, **classes, **given}


def _settings(run: FinishedRun, module: PreferenceModule) -> dict[str, Any]:
    left_out = ("policy", "max_new_tokens", "micro_batch_size", "objective", "weighting", "method")
    model = {key: value for key, value in run.model["init_args"].items() if key not in left_out}
    lora = ("rank", "alpha", "target_modules", "lora_options", "dtype", "quantization")
    data = ("max_length", "global_batch_size", "meta_batch_size", "augmentations", "clean_meta", "seed")
    policy = run.model["init_args"]["policy"]["init_args"]
    return public(
        {
            "method": module.method,
            "objective": {"class": type(module.objective).__name__, "beta": module.objective.beta}
            | public(run.model["init_args"].get("objective") or {}),
            "weighting": weighting_settings(run, module),
            **model,
            "policy": {key: policy.get(key) for key in lora},
            "data": {key: run.data["init_args"].get(key) for key in data},
        }
    )


def _metrics(summary: dict[str, Any] | None, step: int) -> str:
    if summary is None:
        return "The run wrote no summary."
    if summary["steps"] != step:
        return f"The run's summary is of its end, after {summary['steps']:,} updates, not of these weights."
    values = {**summary["metrics"], **{key: summary.get(key) for key in _WEIGHTS}}
    rows = [f"| {key} | {value:.4g} |" for key, value in values.items() if value is not None]
    if not rows:
        return "The run's summary holds none."
    val_step = summary.get("val_step")
    validated = "" if val_step in (None, step) else f" after update {val_step:,}"
    told = f"Those that the run logged last: `val/` on its validation pairs{validated}, the others on the "
    return "\n".join(
        [f"{told}weights of its last training pairs.\n", "| metric | value |", "| --- | --- |", *rows]
    )


def _versions(summary: dict[str, Any] | None) -> str:
    names = ("pacmr-lightning", "torch", "transformers", "peft")
    versions = {"Exported": {name: importlib.metadata.version(name) for name in names}}
    if summary is not None:
        versions = {"Trained": summary["versions"]} | versions
    return "\n".join(
        f"- {done} with {', '.join(f'{name} {version}' for name, version in found.items())}"
        for done, found in versions.items()
    )
