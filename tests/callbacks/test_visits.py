"""LastVisits: whole steps, the same for any number of ranks; in real processes: test_two_processes.py."""

import pytest
import torch

from pacmr_lightning.callbacks import recurring as module
from pacmr_lightning.callbacks.recurring import LastVisits

BATCH, STEPS = 6, 9


def step_of(number):
    """(6, 2) weights and flips of a step's pairs; two weights are the same."""
    generator = torch.Generator().manual_seed(number)
    weights = torch.rand(BATCH, generator=generator)
    weights[1] = weights[4]
    return torch.stack([weights, torch.randint(-1, 2, (BATCH,), generator=generator).float()], dim=1)


def visit(windows, first=0, last=STEPS):
    """Adds steps' visits to the windows of several ranks, on each in an order of its own."""
    for number in range(first, last):
        for rank, window in enumerate(windows):
            rows = step_of(number)[rank :: len(windows)]
            window.add(number, *(rows.flip(0) if rank % 2 else rows).unbind(1))


def of_all(windows, monkeypatch):
    """Return ``of_all_ranks`` of windows on ranks of their own, which must be equal."""
    parts = [window.of_this_rank() for window in windows]
    monkeypatch.setattr(module, "on_all_ranks", lambda rows: parts)
    found = [window.of_all_ranks() for window in windows]
    assert all(torch.equal(found[0], other) for other in found)
    return found[0]


@pytest.mark.parametrize(("window", "steps"), [(1, 1), (6, 1), (7, 2), (20, 4), (24, 4), (1000, 9)])
def test_whole_steps(window, steps, monkeypatch):
    """The last 20 visits in steps of 6 need four whole steps, also on four ranks with uneven shares."""
    visits = LastVisits(window, columns=2)
    assert visits.of_all_ranks().shape == (0, 3)
    visit([visits])
    rows = visits.of_all_ranks()
    assert rows.dtype == torch.float32
    assert rows[:, 0].tolist() == [n for n in range(STEPS - steps, STEPS) for _ in range(BATCH)]
    expected = torch.cat([step_of(n) for n in range(STEPS - steps, STEPS)])
    assert sorted(rows[:, 1:].tolist()) == sorted(expected.tolist())
    assert len(visits.of_this_rank()) == steps * BATCH, "it holds more than it needs"
    for ranks in (2, 3, 4):
        together = [LastVisits(window, 2) for _ in range(ranks)]
        visit(together)
        assert torch.equal(of_all(together, monkeypatch), rows)


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
    assert of_all(second, monkeypatch)[:, 0].unique().tolist() == [2, 3, 4, 5]
    visit(second, first=6)
    assert torch.equal(of_all(second, monkeypatch), of_all(whole, monkeypatch))
