"""The machine: meshes, checkpoints, metrics."""
