"""Preparing corpora."""
