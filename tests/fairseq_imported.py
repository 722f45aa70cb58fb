"""What the server of fairseq_cli.py imports before it forks: fairseq without the plugin, its messages undone.

fairseq's commands set the root logger up as they are imported; each must find it untouched, as in a new process.
"""

import contextlib
import io
import logging

with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(ImportError):
    import fairseq.checkpoint_utils
    import fairseq.criterions
    import fairseq.models
    import fairseq.optim
    import fairseq.sequence_generator
    import fairseq.tasks
    import fairseq.trainer  # noqa: F401

logging.getLogger().handlers.clear()
logging.getLogger().setLevel(logging.WARNING)
