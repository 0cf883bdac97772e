"""Checks of strategies."""

from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy

from ..errors import UserError
from .deepspeed import LoraDeepSpeedStrategy


def check_strategy(strategy: Strategy, quantization: str | None = None) -> None:
    """Raise UserError for strategies that shard or cast the adapter, or do not support ``quantization``."""
    if (precision := strategy.precision_plugin.precision) not in ("32-true", "64-true"):
        # LoRA layers set their products' dtype, and the cached reference is computed without autocast.
        raise UserError(
            f"trainer.precision is {precision}, under which an adapter is not trained as it should be; leave "
            "it at 32-true, and for half precision set the policy's dtype, the base's, to bfloat16."
        )
    lora = isinstance(strategy, LoraDeepSpeedStrategy)
    plain = isinstance(strategy, (SingleDeviceStrategy, DDPStrategy))
    if isinstance(strategy, DeepSpeedStrategy) and not lora:
        stage = (strategy.config or {}).get("zero_optimization", {}).get("stage", 2)
        raise UserError(
            f"trainer.strategy is {type(strategy).__name__}, with which an adapter is not trained as it "
            "should be; from Python give Trainer(strategy=pacmr_lightning.strategies.LoraDeepSpeedStrategy("
            f"stage={stage})), which takes the same arguments."
        )
    if not lora and not plain:
        raise UserError(
            f"trainer.strategy is {type(strategy).__name__}, with which an adapter is not trained as it "
            "should be; use auto, ddp, or configs/strategies/zero1.yaml, zero2.yaml or zero3.yaml for "
            "DeepSpeed."
        )
    if quantization and lora:
        # Stage 3 would separate packed weights from their scales; stages 1 and 2 are untested with 4 bits.
        raise UserError(
            f"quantization is {quantization}, with which no stage of DeepSpeed (ZeRO-1, 2, 3) is used; "
            "set trainer.strategy to auto or ddp, or quantization to null."
        )
