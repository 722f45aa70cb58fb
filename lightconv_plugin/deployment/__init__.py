"""Exported models as graphs that programs without this package run: torch.export, AOTInductor.

graphs.py says what the graphs are, docs/deployment.md how a program decodes with them.
"""

from lightconv_plugin.deployment.graphs import StateTensor, export_start, export_step, state_tensors
from lightconv_plugin.deployment.package import deploy

__all__ = ["StateTensor", "deploy", "export_start", "export_step", "state_tensors"]
