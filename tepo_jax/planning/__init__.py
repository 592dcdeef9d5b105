"""What `tepo_jax.plan` computes: a step's memory and time before there is a chip."""
