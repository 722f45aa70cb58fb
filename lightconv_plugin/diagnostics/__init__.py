"""The checks of an installation for `lightconv doctor`."""
