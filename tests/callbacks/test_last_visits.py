"""LastVisits: whole steps, the same for any number of ranks, and old checkpoints."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pacmr_lightning.callbacks import RunSummary, WeightGap, last_visits
from pacmr_lightning.callbacks.last_visits import LastVisits
from pacmr_lightning.callbacks.weight_distributions import WeightDistributions
from pacmr_lightning.errors import UserError
from pacmr_lightning.weight_gap import weight_gap

CPU = torch.device("cpu")
BATCH, STEPS = 6, 9


def step_of(number):
    """(6, 2) weights and flips of a step's pairs; two weights are the same."""
    generator = torch.Generator().manual_seed(number)
    weights = torch.rand(BATCH, generator=generator)
    weights[1] = weights[4]
    return torch.stack([weights, torch.randint(-1, 2, (BATCH,), generator=generator).float()], dim=1)


def share(number, rank, ranks):
    """What a rank of several visits in a step, in an order of its own."""
    rows = step_of(number)[rank::ranks]
    return rows.flip(0) if rank % 2 else rows


def visit(windows, first=0, last=STEPS):
    for number in range(first, last):
        for rank, window in enumerate(windows):
            window.add(number, *share(number, rank, len(windows)).unbind(1))


def of_all(windows, monkeypatch):
    """``of_all_ranks`` of windows that are on ranks of their own, of which each must say the same."""
    parts = [window.of_this_rank(CPU) for window in windows]
    monkeypatch.setattr(last_visits, "gathered", lambda values, device: parts)
    found = [window.of_all_ranks(CPU) for window in windows]
    assert all(torch.equal(found[0], other) for other in found)
    return found[0]


@pytest.mark.parametrize(("window", "steps"), [(1, 1), (6, 1), (7, 2), (20, 4), (24, 4), (1000, 9)])
def test_whole_steps(window, steps):
    """The 20 last of steps of 6 reach into the fourth step from the end, all of which counts."""
    visits = LastVisits(window, columns=2)
    visit([visits])
    rows = visits.of_all_ranks(CPU)
    assert rows.dtype == torch.float32
    assert rows[:, 0].tolist() == [n for n in range(STEPS - steps, STEPS) for _ in range(BATCH)]
    expected = torch.cat([step_of(n) for n in range(STEPS - steps, STEPS)])
    assert sorted(rows[:, 1:].tolist()) == sorted(expected.tolist())
    assert len(visits.of_this_rank(CPU)) == steps * BATCH, "it holds more than it needs"


@pytest.mark.parametrize("window", [1, 7, 20])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_number_of_ranks(ranks, window, monkeypatch):
    """Also four, of which two have one pair of the six and the others two."""
    alone, together = ([LastVisits(window, 2) for _ in range(count)] for count in (1, ranks))
    visit(alone)
    visit(together)
    rows = of_all(alone, monkeypatch)
    assert torch.equal(of_all(together, monkeypatch), rows)
    _, weight, flipped = rows.unbind(1)
    _, *other = of_all(together, monkeypatch).unbind(1)
    assert weight_gap(*other) == weight_gap(weight, flipped)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 1)])
def test_resume_with_other_ranks(before, after, monkeypatch):
    whole, first, second = ([LastVisits(20, 2) for _ in range(count)] for count in (1, before, after))
    visit(whole)
    visit(first, last=5)
    state = of_all(first, monkeypatch)
    for window in second:
        window.add(99, *step_of(99).unbind(1))  # of a run that is forgotten
    for rank, window in enumerate(second):
        window.load(state, rank == 0)
    assert torch.equal(of_all(second, monkeypatch), state)
    visit(second, first=5, last=6)
    smaller = of_all(second, monkeypatch)
    assert smaller[:, 0].unique().tolist() == [2, 3, 4, 5]
    visit(second, first=6)
    assert torch.equal(of_all(second, monkeypatch), of_all(whole, monkeypatch))


def test_an_empty_window():
    visits = LastVisits(5, columns=2)
    assert visits.of_all_ranks(CPU).shape == (0, 3)
    visits.load(visits.of_all_ranks(CPU), True)
    visit([visits])
    visits.clear()
    assert visits.of_this_rank(CPU).shape == (0, 3)
    with pytest.raises(UserError, match="window is 0"):
        LastVisits(0, columns=2)


def process(rank, init, folder):
    """One of two processes: uneven shares of each step, one of them empty at times."""
    dist.init_process_group("gloo", init_method=f"file://{init}", rank=rank, world_size=2)
    visits = LastVisits(20, columns=2)
    for number in range(STEPS):
        cut = number % 3
        rows = step_of(number)
        visits.add(number, *(rows[:cut] if rank == 0 else rows[cut:]).unbind(1))
    torch.save(visits.of_all_ranks(CPU), f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_with_uneven_shares(tmp_path):
    context = torch.multiprocessing.get_context("fork")
    processes = [context.Process(target=process, args=(rank, tmp_path / "init", tmp_path)) for rank in (0, 1)]
    for one in processes:
        one.start()
    for one in processes:
        one.join(120)
        assert one.exitcode == 0
    alone = LastVisits(20, columns=2)
    visit([alone])
    for rank in (0, 1):
        assert torch.equal(torch.load(tmp_path / str(rank)), alone.of_all_ranks(CPU))


STEPS_BEFORE = torch.tensor([3.0] * 2 + [4.0] * 4 + [5.0] * 4)
"""Of 10 visits in batches of 4, of which earlier versions cut a step in two."""


def old(*columns, dtype=torch.float32):
    return torch.stack([STEPS_BEFORE, *columns], dim=1).to(dtype)


W, U, F = (
    torch.rand(10, generator=torch.Generator().manual_seed(0)),
    torch.linspace(-1, 1, 10),
    torch.ones(10),
)
NAN = torch.full((10,), torch.nan)


@pytest.mark.parametrize("is_global_zero", [True, False])
@pytest.mark.parametrize(
    ("callback", "state", "rows_of"),
    [
        (
            RunSummary(window=10),
            {"seconds": 2.5, "pairs": 24, "rows": old(W, U, F, dtype=torch.double), "metrics": {}},
            lambda state: state["rows"],
        ),
        (WeightGap(window=10), {"visits": old(W, F, F - 2)}, lambda state: state["visits"]),
        (WeightDistributions(window=10), old(U, 2 * U, W, F, NAN, NAN), lambda state: state),
    ],
)
def test_checkpoints_of_earlier_versions(callback, state, rows_of, is_global_zero):
    """Each callback had a window of its own, cut in mid-step or not, in float32 or not."""
    trainer = SimpleNamespace(
        is_global_zero=is_global_zero, strategy=SimpleNamespace(root_device=CPU), callback_metrics={}
    )
    name = type(callback).__name__
    callback.on_load_checkpoint(trainer, None, {name: state})
    again = {}
    callback.on_save_checkpoint(trainer, None, again)
    found, before = rows_of(again[name]), rows_of(state).float()
    assert found.dtype == torch.float32
    if not is_global_zero:
        assert found.shape == (0, before.shape[1]), "rank 0 has them all"
        return
    assert found[:, 0].tolist() == STEPS_BEFORE.tolist()
    assert found.nan_to_num(7.0).tolist() == sorted(before.nan_to_num(7.0).tolist())
    if isinstance(state, dict):
        others = state.keys() - {"rows", "visits"}
        assert {key: again[name][key] for key in others} == {key: state[key] for key in others}
