"""The models that the papers' authors released: where they are, how to get them, and where they are kept."""
