"""Checks of an installation, behind `lightconv doctor`."""
