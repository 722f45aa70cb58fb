"""Findings of `lightconv doctor`, by their status."""


def statuses(report, status):
    """The findings of this status, as {name: finding}."""
    return {finding.name: finding for finding in report.findings if finding.status == status}
