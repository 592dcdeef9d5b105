"""Puts a run together from its config, for training, evaluation and tools."""
