"""Lets transformers' trainers and pipelines be imported even if torchaudio does not match torch.

fairseq installs the newest torchaudio, which needs the CUDA libraries even if torch is a CPU build.
"""

import importlib
import logging


def hide_broken_torchaudio() -> None:
    """If torchaudio is installed but cannot be loaded, make transformers treat it as not installed.

    transformers imports torchaudio for anything that may process speech: pipelines, processors, and through them the
    trainers.
    """
    try:
        importlib.import_module("transformers.audio_utils")
    except (ImportError, OSError) as error:
        import transformers.utils
        from transformers.utils import import_utils

        if not import_utils.is_torchaudio_available():
            raise
        for module in (transformers.utils, import_utils):
            module.is_torchaudio_available = lambda: False
        importlib.import_module("transformers.audio_utils")
        logging.getLogger(__name__).info("torchaudio cannot be loaded; transformers works without it: %s", error)
