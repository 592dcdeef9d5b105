"""A run put together from its config: what the programs share."""
