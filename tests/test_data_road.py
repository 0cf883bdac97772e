"""Noise masks, cached references and full disks through the command line."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pacmr_lightning import cli
from pacmr_lightning.runs.folder import read_weights

from .conftest import fails, short_fit, write_lines


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


def test_a_cached_reference_trains_as_a_live_one(base):
    for kind in ("live", "cached"):
        cli.main([*base, "--data.reference", kind, "--trainer.default_root_dir", kind])
    live, cached = (read_weights(kind) for kind in ("live", "cached"))
    assert (live["id"] == cached["id"]).all()
    for column in ("u", "delta", "weight"):
        assert (live[column] - cached[column]).abs().max() < 1e-5


def test_a_full_disk(base, tmp_path, forked):
    """A limit on the size of files stands for the disk: one sentence, status 2, and then it works."""
    script = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2); "
    script += "from pacmr_lightning.cli import main; main(sys.argv[2:])"
    rows = ({"prompt": f"p {i}", "chosen": " a" * 200, "rejected": " b" * 200} for i in range(400))
    write_lines("pairs.jsonl", rows)
    source = base.index("--data.source")
    files = ["--data.source", "Files", "--data.source.train", "pairs.jsonl"]
    arguments = [*base[:source], *files, *base[source + 6 :], "--model.weighting", "Unweighted"]

    def run(limit):
        process = forked(script, limit, *arguments, HF_DATASETS_CACHE=str(tmp_path / "cache"))
        return process.communicate()[1], process.returncode

    errors, status = run(60_000)
    lines = [line for line in errors.splitlines() if line.startswith("pacmr: ")]
    assert status == 2 and len(lines) == 1, errors[-2000:]
    assert "The disk is full" in lines[0] and "run the command again" in lines[0]
    assert "Traceback" not in errors and not Path("runs").exists()
    errors, status = run(10**9)
    assert status == 0, errors[-2000:]
