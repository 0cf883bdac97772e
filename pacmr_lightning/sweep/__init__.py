"""Sweeps over methods, noise rates, options and seeds, with tables and figures."""
