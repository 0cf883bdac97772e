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
def model(tmp_path, tiny_llama):
    return lambda seed=0, name="model": tiny_llama(tmp_path / name, seed=seed, num_hidden_layers=2)


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
def asked(model):
    folder = model()
    return policy_of(folder), data_of(folder).train_pairs


def forbid(*_):
    raise AssertionError("the reference was asked although its answers are on disk")


def test_batches_bring_what_live_computes(model, cache):
    folder = model()
    policy, data = policy_of(folder), data_of(folder, reference="cached", noise_rate=0.4)
    data.trainer = type("Trainer", (), {"global_rank": 0, "world_size": 1, "global_step": 0})()
    data.trainer.strategy = type("Strategy", (), {"barrier": staticmethod(lambda: None)})()
    data.fill_reference(policy)
    batch = next(iter(data.train_dataloader()))
    # The KL of validation needs the reference's logits, which no cache has.
    assert next(iter(data.val_dataloader())).reference is None
    for part in (batch.train, batch.meta, batch.meta.augmented):
        cached, part.reference = part.reference, None
        live = policy.reference_log_probs(part)
        assert torch.allclose(cached.chosen, live.chosen, atol=1e-5)
        assert torch.allclose(cached.rejected, live.rejected, atol=1e-5)
        assert not torch.allclose(live.chosen, live.rejected)


def test_a_sweep_pays_once(model, cache, monkeypatch, tmp_path):
    folder = model()
    first = data_of(folder).train_pairs.reference_log_probs(policy_of(folder))
    assert first.shape == (40, 2) and np.isfinite(first).all()
    monkeypatch.setattr(PolicyModel, "reference_log_probs", forbid)
    noisy = data_of(folder, noise_rate=0.4).train_pairs
    found = noisy.reference_log_probs(policy_of(folder))
    assert np.array_equal(found, np.where(np.array(noisy.swapped)[:, None], first[:, ::-1], first))
    held_out = data_of(folder, clean_meta=EmbeddedWorld(20))
    assert len(held_out.train_pairs) == 20
    held_out.fill_train_reference(policy_of(folder))
    assert np.array_equal(held_out.train_pairs.reference, first[20:])


def test_states_are_kept_beside_the_log_probabilities(model, cache, monkeypatch):
    folder = model()
    policy, data = policy_of(folder), data_of(folder, noise_rate=0.4)
    pairs = data.train_pairs
    log_probs = pairs.reference_log_probs(policy)
    found = data.train_state_differences(policy)
    chosen, rejected = policy.reference_states(pairs.batch(range(40))).unbind(1)
    np.testing.assert_allclose(found, (chosen - rejected).numpy(), atol=1e-6)
    assert 5 < sum(pairs.swapped) < 35 and np.abs(found).mean() > 1e-3
    monkeypatch.setattr(PolicyModel, "reference_states", forbid)
    monkeypatch.setattr(PolicyModel, "reference_log_probs", forbid)
    signs = np.where(pairs.swapped, -1, 1)[:, None]
    held_out = data_of(folder, clean_meta=EmbeddedWorld(20))
    assert np.array_equal(held_out.train_state_differences(policy), (signs * found)[20:])
    assert np.array_equal(pairs.reference_log_probs(policy), log_probs)


def test_whatever_changes_a_value_changes_the_key(model, cache, monkeypatch):
    folder = model()
    data = data_of(folder)

    def entries(policy=None, pairs=data.train_pairs, options=None, **augmented):
        pairs.reference_log_probs(policy_of(policy or folder, **(options or {})), **augmented)
        return len(list(cache.iterdir()))

    assert entries() == entries() == 1
    assert entries(augmented=True) == 2
    assert entries(pairs=data.validation_pairs) == 3
    assert entries(model(1, "other")) == 4
    changes = {"layout": "separate", "dtype": "bfloat16", "attn_implementation": "eager"}
    for number, (name, value) in enumerate(changes.items()):
        assert entries(options={name: value}) == 5 + number
    assert entries(pairs=data_of(folder, EmbeddedWorld(41, 20)).train_pairs) == 8
    # The same weights in another folder are the same reference.
    assert entries(model(0, "copy")) == 8
    for number, changed in enumerate(({"torch": "3"}, {"matmul_precision": "high"}, {"device": "cuda"})):
        monkeypatch.setattr(
            "pacmr_lightning.policy.model.numerics", lambda device, c=changed: numerics(device) | c
        )
        assert entries() == 9 + number


def test_pairs_without_an_augmented_prompt(model, cache, write_rows, pair_rows):
    folder = model()
    rows = pair_rows(20) + [row | {"augmented_prompt": row["prompt"]} for row in pair_rows(4)]
    pairs = data_of(folder, Files(write_rows(rows), write_rows(rows[:2], "v.jsonl"))).train_pairs
    found = pairs.reference_log_probs(policy_of(folder), augmented=True)
    assert np.isnan(found[20:]).all() and np.isfinite(found[:20]).all()


def test_ranks_share_the_parts(asked, cache):
    policy, pairs = asked
    strategy = SimpleNamespace(barrier=lambda: None)
    ranks = [SimpleNamespace(global_rank=rank, world_size=2, strategy=strategy) for rank in (0, 1)]
    with pytest.raises(UserError, match=r"part-00001\.npy, .* is missing or damaged"):
        pairs.reference_log_probs(policy, trainer=ranks[0])
    written = sorted(path.name for path in cache.rglob("*.npy"))
    assert written == ["part-00000.npy", "part-00002.npy"]
    both = pairs.reference_log_probs(policy, trainer=ranks[1])
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


def test_two_runs_at_once_and_an_interruption(model, cache, monkeypatch):
    folder = model()
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
