"""Runs a command of pacmr on the stand-in GPU: ``python run.py GUARD.so fit --config ...``.

Lightning is asked for a CPU and given the stand-in, since it would look for a driver.
"""

# ruff: noqa: E402

import contextlib
import ctypes
import sys

ctypes.CDLL(sys.argv.pop(1), mode=ctypes.RTLD_GLOBAL)  # torch looks for it when it is imported

import lightning.fabric.fabric
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from stand_in import DeviceMismatch, OnGpu, stand_in_gpu
from torch.utils._pytree import tree_map

from pacmr_lightning.cli import main

strategy, save = SingleDeviceStrategy.__init__, torch.save


def on_the_stand_in(self, device="cpu", *args, **options):
    strategy(self, "cuda:0", *args, **options)


def save_values(found, *args, **options):
    save(tree_map(lambda x: x.detach().inner if isinstance(x, OnGpu) else x, found), *args, **options)


SingleDeviceStrategy.__init__ = on_the_stand_in
CPUAccelerator.setup_device = lambda self, device: None
lightning.fabric.fabric.Fabric.to_device = lambda self, module: module.to("cuda:0")
torch.save = save_values
torch.cuda.mem_get_info = lambda device=None: (2**36, 2**36)
torch.cuda.reset_peak_memory_stats = lambda device=None: None
torch.cuda.get_device_name = lambda device=None: "stand-in"
torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
torch.cuda.set_rng_state = lambda state, device=None: None

with stand_in_gpu():
    there = torch.arange(4.0, device="cuda")
    for mixed in (lambda: there + torch.ones(4), lambda: torch.ones(4)[there.long()]):
        with contextlib.suppress(DeviceMismatch):
            mixed()
            sys.exit("the stand-in does not refuse tensors of two devices")
    main(sys.argv[1:])
