"""Problems, prompts and grading: host Python, no jax."""
