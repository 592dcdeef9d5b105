"""Measures gradient estimators at fixed policies, and what TEPO's mask does."""
