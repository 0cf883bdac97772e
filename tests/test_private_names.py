"""Private or undocumented names of other packages that this one uses are still there, in each release."""

import inspect
import pkgutil
import re
from functools import cache

import pytest

OPTIMIZER_1_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
PARTITIONS = "deepspeed.runtime.zero.partition_parameters"

TABLE = {
    "argparse:ArgumentParser": "_actions",
    "datasets:Dataset": "_fingerprint",
    "deepspeed.ops": "__compatible_ops__",
    OPTIMIZER_1_2: "_lazy_init_hp_params_optimizer_state optimizer single_partition_of_fp32_groups",
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": (
        "_get_fp32_opt_state_partition fp32_partitioned_groups_flat optimizer"
    ),
    f"{PARTITIONS}:Init": "ds_id ds_shape ds_status",
    f"{PARTITIONS}:ZeroParamStatus": "NOT_AVAILABLE",
    "jsonargparse._loaders_dumpers": "get_yaml_default_loader",
    "jsonargparse._typehints": "NestedArg parse_value_or_config",
    "jsonargparse._typehints:ActionTypeHint": "_typehint",
    "lightning.pytorch:Trainer": "_accelerator_connector",
    "lightning.pytorch.callbacks:ModelCheckpoint": (
        "_every_n_epochs _every_n_train_steps _last_global_step_saved _last_time_checked _monitor_candidates "
        "_save_checkpoint _save_last_checkpoint _save_topk_checkpoint _should_save_on_train_epoch_end "
        "_should_skip_saving_checkpoint _train_time_interval"
    ),
    "lightning.pytorch.cli:LightningCLI": (
        "_add_instantiators _dump_config _parse_ckpt_path _prepare_subcommand_kwargs "
        "_prepare_subcommand_parser _run_subcommand _set_seed _subcommand_parsers"
    ),
    "lightning.pytorch.core.mixins.hparams_mixin": "_given_hyperparameters",
    "lightning.pytorch.loggers:CSVLogger": "_experiment",
    "lightning.pytorch.loggers:TensorBoardLogger": "_experiment",
    "lightning.pytorch.loggers.csv_logs:ExperimentWriter": "_check_log_dir_exists _record_new_keys",
    "lightning.pytorch.loops:_FitLoop": "epoch_loop epoch_progress",
    "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop": (
        "_batches_that_stepped batch_progress val_loop"
    ),
    "lightning.pytorch.strategies.launchers": "_MultiProcessingLauncher",
    "lightning.pytorch.strategies:DeepSpeedStrategy": "_init_config_if_needed _init_deepspeed_distributed",
    "lightning.pytorch.trainer.connectors.callback_connector:_CallbackConnector": "_default_root_dir",
    "peft:LoraConfig": "_register_custom_module",
    "peft.tuners.lora:Linear": "_active_adapter _disable_adapters lora_A lora_B lora_variant merged_adapters",
    "peft.tuners.tuners_utils": "_maybe_include_all_linear_layers",
    "torch": "_foreach_add_ _foreach_copy_ _foreach_mul_",
    "torch:Tensor": "_is_view",
    "torch._ops": "OpOverload",
    "torch._dynamo.config": "recompile_limit specialize_float",
    "torch.utils._python_dispatch": "TorchDispatchMode",
    "torch.utils.checkpoint": "_CachedTorchDispatchMode",
    "transformers:PreTrainedConfig": "_attn_implementation",
    "transformers:PreTrainedModel": "_supports_flash_attn _supports_sdpa set_attn_implementation",
    "transformers.modeling_layers": "GradientCheckpointingLayer",
    "transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS": "valid_keys",
    "transformers.utils": "cached_file extract_commit_hash",
}
"""Names by the module, or ``module:Class``, that has them."""


def is_there(holder, name):
    """Whether a module or class has the attribute, or the code of a class sets it on its instances."""
    try:
        found = pkgutil.resolve_name(holder)
    except (ImportError, AttributeError):
        return False
    bases = found.__mro__[:-1] if inspect.isclass(found) else ()
    return hasattr(found, name) or any(
        re.search(rf"\.{name}\b(?:: [^=]+)? = |^ +{name}:", source(base), re.M) for base in bases
    )


@cache
def source(found):
    try:
        return inspect.getsource(found)
    except (OSError, TypeError):  # written in C
        return ""


@pytest.mark.parametrize("holder", TABLE)
def test_they_are_there(holder):
    moved = [name for name in TABLE[holder].split() if not is_there(holder, name)]
    assert not moved, f"{holder} moved {', '.join(moved)}"
