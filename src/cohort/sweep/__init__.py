"""Sweeps: the same recipe trained with many combinations of settings and seeds, and a table that compares them."""
