"""What Lightning's DeepSpeed strategy lacks for a LoRA policy, and its form for CPUs.

Measured with Lightning 2.6 and DeepSpeed 0.19. The engine owns the policy's optimizer and may shard its
state (ZeRO-1), its gradients (2) and all parameters (3); adapters stay fp32 over a base of any dtype.
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
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn

from ..errors import UserError
from .sharding import whole

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
        """Starts the processes' group; Lightning's own refuses CPUs here."""
        if self._on_cpu:
            DDPStrategy.setup_environment(self)
        else:
            super().setup_environment()

    def setup_distributed(self) -> None:
        """Connects the processes."""
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
        """Builds the engine.

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
        """Leaves transformers as it was."""
        self._hf_config = None
        super().teardown()

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        """The trained parameters, whole, on the CPU; of ranks other than 0 nothing is used."""
        with whole(self._trained().values()):
            return {name: p.detach().cpu().clone() for name, p in self._trained().items()}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """AdamW's ``state_dict`` as a single process has it; all ranks take part."""
        from deepspeed.utils import safe_get_full_optimizer_state

        base = optimizer.optimizer
        names = list(self._trained())
        groups = [{**group, "params": list(range(len(names)))} for group in base.param_groups]
        steps = [base.state[flat]["step"] for flat in _flat_parameters(optimizer) if base.state[flat]]
        if not steps:
            return {"state": {}, "param_groups": groups}
        state = {
            i: {
                "step": steps[0].detach().cpu().clone(),
                **{key: safe_get_full_optimizer_state(p, key).cpu() for key in MOMENTS},
            }
            for i, p in enumerate(self._trained().values())
        }
        return {"state": state, "param_groups": groups}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes one file from rank 0."""
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads the file on each rank."""
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning restores the optimizer, through ``load_optimizer_state_dict``."""
        return True

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Puts the trained parameters, and the optimizer's copies of them, in their places."""
        values = checkpoint["state_dict"]
        with whole(self._trained().values(), change=True):
            for name, p in self._trained().items():
                p.data.copy_(values[name])
        for optimizer in self.optimizers:
            for name, p in self._trained().items():
                _set(optimizer, p, values[name])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Cuts AdamW's state to this rank's part."""
        optimizers: list[Any] = self.optimizers
        for optimizer, saved in zip(optimizers, checkpoint["optimizer_states"], strict=True):
            base = optimizer.optimizer
            for group, kept in zip(base.param_groups, saved["param_groups"], strict=True):
                group.update({key: value for key, value in kept.items() if key != "params"})
            if not saved["state"]:
                continue
            for flat in _flat_parameters(optimizer):
                zeros = {key: torch.zeros_like(flat) for key in MOMENTS}
                base.state[flat] = {"step": saved["state"][0]["step"].clone(), **zeros}
            if not self.zero_stage_3:
                optimizer._lazy_init_hp_params_optimizer_state()
            for i, p in enumerate(self._trained().values()):
                for key in MOMENTS:
                    _set(optimizer, p, saved["state"][i][key], key)

    def _trained(self) -> dict[str, nn.Parameter]:
        module = self.lightning_module
        assert module is not None
        return {name: p for name, p in module.named_parameters() if p.requires_grad}


def check_strategy(strategy: Strategy, quantization: str | None = None) -> None:
    """Refuses strategies under which the method's steps would go wrong.

    Args:
        strategy: the trainer's.
        quantization: the policy's.

    Raises:
        UserError: the strategy cuts parameters into pieces that only it knows, or casts the adapter; or it
            cannot hold a quantised base.
    """
    own = not isinstance(strategy, DeepSpeedStrategy) or isinstance(strategy, LoraDeepSpeedStrategy)
    if isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)) and own:
        if quantization and isinstance(strategy, LoraDeepSpeedStrategy):
            # Stage 3 would cut packed weights apart from their scales, of which it knows nothing; at 1 and 2
            # an adapter saves nothing that counts, and nobody has looked whether the engine keeps 4 bits.
            raise UserError(
                f"quantization is {quantization}, with which no stage of DeepSpeed (ZeRO-1, 2, 3) is used; "
                "set trainer.strategy to auto or ddp, or quantization to null."
            )
        return
    raise UserError(
        f"trainer.strategy is {type(strategy).__name__}, with which an adapter is not trained as it should "
        "be; use auto, ddp, or configs/strategies/zero1.yaml, zero2.yaml or zero3.yaml for DeepSpeed."
    )


def set_gradient(
    strategy: Strategy, parameters: Mapping[str, nn.Parameter], gradient: Mapping[str, Tensor]
) -> None:
    """Gives the optimizer a gradient for its next step, whoever owns the optimizer.

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


def check_precision(
    optimizer: Any, parameters: Mapping[str, nn.Parameter], gradient: Mapping[str, Tensor]
) -> None:
    """Asserts that the adapter, its gradient and the optimizer's state are in fp32, under any base.

    Args:
        optimizer: the trainer's, after its first step.
        parameters: the trained parameters by name.
        gradient: their gradient by name.
    """
    base = optimizer.optimizer
    # DeepSpeed's wraps torch's.
    base = getattr(base, "optimizer", base)
    states = {
        f"the optimizer's {key}": value
        for state in base.state.values()
        for key, value in state.items()
        if torch.is_tensor(value)
    }
    for name, tensor in {**parameters, **gradient, **states}.items():
        assert tensor.dtype in (torch.float32, torch.float64), f"{name} is {tensor.dtype}, not fp32"


def _flat_parameters(optimizer: Any) -> list[Tensor]:
    """This rank's fp32 parts of the trained parameters, which the engine's AdamW steps."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return optimizer.fp32_partitioned_groups_flat
    return optimizer.single_partition_of_fp32_groups


def _set(optimizer: Any, parameter: nn.Parameter, value: Tensor, key: str | None = None) -> None:
    """Writes this rank's part of a whole tensor: of AdamW's state ``key``, or of its fp32 copy."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    value = value.to(parameter.device)
    if not hasattr(parameter, "ds_id"):
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
