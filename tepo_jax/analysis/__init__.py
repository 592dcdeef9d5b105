"""Looking at runs and evaluations: statistics, tables. No jax."""
