"""The `lightconv` command. One module per subcommand (see main.py); heavy imports only inside the ones that need them."""
