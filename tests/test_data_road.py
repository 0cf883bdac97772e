"""Noise masks, cached references and full disks through the command line."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pacmr_lightning import cli
from pacmr_lightning.runs.folder import read_weights

from .conftest import fails, short_fit


@pytest.fixture
def base(tmp_path, tiny_llama, monkeypatch):
    tiny_llama(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    words = """
        --model.weighting VNetWeighting --model.weighting.every 2 --data.source EmbeddedWorld
        --data.source.pairs 64 --data.source.validation_pairs 16 --data.global_batch_size 8
        --data.meta_batch_size 8 --trainer.max_steps 4 --trainer.log_every_n_steps 1
        --trainer.callbacks+=WeightRecorder --trainer.callbacks+=RunSummary
    """
    return short_fit("model", words)


def masked(run):
    return ["--data.noise", "NoiseFromMask", "--data.noise.mask", str(run / "noise_mask.parquet")]


def test_a_mask_is_kept_and_can_be_used_again(base, capsys):
    cli.main([*base, "--data.noise_rates", "[0.1, 0.6]", "--model.method", "a"])
    first = Path("runs/preferences-a-noise10-60-seed42")
    columns = pq.read_table(first / "noise_mask.parquet").to_pydict()
    mask = dict(zip(columns["id"], columns["flipped"], strict=True))
    assert len(mask) == 64
    cli.main([*base, *masked(first), "--model.method", "a"])
    second = Path("runs/preferences-a-noiseNoiseFromMask-seed42")
    found = [read_weights(run) for run in (first, second)]
    assert found[0].equals(found[1])
    assert all(mask[row.id] == row.flipped for row in found[0].itertuples())
    summary = json.loads((first / "summary.json").read_text())
    assert summary["noise_rate"] == pytest.approx(sum(mask.values()) / 64)
    assert pq.read_table(second / "noise_mask.parquet").equals(pq.read_table(first / "noise_mask.parquet"))
    message = fails(capsys, [*base, "--data.noise_rate", "0.2", "--data.noise_rates", "[0.1, 0.2]"])
    assert "noise_rate and noise_rates are given together" in message
    message = fails(capsys, [*base, "--model.objective", "AnnotatorRPOEM"])
    assert "no training pair names one; give the rows a column annotator" in message
    oracle = [*base, "--model.weighting", "OracleWeights", "--data.noise_rates", "[0.1, 0.2]"]
    assert "OracleWeights needs one noise rate" in fails(capsys, oracle)
    annotators = ["--data.noise", "AnnotatorNoise", "--data.noise.share", "0.3"]
    cli.main([*base, *annotators, "--model.objective", "RDPO", "--model.method", "a"])
    third = Path("runs/preferences-a-noiseAnnotatorNoise30-seed42")
    table = pq.read_table(third / "noise_mask.parquet").to_pandas()
    assert table["annotator"].str.fullmatch(r"annotator-\d+").all()
    assert json.loads((third / "summary.json").read_text())["noise_rate"] == table["flipped"].mean()
    cli.main([*base, *masked(third), "--model.method", "b"])
