"""The `lightconv` command: one module per subcommand, found and run by main.py; heavy imports are inside functions."""
