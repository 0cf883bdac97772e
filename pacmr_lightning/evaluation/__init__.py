"""Judging and generation: chat endpoints, judges and a store of answers."""
