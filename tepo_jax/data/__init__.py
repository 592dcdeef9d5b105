"""Problems, data sets and prompts. Host Python: no jax."""
