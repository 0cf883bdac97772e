"""Judging and generation: chat endpoints, judges, and a store for what they said."""
