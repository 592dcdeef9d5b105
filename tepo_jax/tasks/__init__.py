"""What is asked and how it is graded: host Python, no jax."""
