"""Reuse of a run's audit by pacmr refine."""

import json
from types import SimpleNamespace

from pacmr_lightning.audit import AuditOptions, audit, pipeline
from pacmr_lightning.evaluation.judging import GoldJudge

from ...conftest import write_lines


def test_an_audit_is_reused_with_the_same_options(tmp_path, monkeypatch):
    def conclude(scored, run, folder, options, answers):
        folder.mkdir(parents=True)
        for name in (*pipeline.TABLES, "report.html"):
            (folder / name).write_text("as found")
        found = SimpleNamespace(usable=True)
        return SimpleNamespace(findings=SimpleNamespace(agreement=found, scorer="policy"))

    run, second = tmp_path / "run", tmp_path / "second"
    run.mkdir()
    (run / "config.yaml").touch()
    monkeypatch.setattr(pipeline, "score_run", lambda run, options: SimpleNamespace(scorer="policy"))
    monkeypatch.setattr(pipeline, "conclude", conclude)
    audit(run)
    decisions = write_lines(tmp_path / "d.jsonl", [{"id": "a", "decision": "keep"}])
    assert pipeline.reuse(str(run), AuditOptions(output=str(second), decisions=decisions)) is None
    for other in ({"noise_rate": 0.3}, {"threshold": 0.6}, {"scorer": "probe"}, {"judges": [GoldJudge()]}):
        assert pipeline.reuse(str(run), AuditOptions(output=str(second), **other)) is None
    assert not second.exists()
    found = pipeline.reuse(str(run), AuditOptions(output=str(second)))
    assert found["predicted"] and found["scorer"] == "policy"
    assert (second / "pairs.csv").read_text() == "as found"
    record = json.loads((second / "audit.json").read_text())
    options = {"noise_rate": None, "threshold": 0.5, "decisions": None, "judged_pairs": 400, "judges": []}
    assert record["options"] == options
