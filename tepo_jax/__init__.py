"""TEPO: token-level policy optimisation of language models in JAX."""
