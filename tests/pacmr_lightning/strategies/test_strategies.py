"""DDP and DeepSpeed's ZeRO stages against one process: the same run, wherever its parts lie."""

import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from transformers import AutoModelForCausalLM

from pacmr_lightning.errors import UserError
from pacmr_lightning.strategies import check_strategy

ALONE = ("single", "single-central", "single-few", "single-guarded")
ALONE_SLOW = (
    *("single-cached", "single-from:../together/zero3"),
    *("zero1", "zero2-offload", "zero3-checkpointing-offload"),
)
# Stage 3 last: DeepSpeed then replaces torch's linear function for good.
TOGETHER = (
    *("ddp-tokens", "ddp-disagree", "ddp-guarded", "zero1", "zero2-micro-packed-selective"),
    "zero3-few-packed-selective",
)
TOGETHER_SLOW = (
    *("ddp-bf16", "ddp-few", "zero2-bf16", "zero3-bf16", "zero3-whole-bf16"),
    *("ddp-bf16-half", "zero3-bf16-half"),
    *("zero3", "zero3-micro-central-packed-selective", "zero3-cached", "zero2-from:zero3"),
    *("zero3-from:zero1", "zero3-guarded"),
)
RUN_SCRIPT = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def launch(forked, base, folder, processes, cases):
    """Starts the group as torchrun does, and returns the cases' results, of which each has a file."""
    folder.mkdir(exist_ok=True)
    # As torchrun's agent it owns the store that the processes meet at, so that no port is free for others.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    script = Path(__file__).with_name("strategy_runs.py")
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "GROUP_RANK": "0"}
    group |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    group |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    group |= {"TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": "1"}
    running = [
        forked(RUN_SCRIPT, script, base, folder, *cases, merge=True, **group, RANK=rank, LOCAL_RANK=rank)
        for rank in map(str, range(processes))
    ]
    try:
        outputs = [process.communicate(timeout=3600)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for process, output in zip(running, outputs, strict=True):
        assert process.returncode == 0, output[-3000:]
    return {case: torch.load(folder / f"{case.replace('/', '_')}.pt") for case in cases}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def alone(forked, base, folder):
    return launch(forked, base, folder / "alone", 1, ALONE)


@pytest.fixture(scope="module")
def together(forked, base, folder):
    return launch(forked, base, folder / "together", 2, TOGETHER)


@pytest.fixture(scope="module")
def all_alone(forked, base, folder, alone, all_together):
    """With the slow cases, one of which goes on from a checkpoint of two processes."""
    return alone | launch(forked, base, folder / "alone", 1, ALONE_SLOW)


@pytest.fixture(scope="module")
def all_together(forked, base, folder, together):
    return together | launch(forked, base, folder / "together", 2, TOGETHER_SLOW)


def distance(found, expected):
    """Largest difference of the adapter's and of VNet's parameters, and of what was logged."""
    parts = []
    for part in ("adapter", "vnet"):
        assert found[part].keys() == expected[part].keys()
        parts.append(max(float((found[part][k] - v).abs().max()) for k, v in expected[part].items()))
    logged = expected["metrics"].items()
    return *parts, max(abs(found["metrics"][name] - value) for name, value in logged)


def assert_same(found, expected, tolerance=1e-4):
    assert found["updates"] == expected["updates"] > 0
    adapter, vnet, metrics = distance(found, expected)
    assert adapter < tolerance and vnet < tolerance and metrics < 10 * tolerance


def test_it_learns_something(alone):
    moved = [v for k, v in alone["single"]["adapter"].items() if "lora_B" in k]
    assert min(float(v.abs().max()) for v in moved) > 1e-3
    assert max(distance(alone["single"], alone["single-central"])[:2]) > 1e-4


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("group", "case", "expected"),
    [
        *(slow("all_alone", case, "single") for case in ALONE_SLOW if case.startswith("zero")),
        # With distinct pairs on each rank, uneven shares of validation, and packed micro-batches in one case.
        *(("together", case, "single") for case in TOGETHER if not {"few", "guarded"} & {*case.split("-")}),
        # From disk: rank 1 has no part of the reference's of its own to compute.
        slow("all_together", "zero3-cached", "single-cached"),
        slow("all_together", "zero3", "single"),
        slow("all_together", "zero3-from:zero1", "single"),
        slow("all_together", "zero3-micro-central-packed-selective", "single-central"),
        slow("all_together", "zero2-from:zero3", "single"),
        slow("all_alone", "single-from:../together/zero3", "single"),
    ],
)
def test_equal_to_one_process(request, group, case, expected):
    alone = request.getfixturevalue("all_alone" if "cached" in expected else "alone")
    assert_same(request.getfixturevalue(group)[case], alone[expected])


@pytest.mark.parametrize(
    ("case", "group"), [("zero3-few-packed-selective", "together"), slow("ddp-few", "all_together")]
)
def test_a_rank_without_retained_meta_pairs(alone, request, case, group):
    """A meta-batch of two pairs, one per rank, of which one is retained: more ranks than pairs."""
    found = request.getfixturevalue(group)[case]
    assert 0.5 in found["coverage"]
    assert found["coverage"] == alone["single-few"]["coverage"]
    assert_same(found, alone["single-few"])


def test_a_base_in_4_bits(forked, make_base, folder):
    """DDP sends packed weights from rank 0; their scales are each process's own, and the same."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes, the extra quantization, is not installed")
    wide, own = make_base(64), folder / "4bit"  # inputs of whole blocks
    alone = launch(forked, wide, own, 1, ["single-4bit"])["single-4bit"]
    together = launch(forked, wide, own, 2, ["ddp-4bit"])["ddp-4bit"]
    assert_same(together, alone)
    assert "torch.uint8" in together["held"]["base_dtypes"]
    assert min(float(v.abs().max()) for k, v in alone["adapter"].items() if "lora_B" in k) > 1e-3


def test_stage_3_keeps_parts_only(base, alone, together):
    """A half, rounded up, of all numbers; Adam has two for each of the adapter's."""
    held = together["zero3-few-packed-selective"]["held"]
    assert held["base_here"] == held["adapter_here"] == 0
    weights = AutoModelForCausalLM.from_pretrained(base).num_parameters()
    adapter = sum(v.numel() for v in alone["single"]["adapter"].values())
    for part, whole in (("base_part", weights), ("adapter_part", adapter), ("optimizer", 2 * adapter)):
        assert whole / 2 <= held[part] < 0.51 * whole


def test_processes_that_disagree_on_a_layout(together):
    """All take the next one where one of them sees a fault, and none waits for another."""
    layouts = [together[case]["layout"] for case in ("ddp-tokens", "ddp-disagree")]
    assert layouts == ["shared", "separate"]


@pytest.mark.slow
def test_half_precision_base(all_together):
    """fp32 adapters over a bf16 base: ZeRO-2 is DDP bit for bit, and nothing casts the base."""
    for found in (found for case, found in all_together.items() if "bf16" in case):
        assert found["held"]["base_dtypes"] == {"torch.bfloat16"}
        assert {v.dtype for v in found["adapter"].values()} == {torch.float32}
    assert max(distance(all_together["zero2-bf16"], all_together["ddp-bf16"])) == 0.0
    # At stage 3 the fp32 sums differ in their last bits, which a bf16 forward pass makes larger.
    for more in ("", "-half"):
        zero3, ddp = (all_together[f"{name}-bf16{more}"] for name in ("zero3", "ddp"))
        assert max(distance(zero3, ddp)[:1]) < 1e-2
    assert max(distance(all_together["ddp-bf16-half"], all_together["ddp-bf16"])[:1]) > 0
    # By DeepSpeed's default small parameters stay whole, which before 0.19.3 it gathered as if of one dtype.
    assert max(distance(all_together["zero3-whole-bf16"], all_together["zero3-bf16"])) == 0.0


def test_lightnings_deepspeed_is_refused():
    """From Python; of the command line's strategies: test_trainer_flags.py, test_groups.py."""
    with pytest.raises(UserError, match=r"from Python give .*LoraDeepSpeedStrategy\(stage=3\)"):
        check_strategy(DeepSpeedStrategy(stage=3))
    with pytest.raises(UserError, match=r"FSDPStrategy.*zero2\.yaml"):
        check_strategy(FSDPStrategy())


RANK = """
import json, sys, torch
from datetime import timedelta
from pacmr_lightning.modules.micro_batch_finder import Way, first_that_fits
from pacmr_lightning.errors import UserError
rank, store = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
torch.cuda.mem_get_info = lambda device: (100, 100)
torch.cuda.max_memory_allocated = lambda device: 0
torch.cuda.reset_peak_memory_stats = lambda device: None
def choose(room):
    tried = []
    def step(way):
        tried.append(way.size)
        if rank == 1 and way.size > room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
    try:
        found = first_that_fits([Way(n, False) for n in (8, 4, 2, 1)], step, torch.device("cpu")).way.size
    except UserError as error:
        found = "UserError"
    return [found, tried]
print(json.dumps([choose(3), choose(0)]))
"""


def test_ranks_choose_alike(forked, tmp_path):
    """Memory runs out on one of two processes; neither waits for the other."""
    running = [forked(RANK, rank, tmp_path / "store") for rank in ("0", "1")]
    for process in running:
        out = process.communicate(timeout=300)[0]
        assert process.returncode == 0, out
        found = json.loads(out.strip().splitlines()[-1])
        assert found == [[2, [8, 4, 2]], ["UserError", [8, 4, 2, 1]]]


@pytest.mark.parametrize(
    ("case", "group"), [("ddp-guarded", "together"), slow("zero3-guarded", "all_together")]
)
def test_kl_guard_stops_all_processes(alone, request, case, group):
    """At one update, and on all of them the adapter and VNet of the update before are back."""
    found, expected = request.getfixturevalue(group)[case], alone["single-guarded"]
    assert expected["metrics"]["val/guard/restored_step"] == 2
    assert_same(found, expected)
    assert distance(expected, alone["single"])[0] > 1e-4
