"""What `lightconv doctor` looks at."""
