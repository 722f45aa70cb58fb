"""Training a configuration."""
