"""Compiles exported models into graphs for programs without this package: torch.export, AOTInductor.

graphs.py defines the graphs; docs/deployment.md explains how a program decodes with them.
"""

from lightconv_plugin.deployment.graphs import StateTensor, export_start, export_step, state_tensors
from lightconv_plugin.deployment.package import deploy

__all__ = ["StateTensor", "deploy", "export_start", "export_step", "state_tensors"]
