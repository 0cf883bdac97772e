"""What a training without a terminal says of itself."""

import re

from pacmr_lightning.callbacks import LogProgress


def test_a_line_each_time(fit, tmp_path, capsys, make_module):
    class Logging(make_module):
        def training_step(self, batch, batch_idx):
            self.log("train/loss", 0.5 + self.global_step, prog_bar=True)
            return super().training_step(batch, batch_idx)

    fit(tmp_path, [LogProgress(seconds=0)], Logging())
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "12 updates done: train/loss 11.5"
    lines = [line for line in said if line.startswith("Update")]
    found = [re.fullmatch(r"Update (\d+) of 12, 0:00:\d\d left, loss (\d+\.5000)", line) for line in lines]
    assert all(found) and [int(line[1]) for line in found] == list(range(1, 13))
    assert [float(line[2]) for line in found] == [0.5 + step for step in range(12)]
    assert lines[-1].startswith("Update 12 of 12, 0:00:00 left")


def test_seldom(fit, tmp_path, capsys):
    fit(tmp_path, [LogProgress(seconds=60)])
    assert capsys.readouterr().err.splitlines()[-1] == "12 updates done"


def test_an_older_validation_says_its_step(fit, tmp_path, capsys, make_module):
    class Logging(make_module):
        def validation_step(self, batch, batch_idx):
            self.log("val/loss", 0.3, prog_bar=True, batch_size=4)

    fit(tmp_path, [LogProgress(seconds=60)], Logging(), check_val_every_n_epoch=2)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "12 updates done: val/loss 0.3 (val/... after update 8)"
    fit(tmp_path, [LogProgress(seconds=60)], Logging())
    assert capsys.readouterr().err.splitlines()[-1] == "12 updates done: val/loss 0.3"
