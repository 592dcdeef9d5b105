"""Predicts a step's memory and time on TPU slices, without a TPU."""
