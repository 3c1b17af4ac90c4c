"""What is computed on arrays: sums and casts, as functions that a backend may replace."""
