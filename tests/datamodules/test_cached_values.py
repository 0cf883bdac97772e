"""The cache of what models give pairs: equal to live, and never stale, torn or doubled."""

import shutil
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch

from pacmr_lightning.datamodules import EmbeddedWorld, Files, PreferenceDataModule, cached_values
from pacmr_lightning.errors import UserError
from pacmr_lightning.policy import PolicyModel
from pacmr_lightning.policy.numerics import numerics


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    monkeypatch.setattr(cached_values, "PART", 16)
    return folder / "pacmr-values"


@pytest.fixture
def folder(tmp_path, tiny_llama):
    return tiny_llama(tmp_path / "model")


def policy_of(folder, **options):
    policy = PolicyModel(folder, **options)
    policy.build()
    # A trained adapter, which the reference must not feel.
    for parameter in policy.adapter().values():
        torch.nn.init.normal_(parameter, std=0.3)
    return policy


def data_of(folder, source=None, **options):
    sizes = {"global_batch_size": 8, "meta_every": 2, "meta_batch_size": 8}
    data = PreferenceDataModule(source or EmbeddedWorld(40, 20), folder, **sizes, **options)
    data.setup("fit")
    return data


@pytest.fixture
def asked(folder):
    return policy_of(folder), data_of(folder).train_pairs


def rank_of(rank, world_size):
    """A trainer's part that the cache asks for."""
    strategy = SimpleNamespace(barrier=lambda: None)
    return SimpleNamespace(global_rank=rank, world_size=world_size, global_step=0, strategy=strategy)


def test_batches_bring_what_live_computes(folder, cache, write_rows, pair_rows):
    rows = [row | {"augmented_prompt": row["prompt"]} for row in pair_rows(4)] + pair_rows(20)
    source = Files(write_rows(rows), write_rows(rows[:2], "validation.jsonl"))
    policy, data = policy_of(folder), data_of(folder, source, reference="cached", noise_rate=0.4)
    data.trainer = rank_of(0, 1)
    data.fill_reference(policy)
    batch = next(iter(data.train_dataloader()))
    # The KL of validation needs the reference's logits, which no cache has.
    assert next(iter(data.val_dataloader())).reference is None
    for part in (batch.train, batch.meta, batch.meta.augmented):
        cached, part.reference = part.reference, None
        live = policy.reference_log_probs(part)
        torch.testing.assert_close(vars(cached), vars(live), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(live.chosen, live.rejected)


def test_a_sweep_pays_once(folder, cache, monkeypatch):
    """For log-probabilities and states: label noise exchanges them, and clean pairs leave some out."""
    first, data = policy_of(folder), data_of(folder)
    log_probs = data.train_pairs.reference_log_probs(first)
    states = data.train_state_differences(first)
    chosen, rejected = first.reference_states(data.train_pairs.batch(range(40))).unbind(1)
    np.testing.assert_allclose(states, (chosen - rejected).numpy(), atol=1e-6)
    assert np.abs(states).mean() > 1e-3 and np.isfinite(log_probs).all()
    # From now on the model cannot be asked.
    monkeypatch.setattr(PolicyModel, "reference_states", None)
    monkeypatch.setattr(PolicyModel, "reference_log_probs", None)
    policy = policy_of(folder)
    noisy, held_out = data_of(folder, noise_rate=0.4), data_of(folder, clean_meta=EmbeddedWorld(20))
    swapped = np.array(noisy.train_pairs.swapped)[:, None]
    found = noisy.train_pairs.reference_log_probs(policy)
    assert np.array_equal(found, np.where(swapped, log_probs[:, ::-1], log_probs))
    assert np.array_equal(noisy.train_state_differences(policy), np.where(swapped, -states, states))
    held_out.fill_train_reference(policy)
    assert np.array_equal(held_out.train_pairs.reference, log_probs[20:])
    assert np.array_equal(held_out.train_state_differences(policy), states[20:])
    assert 5 < swapped.sum() < 35


def test_whatever_changes_a_value_changes_the_key(folder, cache, tiny_llama, tmp_path, monkeypatch):
    data = data_of(folder)

    def entries(policy=None, pairs=data.train_pairs, options=None, **augmented):
        pairs.reference_log_probs(policy_of(policy or folder, **(options or {})), **augmented)
        return len(list(cache.iterdir()))

    assert entries() == entries() == 1
    assert entries(augmented=True) == 2
    assert entries(pairs=data.validation_pairs) == 3
    assert entries(tiny_llama(tmp_path / "other", seed=1)) == 4
    changes = {"layout": "separate", "dtype": "bfloat16", "attn_implementation": "eager"}
    for number, (name, value) in enumerate(changes.items()):
        assert entries(options={name: value}) == 5 + number
    assert entries(pairs=data_of(folder, EmbeddedWorld(41, 20)).train_pairs) == 8
    # The same weights in another folder are the same reference.
    assert entries(tiny_llama(tmp_path / "copy")) == 8
    for number, changed in enumerate(({"torch": "3"}, {"matmul_precision": "high"}, {"device": "cuda"})):
        monkeypatch.setattr("pacmr_lightning.policy.model.numerics", lambda d, c=changed: numerics(d) | c)
        assert entries() == 9 + number


def test_ranks_share_the_parts(asked, cache):
    policy, pairs = asked
    with pytest.raises(UserError, match=r"part-00001\.npy, .* is missing or damaged"):
        pairs.reference_log_probs(policy, trainer=rank_of(0, 2))
    written = sorted(path.name for path in cache.rglob("*.npy"))
    assert written == ["part-00000.npy", "part-00002.npy"]
    both = pairs.reference_log_probs(policy, trainer=rank_of(1, 2))
    alone = pairs.reference_log_probs(policy)
    assert np.array_equal(both, alone) and len(list(cache.rglob("*.npy"))) == 3


def test_damaged_parts_and_values_that_are_no_numbers(asked, cache):
    policy, pairs = asked
    pairs.reference_log_probs(policy)
    part = next(cache.rglob("part-00001.npy"))
    np.save(cache / "short.npy", np.zeros((3, 2), np.float32))
    for content in (part.read_bytes()[:-8], b"", b"no array", (cache / "short.npy").read_bytes()):
        part.write_bytes(content)
        with pytest.raises(UserError, match=r"part-00001\.npy, .* damaged; delete its folder"):
            pairs.reference_log_probs(policy)
    shutil.rmtree(cache)
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[:] = float("nan")
    with pytest.raises(UserError, match=r"A value of the pair .* is not finite, by the reference"):
        pairs.reference_log_probs(policy)
    assert not list(cache.rglob("*.npy"))


def test_two_runs_at_once_and_an_interruption(folder, cache, monkeypatch):
    policy, pairs = policy_of(folder), data_of(folder, EmbeddedWorld(200, 20)).train_pairs
    ask, asked, others = PolicyModel.reference_log_probs, [], []

    def interrupted(policy, batch):
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append(batch)
        return ask(policy, batch)

    def while_another_run_ends(policy, batch):
        monkeypatch.setattr(PolicyModel, "reference_log_probs", ask)
        others.append(pairs.reference_log_probs(policy_of(folder)))
        return ask(policy, batch)

    monkeypatch.setattr(PolicyModel, "reference_log_probs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pairs.reference_log_probs(policy)
    assert len(list(cache.rglob("part-*.npy"))) == 3
    monkeypatch.setattr(PolicyModel, "reference_log_probs", while_another_run_ends)
    found = pairs.reference_log_probs(policy)
    assert np.array_equal(found, *others) and np.isfinite(found).all()
    assert len(list(cache.rglob("part-*.npy"))) == 13 and not list(cache.rglob("*.partial"))
