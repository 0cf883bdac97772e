"""DeepSpeed strategy for a LoRA policy and for SFT, and the strategies that are refused.

With Lightning 2.6 and DeepSpeed 0.19 the engine may shard the optimizer's state (ZeRO-1), gradients (2) and
parameters (3). Its AdamW steps flat fp32 copies of this rank's parts of the parameters; DeepSpeed maps these
at stages 1 and 2, this file at stage 3.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from ..errors import UserError
from .sharding import is_sharded, whole

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state besides its step."""


class _AsLoaded(DeepSpeedPrecision):
    """Precision plugin that leaves the base's dtype alone, where Lightning's casts it to fp32."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module


class LoraDeepSpeedStrategy(DeepSpeedStrategy):
    """Lightning's ``DeepSpeedStrategy`` for training an adapter, with the same arguments.

    Differences:

    * A checkpoint is one file with trained parameters and AdamW's state, whole and in fp32, written through
      ``checkpoint_io``. Another number of processes, stage or strategy can resume it.
    * At stage 3 the base is loaded straight into partitions; the adapter is made outside, which keeps its
      initialization.
    * It also runs on CPUs (gloo), for tests.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hf_config: Any = None

    @property
    def root_device(self) -> torch.device:
        """The process's device; on CPUs with an index, which DeepSpeed needs."""
        return torch.device("cpu", 0) if self._on_cpu else super().root_device

    @property
    def _on_cpu(self) -> bool:
        return isinstance(self.accelerator, CPUAccelerator)

    def setup_environment(self) -> None:
        """Start the process group; Lightning's refuses CPUs."""
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

        # An optional CPU kernel that takes a compiler and half a minute to build.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def setup(self, trainer: Any) -> None:
        """Build the engine."""
        self.precision_plugin = _AsLoaded(self.precision_plugin.precision)  # type: ignore[arg-type]
        super().setup(trainer)
        if self.zero_stage_3:
            import deepspeed

            # A LoRA layer reads its submodules' weights, and so needs them in its own passes.
            module = self.lightning_module
            assert module is not None
            for layer in (each for each in module.modules() if isinstance(each, LoraLayer)):
                for parameter in (*layer.lora_A.parameters(), *layer.lora_B.parameters()):
                    deepspeed.zero.register_external_parameter(layer, parameter)

    def _init_config_if_needed(self) -> None:
        # Used only in a log; Lightning would read it from the loader's batch sampler, which is missing.
        assert self.config is not None
        self.config.setdefault("train_micro_batch_size_per_gpu", 1)
        super()._init_config_if_needed()
        # DeepSpeed's own offloaded AdamW needs a compiler.
        self.config.setdefault("zero_force_ds_cpu_optimizer", False)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Make transformers load the model into partitions at stage 3.

        Lightning's own context would also partition the adapter, and lose its initialization.
        """
        self._init_config_if_needed()
        if self.zero_stage_3:
            from transformers.integrations import HfDeepSpeedConfig

            policy = getattr(self.lightning_module, "policy", None)
            half = policy is not None and policy.dtype == torch.bfloat16
            assert self.config is not None
            # transformers holds it weakly, also for generation.
            self._hf_config = HfDeepSpeedConfig({**self.config, "bf16": {"enabled": half}})
        yield

    def teardown(self) -> None:
        """Restore transformers' state."""
        self._hf_config = None
        super().teardown()

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        """Return the whole trained parameters on the CPU; on other ranks than 0 without values."""
        place = "cpu" if self.is_global_zero else "meta"
        with whole(self._trained().values()):
            return {name: p.detach().to(place, copy=True) for name, p in self._trained().items()}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return AdamW's single-process ``state_dict`` on the CPU; a collective call."""
        from deepspeed.utils import safe_get_full_optimizer_state

        trained, base = list(self._trained().values()), optimizer.optimizer
        place = "cpu" if self.is_global_zero else "meta"  # other ranks' result is not saved
        groups = [{**group, "params": list(range(len(trained)))} for group in base.param_groups]
        steps = [base.state[flat]["step"] for flat in _flat_parameters(optimizer) if base.state[flat]]
        state = {
            i: {
                "step": steps[0].detach().cpu().clone(),
                **{key: safe_get_full_optimizer_state(p, key).to(place) for key in MOMENTS},
            }
            for i, p in enumerate(trained if steps else [])
        }
        return {"state": state, "param_groups": groups}

    # One file, which rank 0 writes and each rank reads; Lightning calls ``load_optimizer_state_dict``.
    save_checkpoint = Strategy.save_checkpoint
    load_checkpoint = Strategy.load_checkpoint
    lightning_restore_optimizer = True

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the trained parameters and the optimizer's copies of them."""
        values = checkpoint["state_dict"]
        with whole(self._trained().values(), change=True):
            for name, p in self._trained().items():
                p.data.copy_(values[name])
        for optimizer in self.optimizers:
            for name, p in self._trained().items():
                _set_part(optimizer, p, values[name])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of any strategy's AdamW state."""
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
    # DeepSpeed's own setter needs a size divisible by the ranks; the last part is padded otherwise.
    part, _ = optimizer._get_fp32_opt_state_partition(parameter, True, key)
    padded = value.new_zeros(part.numel() * torch.distributed.get_world_size())
    padded[: value.numel()] = value.flatten()
    part.data.copy_(padded[part.numel() * torch.distributed.get_rank() :][: part.numel()])


def _flat_parameters(optimizer: Any) -> list[Tensor]:
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return optimizer.fp32_partitioned_groups_flat
    return optimizer.single_partition_of_fp32_groups


def set_gradient(
    strategy: Strategy, parameters: Mapping[str, nn.Parameter], gradient: Mapping[str, Tensor]
) -> None:
    """Set the optimizer's next gradient: whole, by name, the same on all ranks."""
    if not isinstance(strategy, LoraDeepSpeedStrategy):
        for name, parameter in parameters.items():
            parameter.grad = gradient[name]
        return
    module = strategy.lightning_module
    assert module is not None
    # The engine takes gradients only from its own backward, so use a loss with this gradient.
    with whole(parameters.values()):
        loss = sum((p * gradient[name]).sum() for name, p in parameters.items())
        assert isinstance(loss, Tensor)
        module.manual_backward(loss)


def check_strategy(strategy: Strategy, quantization: str | None = None) -> None:
    """Raise UserError for strategies that shard or cast the adapter, or do not support ``quantization``."""
    if (precision := strategy.precision_plugin.precision) != "32-true":
        # LoRA layers set their products' dtype, the reference has no autocast, a cast base another digest.
        raise UserError(
            f"trainer.precision is {precision}, under which an adapter is not trained as it should be; leave "
            "it at 32-true, and for half precision set the policy's dtype, the base's, to bfloat16."
        )
    lora = isinstance(strategy, LoraDeepSpeedStrategy)
    plain = isinstance(strategy, (SingleDeviceStrategy, DDPStrategy))
    # Lightning's DeepSpeedStrategy is a DDPStrategy, too.
    if not lora and (isinstance(strategy, DeepSpeedStrategy) or not plain):
        fix = "use auto, ddp, or configs/strategies/zero1.yaml, zero2.yaml or zero3.yaml for DeepSpeed"
        if isinstance(strategy, DeepSpeedStrategy):
            stage = (strategy.config or {}).get("zero_optimization", {}).get("stage", 2)
            own = f"pacmr_lightning.strategies.LoraDeepSpeedStrategy(stage={stage})"
            fix = f"from Python give Trainer(strategy={own}), which takes the same arguments"
        raise UserError(
            f"trainer.strategy is {type(strategy).__name__}, with which an adapter is not trained as it "
            f"should be; {fix}."
        )
    if quantization and lora:
        # Stage 3 would separate packed weights from their scales; stages 1 and 2 are untested with 4 bits.
        raise UserError(
            f"quantization is {quantization}, with which no stage of DeepSpeed (ZeRO-1, 2, 3) is used; "
            "set trainer.strategy to auto or ddp, or quantization to null."
        )
