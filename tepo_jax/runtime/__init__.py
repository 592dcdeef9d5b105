"""Mesh, checkpoints, metrics, processes and host: nothing about the paper."""
