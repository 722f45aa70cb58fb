"""Checkpoints: read safely, averaged, converted between layouts."""
