"""Hugging Face folders to sharded parameters and back."""
