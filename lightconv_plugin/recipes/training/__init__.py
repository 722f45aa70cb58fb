"""Trains a configuration."""
