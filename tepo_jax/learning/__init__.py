"""The paper: pure functions of arrays (objective, advantage, update)."""
