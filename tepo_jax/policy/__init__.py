"""The language model: transformer, attention, scoring, weights."""
