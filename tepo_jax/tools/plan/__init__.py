"""What `tepo_jax.plan` computes: a step's memory and time without a chip."""
