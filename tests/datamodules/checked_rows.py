"""Rows of a test, checked as those of files are; errors call them test."""

from pacmr_lightning.datamodules.columns import PREFERENCES, SFT
from pacmr_lightning.datamodules.reading import rows_to_dataset


def pairs(*rows):
    return rows_to_dataset(rows, PREFERENCES, "test")


def demonstrations(*rows):
    return rows_to_dataset(rows, SFT, "test")
