"""Criterions for fairseq; importing this package registers them.

R-Drop has the name and the options that it has in fairseq's main branch. Where fairseq has its own, ours replaces it:
fairseq's reports twice the loss in validation, and fails with --ignore-prefix-size. LIGHTCONV_KEEP_UPSTREAM=1 keeps
it.
"""

import os

from fairseq import criterions as fairseq_criterions
from fairseq.criterions import register_criterion

from lightconv_plugin.criterions.rdrop import RDropConfig, RDropCriterion
from lightconv_plugin.criterions.simcut import SimCutConfig, SimCutCriterion

RDROP, SIMCUT = (f"label_smoothed_cross_entropy_with_{name}" for name in ("rdrop", "simcut"))

if os.environ.get("LIGHTCONV_KEEP_UPSTREAM", "") in ("", "0"):
    fairseq_criterions.CRITERION_REGISTRY.pop(RDROP, None)
if RDROP not in fairseq_criterions.CRITERION_REGISTRY:
    register_criterion(RDROP, dataclass=RDropConfig)(RDropCriterion)
register_criterion(SIMCUT, dataclass=SimCutConfig)(SimCutCriterion)
