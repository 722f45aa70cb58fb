"""The `lightconv` command. One module per sub-command; what is heavy is imported only inside the one that needs it."""
