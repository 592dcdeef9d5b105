"""What `tepo_jax.benchmark` measures: times, rates and memory of a config."""
