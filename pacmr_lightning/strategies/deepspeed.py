"""What Lightning's DeepSpeed strategy lacks for a LoRA policy, and its form for CPUs.

Measured with Lightning 2.6 and DeepSpeed 0.19. The engine owns the policy's optimizer and may shard its
state (ZeRO-1), its gradients (2) and all parameters (3); adapters stay fp32 over a base of any dtype. Its
AdamW does not step the parameters but flat fp32 copies of this rank's parts of them, which at stages 1 and 2
DeepSpeed maps to the parameters and back, and at stage 3 this file does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from torch import Tensor, nn

from ..errors import UserError
from .sharding import is_sharded, whole

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state beside its step."""


class _AsLoaded(DeepSpeedPrecision):
    """Lightning's own casts the base too, to fp32."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module


class LoraDeepSpeedStrategy(DeepSpeedStrategy):
    """Lightning's ``DeepSpeedStrategy`` for models of which an adapter is trained.

    It takes the same arguments, and differs in this:

    * Checkpoints are those of every other strategy: one file with the trained parameters and AdamW's state,
      whole and in fp32, written through the trainer's ``checkpoint_io``. A run can go on with another number
      of processes, another stage, or without DeepSpeed.
    * At stage 3 the base is loaded from its shards straight into partitions (transformers does it), and the
      adapter is made outside, where its initialisation is kept.
    * The adapter's precision is its own: a half-precision ``trainer.precision``, which would cast it, is
      refused.
    * It runs on CPUs too (gloo, any number of processes), for tests.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hf_config: Any = None

    @property
    def root_device(self) -> torch.device:
        """The process's device; on CPUs with an index, which DeepSpeed asks for."""
        return torch.device("cpu", 0) if self._on_cpu else super().root_device

    @property
    def _on_cpu(self) -> bool:
        return isinstance(self.accelerator, CPUAccelerator)

    def setup_environment(self) -> None:
        """Start the processes' group; Lightning's own refuses CPUs here."""
        if self._on_cpu:
            DDPStrategy.setup_environment(self)
        else:
            super().setup_environment()

    def setup_distributed(self) -> None:
        """Connect the processes."""
        if not self._on_cpu:
            super().setup_distributed()
            return
        import deepspeed

        # An optional kernel for CPUs that are one machine; building it takes a compiler and half a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def setup(self, trainer: Any) -> None:
        """Build the engine.

        Raises:
            UserError: the trainer's precision would cast the adapter.
        """
        precision = self.precision_plugin.precision
        if precision != "32-true":
            raise UserError(
                f"trainer.precision is {precision}, under which DeepSpeed casts the adapter; leave it at "
                "32-true and set the policy's dtype to bfloat16, which is the base's alone."
            )
        self.precision_plugin = _AsLoaded(precision)
        super().setup(trainer)

    def _init_config_if_needed(self) -> None:
        # For DeepSpeed's log of throughput alone; Lightning would ask the loader's batch sampler, of which
        # there is none.
        assert self.config is not None
        self.config.setdefault("train_micro_batch_size_per_gpu", 1)
        super()._init_config_if_needed()
        # torch's AdamW also where the state is offloaded: it is an adapter's, and DeepSpeed's own needs a
        # compiler.
        self.config.setdefault("zero_force_ds_cpu_optimizer", False)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """While the model is made: tells transformers to load it into partitions at stage 3.

        Not Lightning's own context, under which the adapter too would be made in partitions, and lose its
        initialisation.
        """
        self._init_config_if_needed()
        if self.zero_stage_3:
            from transformers.integrations import HfDeepSpeedConfig

            policy = getattr(self.lightning_module, "policy", None)
            half = policy is not None and policy.dtype == torch.bfloat16
            assert self.config is not None
            # transformers holds it weakly, and asks it again when it generates.
            self._hf_config = HfDeepSpeedConfig({**self.config, "bf16": {"enabled": half}})
        yield

    def teardown(self) -> None:
        """Leave transformers as it was."""
        self._hf_config = None
        super().teardown()

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        """The trained parameters, whole, on the CPU; of ranks other than 0 nothing is used."""
        with whole(self._trained().values()):
            return {name: p.detach().cpu().clone() for name, p in self._trained().items()}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """AdamW's ``state_dict`` as a single process has it, on the CPU; all ranks take part."""
        from deepspeed.utils import safe_get_full_optimizer_state

        trained, base = list(self._trained().values()), optimizer.optimizer
        groups = [{**group, "params": list(range(len(trained)))} for group in base.param_groups]
        steps = [base.state[flat]["step"] for flat in _flat_parameters(optimizer) if base.state[flat]]
        state = {
            i: {
                "step": steps[0].detach().cpu().clone(),
                **{key: safe_get_full_optimizer_state(p, key).cpu() for key in MOMENTS},
            }
            for i, p in enumerate(trained if steps else [])
        }
        return {"state": state, "param_groups": groups}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write one file from rank 0."""
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read the file on each rank."""
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning restores the optimizer, through ``load_optimizer_state_dict``."""
        return True

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Put the trained parameters, and the optimizer's copies of them, in their places."""
        values = checkpoint["state_dict"]
        with whole(self._trained().values(), change=True):
            for name, p in self._trained().items():
                p.data.copy_(values[name])
        for optimizer in self.optimizers:
            for name, p in self._trained().items():
                _set_part(optimizer, p, values[name])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Cut AdamW's state, of whatever strategy, to this rank's part."""
        optimizers: list[Any] = self.optimizers
        trained = list(self._trained().values())
        for optimizer, saved in zip(optimizers, checkpoint["optimizer_states"], strict=True):
            base = optimizer.optimizer
            for group, kept in zip(base.param_groups, saved["param_groups"], strict=True):
                group.update({key: value for key, value in kept.items() if key != "params"})
            if not saved["state"]:
                continue
            for flat in _flat_parameters(optimizer):
                zeros = {key: torch.zeros_like(flat) for key in MOMENTS}
                base.state[flat] = {"step": saved["state"][0]["step"].clone(), **zeros}
            if not any(map(is_sharded, trained)):
                optimizer._lazy_init_hp_params_optimizer_state()
            for i, p in enumerate(trained):
                for key in MOMENTS:
                    _set_part(optimizer, p, saved["state"][i][key], key)

    def _trained(self) -> dict[str, nn.Parameter]:
        module = self.lightning_module
        assert module is not None
        return {name: p for name, p in module.named_parameters() if p.requires_grad}


def _set_part(optimizer: Any, parameter: nn.Parameter, value: Tensor, key: str | None = None) -> None:
    """Write this rank's part of a whole tensor: of AdamW's state ``key``, or of its fp32 copy."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    value = value.to(parameter.device)
    if not is_sharded(parameter):
        if key is None:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, key)
        return
    # DeepSpeed's own setter wants a size that the ranks divide; the last part is padded where they do not.
    part, _ = optimizer._get_fp32_opt_state_partition(parameter, True, key)
    padded = value.new_zeros(part.numel() * torch.distributed.get_world_size())
    padded[: value.numel()] = value.flatten()
    part.data.copy_(padded[part.numel() * torch.distributed.get_rank() :][: part.numel()])


def _flat_parameters(optimizer: Any) -> list[Tensor]:
    """This rank's fp32 parts of the trained parameters, which the engine's AdamW steps."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return optimizer.fp32_partitioned_groups_flat
    return optimizer.single_partition_of_fp32_groups


def set_gradient(
    strategy: Strategy, parameters: Mapping[str, nn.Parameter], gradient: Mapping[str, Tensor]
) -> None:
    """Give the optimizer a gradient for its next step, whoever owns the optimizer.

    Args:
        strategy: the trainer's.
        parameters: the trained parameters by name.
        gradient: by name, whole, the same on all ranks.
    """
    if not isinstance(strategy, LoraDeepSpeedStrategy):
        for name, parameter in parameters.items():
            parameter.grad = gradient[name]
        return
    module = strategy.lightning_module
    assert module is not None
    # The engine takes gradients from its own backward only, so it gets a loss that has this one.
    with whole(parameters.values()):
        loss = sum((p * gradient[name]).sum() for name, p in parameters.items())
        assert isinstance(loss, Tensor)
        module.manual_backward(loss)
