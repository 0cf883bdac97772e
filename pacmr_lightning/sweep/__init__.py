"""Sweeps: methods x noise rates x options x seeds as separate runs, and the tables and figures of them."""
