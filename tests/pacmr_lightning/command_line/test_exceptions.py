"""What is said of errors of torch's, for which there is no sentence of ours where they come from."""

import sys
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch

from pacmr_lightning import cli
from pacmr_lightning.command_line.exceptions import out_of_memory

from ...conftest import ended, fails

OF_A_GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0")


@pytest.mark.parametrize(
    ("error", "said"),
    [(OF_A_GPU, "(2.50 GiB requested"), (MemoryError(), "Out of memory; lower micro_batch_size")],
)
def test_out_of_memory(error, said, capsys, monkeypatch):
    def hungry():
        raise error

    tool = SimpleNamespace(hungry=hungry)
    monkeypatch.setitem(cli.TOOLS, "hungry", "")
    monkeypatch.setitem(sys.modules, "pacmr_lightning.commands.hungry", tool)
    assert said in fails(capsys, ["hungry"])


def test_the_machine_s_memory():
    """What torch really raises there; no other RuntimeError is taken for it."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert "bytes requested" in str(out_of_memory(caught.value))
    wrapped = ValueError("a hook failed")
    wrapped.__cause__ = RuntimeError("CUDA error: out of memory")
    assert "Out of memory; lower micro" in str(out_of_memory(wrapped))
    assert out_of_memory(RuntimeError("The size of tensor a must match")) is None
    circle = ValueError("raised again")
    circle.__cause__ = OSError("by a thread")
    circle.__cause__.__context__ = circle
    assert out_of_memory(circle) is None


def test_the_version(capsys):
    assert ended(capsys, ["--version"])[:2] == (0, f"pacmr-lightning {version('pacmr-lightning')}\n")
