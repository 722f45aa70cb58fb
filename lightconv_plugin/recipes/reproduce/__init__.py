"""One row of the papers' tables."""
