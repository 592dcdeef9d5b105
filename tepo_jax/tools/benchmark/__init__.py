"""Measures a config's programs on this machine."""
