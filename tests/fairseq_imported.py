"""What the server of fairseq_cli.py imports before it forks: fairseq without the plugin, its messages undone.

fairseq's commands set the root logger up as they are imported; each must find it untouched, as in a new process.
What every command comes to import or to compute first is here too: torch's compiler (which the first optimizer
imports), and the tables of hydra's parser, which ANTLR fills as it reads.
"""

import contextlib
import gc
import logging
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """What is written to the file of standard error is lost; the loggers of torch, made inside, keep `sys.stderr`."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


with _silent(), contextlib.suppress(ImportError, AttributeError):
    import fairseq.checkpoint_utils
    import fairseq.criterions
    import fairseq.models
    import fairseq.optim
    import fairseq.sequence_generator
    import fairseq.tasks
    import fairseq.trainer  # noqa: F401
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401
    from hydra.core.override_parser.overrides_parser import OverridesParser

    OverridesParser.create().parse_overrides(["a.b=1e-3", "c='d e'", "e=[1,'f']", "g={h:null}", "i=j", "k=true"])

logging.getLogger().handlers.clear()
logging.getLogger().setLevel(logging.WARNING)
gc.freeze()  # A collection in a child would otherwise copy every page that it counts references in.
