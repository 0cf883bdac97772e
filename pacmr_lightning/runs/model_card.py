"""The model card of an exported policy, from the run's own files and without paths of this machine."""

import importlib.metadata
import json
from importlib.resources import files
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import yaml
from huggingface_hub import ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from jinja2 import StrictUndefined, Template

from ..files import local_path
from ..meta_gradient import CleanPreference
from ..modules import PreferenceModule
from ..weighting import VNet, VNetWeighting
from .finished_run import NO_NOISE, FinishedRun

_DATA = (
    *("max_length", "tokenization", "global_batch_size", "meta_batch_size"),
    *("augmentations", "clean_meta", "seed"),
)
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
    """Return true if a model or dataset of a run is on the Hub, not a local folder."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not local_path(name).exists()


def model_card(
    run: FinishedRun,
    module: PreferenceModule,
    step: int,
    summary: dict[str, Any] | None,
    *,
    name: str,
    hub_base: str | None,
    loaded: str | None,
) -> str:
    """Return ``README.md`` with the Hub's front matter.

    ``hub_base`` is the bottom model's id, if any; an adapter is ``loaded`` on that model, None if merged.
    """
    name, base, merged = public(name), public(run.base), loaded is None
    options = run.data["init_args"]
    dtype = str(module.policy.dtype).removeprefix("torch.")
    if merged:
        kind, stop = f"`{base}` with a LoRA adapter merged into it", ""
    else:
        kind = f"A LoRA adapter for `{public(loaded)}`"
        # The base's generation config lacks the policy's end tokens.
        stop = f", eos_token_id={module.policy.model.generation_config.eos_token_id}"
    given, policy = run.model["init_args"], run.model["init_args"]["policy"]["init_args"]
    objective = {"class": type(module.objective).__name__, "beta": module.objective.beta}
    chosen = {**given, "method": module.method, "objective": given.get("objective") or objective}
    chosen |= {"weighting": weighting_settings(run, module), "policy": policy}
    chosen |= {"data": {key: options.get(key) for key in _DATA}}
    settings = yaml.safe_dump(
        public(chosen), width=100, sort_keys=False, allow_unicode=True, default_flow_style=None
    )
    noise = {key: options[key] for key in NO_NOISE if options.get(key)}
    summary = summary or {}
    values = {**summary.get("metrics", {}), **{key: summary.get(key) for key in _WEIGHTS}}
    last, counts = summary.get("val_step"), (summary.get("counts") or {}).items()
    names = ("pacmr-lightning", "torch", "transformers", "peft")
    text = (files(__package__) / "model_card.jinja").read_text(encoding="utf-8")
    card = Template(text, trim_blocks=True, undefined=StrictUndefined)
    return card.render(
        front_matter=_front_matter(run, module, hub_base, merged),
        title=Path(name).resolve().name,
        kind=kind,
        step=step,
        base=base,
        name=json.dumps(name, ensure_ascii=False),
        stop=stop,
        local_base=public(loaded) if hub_base is None else None,
        no_bos=", add_special_tokens=False" if options.get("tokenization") == "openrlhf" else "",
        quantized=policy.get("quantization"),
        merged=merged,
        dtype=dtype,
        source=public(options["source"]),
        counts={
            split: ", ".join(f"{name} {count:,}" for name, count in numbers.items() if count)
            for split, numbers in counts
        },
        noise=public(noise | {"noise_seed": options.get("noise_seed")}) if noise else {},
        settings=settings,
        metrics={key: value for key, value in values.items() if value is not None},
        validated="" if last in (None, summary.get("steps")) else f" after update {last:,}",
        vnet=f"hidden={weighting.hidden}, floor={weighting.floor}, max_slope={weighting.max_slope}"
        if isinstance(weighting := module.weighting, VNetWeighting) and isinstance(module.vnet, VNet)
        else "",
        versions={name: importlib.metadata.version(name) for name in names},
    )


def _front_matter(run: FinishedRun, module: PreferenceModule, hub_base: str | None, merged: bool) -> str:
    tags = ["lora", type(module.objective).__name__.lower()]
    if isinstance(module.weighting, VNetWeighting) and isinstance(module.vnet, VNet):
        tags.append("mwn-dpo" if isinstance(module.weighting.outer, CleanPreference) else "pacmr-dpo")
    path = (run.data["init_args"]["source"].get("init_args") or {}).get("path")
    return ModelCardData(
        base_model=hub_base,
        library_name="transformers" if merged else "peft",
        pipeline_tag="text-generation",
        datasets=[path] if path and on_hub(path) else None,
        tags=tags,
    ).to_yaml()


def weighting_settings(run: FinishedRun, module: PreferenceModule) -> dict[str, Any]:
    """Return the weighting's configuration, with its default classes."""
    parts = {name: getattr(module.weighting, name, None) for name in ("outer", "estimator")}
    classes = {name: {"class": type(part).__name__} for name, part in parts.items() if part is not None}
    given = public(run.model["init_args"].get("weighting") or {})
    return {"class": type(module.weighting).__name__, **classes, **given}
