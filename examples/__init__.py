"""Whole workflows on real models, each one command."""
