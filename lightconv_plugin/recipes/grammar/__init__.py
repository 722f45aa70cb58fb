"""A German–English corpus from a grammar: for the demonstration, and to try a preparation without a download."""
