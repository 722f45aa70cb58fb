"""Checkpoints: safe loading, averaging, export and conversion between layouts."""
