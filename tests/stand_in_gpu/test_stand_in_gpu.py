"""Whole commands on a stand-in GPU, where tensors of two devices cannot be mixed: the same as on the CPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch.utils import cpp_extension

from pacmr_lightning import cli

HERE = Path(__file__).parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    """Runs a command of pacmr on the stand-in, with ``guard.cpp`` as a library."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not there to compile the stand-in GPU's guard")
    library = tmp_path_factory.mktemp("guard") / "guard.so"
    torch_library = Path(torch.__file__).parent / "lib"
    command = ["g++", "-std=c++20", "-shared", "-fPIC", str(HERE / "guard.cpp"), "-o", str(library)]
    command += [f"-I{path}" for path in cpp_extension.include_paths()]
    command += [f"-L{torch_library}", f"-Wl,-rpath,{torch_library}", "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True)

    def run(*words: object) -> None:
        # What other threads do is not seen by the stand-in, such as transformers' loading of weights.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_DEACTIVATE_ASYNC_LOAD": "1"}
        command = [sys.executable, str(HERE / "run.py"), str(library), *map(str, words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]

    return run


@pytest.fixture
def words(inside, tiny_llama):
    tiny_llama("model")
    found = """
        fit --config quickstart/preference --model.policy.model model --data.source.pairs 192
        --data.source.validation_pairs 32 --data.noise_rate 0.3 --trainer.accelerator cpu
        --model.micro_batch_size auto --model.policy.gradient_checkpointing auto
        --trainer.limit_train_batches 6 --trainer.precision 32
    """
    return found.split()


def adapter(run: str) -> torch.Tensor:
    state = torch.load(Path(run, "checkpoints", "last.ckpt"), weights_only=True)["state_dict"]
    return torch.cat([value.flatten() for name, value in sorted(state.items()) if "lora_B" in name])


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dpo", []),
        ("pacmr", ["--model.weighting.every", "2", "--model.policy.layout", "separate"]),
        ("pacmr", ["--model.weighting.every", "2", "--model.weighting.estimator", "GhostDotProduct"]),
    ],
    ids=["dpo", "pacmr-separate", "pacmr-ghost"],
)
def test_a_fit(method, options, words, gpu):
    """With its callbacks, and gone on with; rows are padded on a GPU, so the last digits are others."""
    words = [*words, "--config", f"methods/{method}", *options, "--trainer.default_root_dir"]
    cli.main([*words, "here"])
    gpu(*words, "there")
    here, there = adapter("here"), adapter("there")
    assert (here - there).norm() <= 1e-3 * here.norm()
    gpu(*words, "there", "--ckpt_path", "last", "--trainer.max_epochs", "2")
    assert not torch.equal(adapter("there"), there)


def test_an_audit(words, gpu):
    cli.main([*words, "--config", "methods/dpo", "--trainer.default_root_dir", "run"])
    audit = ["audit", "run", "--scorer", "policy", "--noise_rate", "0.3", "--output"]
    cli.main([*audit, "here"])
    gpu(*audit, "there")
    here, there = (pd.read_parquet(Path(name, "pairs.parquet")).set_index("id") for name in ("here", "there"))
    assert (here["u"] - there["u"].reindex(here.index)).abs().max() < 1e-4
