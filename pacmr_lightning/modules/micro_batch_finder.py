"""Search for the largest micro-batch that fits into a GPU, with activations kept or recomputed.

This resolves ``micro_batch_size`` and ``gradient_checkpointing`` "auto" at the start of a fit, by trying. A
run's longest rows go forward and backward as in a step; if memory runs out, the next smaller size follows. A
try leaves nothing behind: no gradient, no drawn random number, no memory.
"""

import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from ..batch import MicroBatchSize, PairBatch, TokenBudget
from ..errors import UserError, is_out_of_memory
from ..policy import PolicyModel
from ..policy.numerics import Recomputed
from ..strategies.ranks import max_over_ranks, min_over_ranks
from ..strategies.sharding import shape
from ..waiting import waiting

GIB = 2**30
LIMIT = 0.9
"""Share of a GPU's memory that a try may take; fragments, NCCL's buffers and validation need the rest."""
BUSY = 4096
"""Tokens of a forward pass with fewer of which an H100 waits for Python (measured at 1.5B parameters)."""
RAN_OUT = sys.maxsize
"""Peak of a try for which there was too little memory."""


class Way(NamedTuple):
    """A way to run a step."""

    size: int
    """Pairs, or rows, of a forward pass."""
    recomputed: Recomputed
    """Activations that are recomputed in backward."""


class Fit(NamedTuple):
    """A way that fits, with the bytes in use at its peak and those of the GPU."""

    way: Way
    peak: int
    total: int

    def __str__(self) -> str:
        used, total = self.peak / GIB, self.total / GIB
        return f"a step with the longest rows took {used:.3g} of the GPU's {total:.3g} GiB (measured)"


def can_be_tried(device: torch.device) -> bool:
    """Return whether too much memory is refused, as by a CUDA GPU; a CPU's machine swaps, or kills."""
    return device.type == "cuda"


def chosen(options: dict[str, Any], why: object) -> str:
    """Return the sentence on options that were "auto", by their full names, which overrule it."""
    values = [f"{name.rpartition('.')[2]} auto is {str(value).lower()}" for name, value in options.items()]
    return f"{' and '.join(values)}: {why}; overrule by {' and '.join(options)}."


def fit_pairs(
    policy: PolicyModel,
    longest: PairBatch,
    size: MicroBatchSize | Literal["auto"],
    device: torch.device,
    *,
    meta: bool,
    kept: int,
) -> Fit:
    """Return the fastest way to run a step of pairs that fits; the policy recomputes accordingly.

    Args:
        policy: on its GPU; with ``gradient_checkpointing`` "auto" activations are kept, then recomputed in
            part, then all; under ZeRO-3, which is for models that hardly fit, all are recomputed.
        longest: as many of the longest pairs as a rank has in a step, by falling length.
        size: micro-batch; "auto" tries the divisors of their number.
        device: the GPU.
        meta: if true, pairs run at virtual parameters, which takes more memory.
        kept: pairs whose single gradients are held.
    """
    longest = move_data_to_device(longest, device)
    if isinstance(size, TokenBudget):
        longest, size = next(longest.micro_batches(size)), None
    pairs = len(longest)
    sizes = [n for n in range(pairs, 0, -1) if pairs % n == 0] if size == "auto" else [size or pairs]
    ways = [Way(n, policy.gradient_checkpointing) for n in sizes]
    if policy.asks_gradient_checkpointing:
        ways = [Way(n, True) for n in sizes]
        if not policy.is_sharded:
            # A GPU that waits for Python gains nothing by kept activations.
            busy = [n for n in sizes if n == sizes[0] or longest[:n].token_count >= BUSY]
            least: list[Recomputed] = [False] if policy.compiles else [False, "selective"]
            ways = [*(Way(n, recomputed) for recomputed in least for n in busy), *ways]
    parameters = list(policy.adapter().values())
    # AdamW's two moments, the sum over micro-batches, the last one's, and single pairs', in fp32.
    numbers = (4 + kept) * sum(shape(parameter).numel() for parameter in parameters)

    def step(way: Way) -> None:
        policy.recompute(way.recomputed)
        with policy.shifted(policy.zeros(), 1.0) if meta else nullcontext(), policy.forgets_outputs():
            held = torch.empty(numbers, dtype=torch.float32, device=parameters[0].device)
            gradients: Sequence[Tensor | None] = ()
            # The second forward pass runs beside the first gradients, as a step's does after the last one.
            for _ in range(2):
                log_probs = policy.log_probs(longest[: way.size])
                value = (log_probs.chosen - log_probs.rejected).sum()
                gradients = ()
                # Not backward(): it would leave gradients, and DDP would exchange them.
                gradients = torch.autograd.grad(value, parameters, allow_unused=True)
            del held, gradients

    policy.rows(longest[:1])  # chooses the layout, about which ranks send messages
    fit = first_that_fits(ways, step, device, policy.is_sharded)
    policy.recompute(fit.way.recomputed)
    return fit


def first_that_fits(
    ways: Sequence[Way], step: Callable[[Way], None], device: torch.device, sharded: bool = False
) -> Fit:
    """Return the first way whose ``step`` fits into the GPUs of all ranks, which try the same ways.

    The last one may take more than ``LIMIT``, if memory does not run out. A step sends no messages between
    ranks, so one without memory keeps none waiting; under ZeRO-3 (``sharded``) it does, and sizes are tried
    only up to that which one step of the last way shows to fit.

    Raises:
        UserError: no way fits.
    """
    total = torch.cuda.mem_get_info(device)[1]
    with waiting("Trying micro-batches on the GPU"), isolate_rng():
        if sharded:
            held, last = torch.cuda.memory_allocated(device), ways[-1]
            peak = peak_bytes(partial(step, last), device)
            times = 1 + int((LIMIT * total - peak) // max(1, peak - held))
            most = last.size * max(1, min_over_ranks(times, device))
            ways = [way for way in ways if way.size <= most]
        for way in ways:
            peak = peak_bytes(partial(step, way), device)
            ran_out = max_over_ranks(int(peak == RAN_OUT), device)
            full = max_over_ranks(int(peak > LIMIT * total), device)
            if not full or (way == ways[-1] and not ran_out):
                return Fit(way, peak, total)
    less = "lower" if way.recomputed is True else "set gradient_checkpointing to true, or lower"
    raise UserError(
        f"Out of memory: {way.size} of the longest rows in one forward pass do not fit into the GPU's "
        f"{total / GIB:.3g} GiB; {less} the batch or data.max_length; docs/memory.md has more."
    )


def peak_bytes(step: Callable[[], None], device: torch.device) -> int:
    """Return a GPU's bytes in use, other processes' included, at a step's peak; or ``RAN_OUT``."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    ran_out = False
    try:
        step()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        ran_out = True
    # Not in the clause, where the error's traceback keeps the step's tensors alive.
    gc.collect()
    free, total = torch.cuda.mem_get_info(device)
    peak = total - free - torch.cuda.memory_reserved(device) + torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)  # keep_gradients goes by the peak of the run's own steps
    return RAN_OUT if ran_out else peak
