"""Names of other packages that are private or undocumented and that this one uses: each is still there.

A release may move any of them without a word, for which pyproject.toml bounds the packages from above. Here
is said which package moved what, before a run trips over it. That the table has them all is read off this
package's code: a new private name needs a row.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("pacmr_lightning", "datamodules", "callbacks")
ENGINE_1_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
ENGINE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
SHARDED = "deepspeed.runtime.zero.partition_parameters:Init"
LORA = "peft.tuners.lora:LoraLayer"
MODEL = "transformers:PreTrainedModel"
EPOCH_LOOP = "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop"
CHECKPOINT = "lightning.pytorch.callbacks:ModelCheckpoint"
THROUGHPUT = "lightning.pytorch.callbacks:ThroughputMonitor"

TABLE = {
    "callbacks/checkpoint.py": {
        "lightning": (
            f"{CHECKPOINT}._every_n_train_steps",
            f"{CHECKPOINT}._last_global_step_saved",
            f"{CHECKPOINT}._monitor_candidates",
            f"{CHECKPOINT}._save_checkpoint",
            f"{CHECKPOINT}._save_last_checkpoint",
            f"{CHECKPOINT}._save_topk_checkpoint",
            f"{CHECKPOINT}._should_skip_saving_checkpoint",
            f"{EPOCH_LOOP}._batches_that_stepped",
            f"{EPOCH_LOOP}.batch_progress",
            f"{EPOCH_LOOP}.val_loop",
            "lightning.pytorch.loops:_FitLoop.epoch_loop",
            "lightning.pytorch.loops:_FitLoop.epoch_progress",
        )
    },
    "callbacks/stop_signals.py": {"lightning": ("lightning.pytorch:Trainer._accelerator_connector",)},
    "callbacks/throughput.py": {
        "lightning": (
            f"{THROUGHPUT}._batches",
            f"{THROUGHPUT}._compute",
            f"{THROUGHPUT}._lengths",
            f"{THROUGHPUT}._samples",
            f"{THROUGHPUT}._start",
            f"{THROUGHPUT}._t0s",
            f"{THROUGHPUT}._throughputs",
            "lightning.fabric.utilities.throughput:Throughput._time",
        )
    },
    "datamodules/augmentation/seq2seq.py": {
        "transformers": ("transformers.utils:cached_file", "transformers.utils:extract_commit_hash")
    },
    "pacmr_lightning/evaluation/reward_model.py": {
        "transformers": ("transformers.utils:cached_file", "transformers.utils:extract_commit_hash")
    },
    "datamodules/hub.py": {"datasets": ("datasets:Dataset._fingerprint",)},
    "datamodules/sft.py": {"datasets": ("datasets:Dataset._fingerprint",)},
    "datamodules/splits.py": {"datasets": ("datasets:Dataset._fingerprint",)},
    "datamodules/tokenization.py": {"datasets": ("datasets:Dataset._fingerprint",)},
    "pacmr_lightning/policy/attention.py": {
        "transformers": (
            "transformers:PreTrainedConfig._attn_implementation",
            f"{MODEL}._supports_flash_attn",
            f"{MODEL}._supports_flex_attn",
            f"{MODEL}._supports_sdpa",
            f"{MODEL}.set_attn_implementation",
            "transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS.valid_keys",
            "transformers.utils:is_flash_attn_2_available",
            "transformers.utils:is_kernels_available",
        )
    },
    "pacmr_lightning/policy/compiled.py": {
        "torch": (
            "torch._dynamo.config:recompile_limit",
            "torch.nn:Module._forward_hooks",
            "torch.nn:Module._forward_pre_hooks",
        ),
        "transformers": ("transformers.modeling_layers:GradientCheckpointingLayer",),
    },
    "pacmr_lightning/runs/loggers.py": {
        "lightning": (
            "lightning.pytorch.loggers:CSVLogger._experiment",
            "lightning.pytorch.loggers.csv_logs:ExperimentWriter._check_log_dir_exists",
            "lightning.pytorch.loggers.csv_logs:ExperimentWriter._record_new_keys",
        )
    },
    "pacmr_lightning/policy/lora.py": {
        "peft": (f"{LORA}.lora_A", f"{LORA}.lora_B", f"{LORA}.lora_variant"),
    },
    "pacmr_lightning/policy/masks.py": {
        "transformers": ("transformers:PreTrainedConfig._attn_implementation",)
    },
    "pacmr_lightning/runs/live_bytes.py": {
        "torch": (
            "torch:UntypedStorage._cdata",
            "torch.utils._python_dispatch:TorchDispatchMode",
            "torch.utils._pytree:tree_leaves",
        )
    },
    "pacmr_lightning/runs/memory_estimate.py": {"torch": ("torch._subclasses.fake_tensor:FakeTensorMode",)},
    "pacmr_lightning/modules/preference.py": {
        "lightning": ("lightning.pytorch.core.mixins.hparams_mixin:_given_hyperparameters",)
    },
    "pacmr_lightning/gradient.py": {"torch": ("torch:_foreach_add_", "torch:_foreach_mul_")},
    "pacmr_lightning/ranks.py": {"torch": ("torch:_foreach_copy_",)},
    "pacmr_lightning/weighting/inner_gradient.py": {"torch": ("torch:_foreach_div_",)},
    "pacmr_lightning/command_line/parser.py": {
        "jsonargparse": ("jsonargparse._typehints:ActionTypeHint._typehint",)
    },
    "pacmr_lightning/command_line/proposals.py": {"jsonargparse": ("argparse:ArgumentParser._actions",)},
    "pacmr_lightning/policy/adapted_model.py": {
        "transformers": ("transformers:PreTrainedConfig._attn_implementation",)
    },
    "pacmr_lightning/strategies/sharding.py": {
        "deepspeed": (
            f"{SHARDED}.ds_id",
            f"{SHARDED}.ds_shape",
            f"{SHARDED}.ds_status",
            "deepspeed.runtime.zero.partition_parameters:ZeroParamStatus.NOT_AVAILABLE",
        )
    },
    "pacmr_lightning/strategies/optimizer_state.py": {
        "deepspeed": (
            f"{ENGINE_1_2}._lazy_init_hp_params_optimizer_state",
            f"{ENGINE_1_2}.optimizer",
            f"{ENGINE_1_2}.single_partition_of_fp32_groups",
            f"{ENGINE_3}._get_fp32_opt_state_partition",
            f"{ENGINE_3}.fp32_partitioned_groups_flat",
            f"{ENGINE_3}.optimizer",
        )
    },
    "pacmr_lightning/strategies/deepspeed.py": {
        "deepspeed": ("deepspeed.ops:__compatible_ops__",),
        "lightning": (
            "lightning.pytorch.strategies:DeepSpeedStrategy._init_config_if_needed",
            "lightning.pytorch.strategies:DeepSpeedStrategy._init_deepspeed_distributed",
        ),
    },
    "pacmr_lightning/commands/fit.py": {
        "lightning": (
            "lightning.pytorch.cli:LightningCLI._parse_ckpt_path",
            "lightning.pytorch.cli:LightningCLI._prepare_subcommand_parser",
            "lightning.pytorch.cli:LightningCLI._run_subcommand",
        )
    },
}
"""By the file that uses it and the package that has it: ``module:name``, or ``module:Class.attribute``."""

ROWS = [
    (package, place, file)
    for file, packages in TABLE.items()
    for package, places in packages.items()
    for place in places
]


@cache
def stores(found):
    """Names of all attributes that a class's code sets, such as ``self._name = ...``."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(found)))
    except (OSError, TypeError):  # written in C
        return set()
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def has(holder, name):
    """Whether a class declares the attribute, or sets it on its instances; else whether it is there."""
    if hasattr(holder, name):
        return True
    bases = holder.__mro__ if inspect.isclass(holder) else ()
    return any(name in vars(base).get("__annotations__", ()) or name in stores(base) for base in bases)


def is_there(place):
    module, _, path = place.partition(":")
    *holders, name = path.split(".")
    try:
        return has(pkgutil.resolve_name(f"{module}:{'.'.join(holders)}"), name)
    except (ImportError, AttributeError):
        return False


@pytest.mark.parametrize("package", sorted({package for package, _, _ in ROWS}))
def test_they_are_there(package):
    moved = [f"{place} (used in {file})" for of, place, file in ROWS if of == package and not is_there(place)]
    assert not moved, f"{package} {version(package)} moved {', '.join(moved)}"


def is_private(name):
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name != "_"


def is_own(found):
    return found.__module__.startswith("pacmr_lightning")


def attributes(bases):
    return {name for base in bases for name in (*vars(base), *stores(base))}


def of_self(node):
    """Whether it is an attribute of ``self``, ``cls`` or ``super()``."""
    value = node.value.func if isinstance(node.value, ast.Call) else node.value
    return isinstance(value, ast.Name) and value.id in ("self", "cls", "super")


def private_names(code, module):
    """Private names of other packages in the code of a module of this one.

    An attribute of anything but ``self`` is another package's, since no object of this one is asked for its
    private ones from outside. So is one of ``self``, or a method, that a foreign base class has too, or that
    no class of this package sets.
    """
    names, own = set(), set()
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names |= {*node.module.split("."), *(name.name for name in node.names)}
        elif isinstance(node, ast.Import):
            names |= {part for name in node.names for part in name.name.split(".")}
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            names.add(str(node.slice.value))
        elif isinstance(node, ast.ClassDef) and hasattr(module, node.name):
            bases = getattr(module, node.name).__mro__[:-1]
            defined = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
            asked = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and of_self(n)}
            foreign = (defined | asked) & attributes(base for base in bases if not is_own(base))
            foreign |= asked - attributes(base for base in bases if is_own(base))
            names |= foreign
            own |= asked - foreign
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (of_self(node) and node.attr in own):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


def module_of(path):
    dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return importlib.import_module(f"pacmr_lightning.{dotted.removeprefix('pacmr_lightning.')}")


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_table_has_all(folder):
    missing = []
    for path in (ROOT / folder).rglob("*.py"):
        if path.name == "__main__.py" or path == ROOT / "pacmr_lightning" / "__init__.py":
            continue
        file = str(path.relative_to(ROOT))
        rows = {part for _, place, at in ROWS if at == file for part in re.split("[:.]", place)}
        names = private_names(path.read_text(), module_of(path)) - rows
        missing += [f"{name} ({file})" for name in sorted(names)]
    assert not missing, f"private names of other packages that TABLE lacks: {', '.join(missing)}"


def test_a_new_name_is_noticed():
    from pacmr_lightning.commands import fit

    code = """
from torch._new import _function
import torch._newer
state["_key"] = trainer._connector

class PacmrCLI:
    def _run_subcommand(self):
        self._first_step = self._get(self.config) + self._new_folders
"""
    found = private_names(code, fit)
    assert found == {"_new", "_function", "_newer", "_key", "_connector", "_run_subcommand", "_get"}


@pytest.mark.parametrize("file", TABLE)
def test_the_table_has_no_more(file):
    """Attributes that a name is put together for (``f"_{name}"``) count by what stands behind their line."""
    code = (ROOT / file).read_text()
    names = [re.split("[:.]", place)[-1] for _, place, at in ROWS if at == file]
    unused = [name for name in names if not re.search(rf"\b_*{name.lstrip('_')}\b", code)]
    assert not unused, f"{file} does not use {', '.join(unused)}; take them out of TABLE"


def test_a_moved_name_is_noticed():
    assert is_there("lightning.pytorch:Trainer._accelerator_connector")
    for place in ("lightning.pytorch:Trainer._moved", "lightning.moved:Trainer", "torch.nn:Moved._hooks"):
        assert not is_there(place)
