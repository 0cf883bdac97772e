"""Tables of what a training costs: operations by method, and hours at a speed that the person gives."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..errors import UserError
from .time_estimate import Estimator, PairFlops, Plan, audit_flops, run_flops, update_flops

EXAMPLES = (0.2, 0.5)
"""Utilizations whose hours are shown where none is given."""


@dataclass(frozen=True)
class Speed:
    """What the person says of a device."""

    tflops: float | None
    utilization: float | None
    price: float | None
    """Of an hour of one device."""


def check(plan: Plan, speed: Speed) -> None:
    """Refuses what is out of range, before anything is counted.

    Raises:
        UserError: it is, or an option needs another that is not given.
    """
    if plan.pairs is not None and plan.updates < 1:
        raise UserError(
            f"pairs is {plan.pairs}, fewer than one batch of {plan.global_batch_size}; give more pairs or "
            "lower global_batch_size."
        )
    if not 0 <= plan.coverage <= 1:
        raise UserError(f"coverage is {plan.coverage}, but it is a share of the meta pairs, from 0 to 1.")
    for name in ("validation_pairs", "validations"):
        if getattr(plan, name) < 0:
            raise UserError(f"{name} is {getattr(plan, name)}, but it must not be negative.")
    given = {"device_tflops": speed.tflops, "gpu_hour": speed.price}
    for name, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{name} is {value}, but it must be above 0.")
    if speed.utilization is not None and not 0 < speed.utilization <= 1:
        raise UserError(
            f"utilization is {speed.utilization}, but it is a share of device_tflops, above 0 and at most 1 "
            "(0.4 is 40%)."
        )
    for name, value in (("utilization", speed.utilization), ("gpu_hour", speed.price)):
        if value is not None and speed.tflops is None:
            raise UserError(
                f"{name} is {value}, but device_tflops is not given; add the peak of one device, 989 for an "
                "H100 SXM in bfloat16."
            )
    if speed.price is not None and plan.pairs is None:
        raise UserError(f"gpu_hour is {speed.price}, but pairs is not given; add the number of pairs.")


def times(flops: PairFlops, plan: Plan, speed: Speed, kept: dict[int, int], vnet: bool) -> Table:
    """Operations by method and number of devices; hours, where the person says how fast a device is.

    ``kept`` is the number of pairs whose gradients an update of VNet keeps on each device, by devices.
    """
    shares: tuple[float, ...] = () if speed.tflops is None else EXAMPLES
    if speed.utilization is not None:
        shares = (speed.utilization,)
    caption = "PFLOP: 1e15 operations, over all devices."
    if shares:
        at = " and ".join(f"{100 * share:.3g}%" for share in shares)
        whose = (
            "which you gave" if speed.utilization is not None else "examples, since no utilization is given"
        )
        caption += f" Time: calculated, not measured, at {at} of {speed.tflops:g} TFLOP/s, {whose}."
    table = Table(box=SIMPLE_HEAD, caption=caption)
    whole = plan.pairs is not None
    columns = ["method", "devices", "PFLOP an update", *(["updates", "PFLOP in all"] if whole else [])]
    for share in shares:
        columns += [f"s an update, {100 * share:.3g}%", *([f"hours, {100 * share:.3g}%"] if whole else [])]
        columns += [f"price, {100 * share:.3g}%"] if speed.price is not None else []
    for name in columns:
        table.add_column(name, justify="left" if name == "method" else "right")
    methods: dict[str, tuple[Estimator | None, int]] = {"DPO": (None, 1)}
    if whole:
        methods["DPO, audit, second pass"] = (None, 2)
    if vnet:
        methods["PACMR-DPO, GhostDotProduct"] = ("GhostDotProduct", 1)
        methods["PACMR-DPO, CentralDifference"] = ("CentralDifference", 1)
    for method, (estimator, fits) in methods.items():
        for n in kept:
            update = update_flops(flops, plan, estimator, bool(kept[n]))
            total = run_flops(flops, plan, update, estimator is not None, fits)
            alone = audit_flops(flops, plan) if fits > 1 else 0
            values = [method, str(n), f"{update / 1e15:.3g}"]
            values += [f"{fits * plan.updates:,}", f"{(total + alone) / 1e15:,.4g}"] if whole else []
            for share in shares:
                assert speed.tflops is not None, "there are shares of it"
                rate = speed.tflops * 1e12 * share
                hours = (total / n + alone) / rate / 3600
                values += [f"{update / n / rate:.3g}", *([f"{hours:.1f}"] if whole else [])]
                values += [f"{hours * n * speed.price:,.2f}"] if speed.price is not None else []
            table.add_row(*values)
    return table
