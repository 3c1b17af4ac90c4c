"""Computations on arrays: sums, casts, quantization and updates, as functions that a backend may replace."""
