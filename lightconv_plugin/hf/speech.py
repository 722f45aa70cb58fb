"""A torchaudio that does not fit torch, which must not keep transformers' trainers and pipelines from being imported.

fairseq installs the newest torchaudio, which asks for CUDA's libraries even where torch is a build for CPUs.
"""

import importlib
import logging


def hide_broken_torchaudio() -> None:
    """Where torchaudio is installed but can't be loaded, transformers does without, as where it is not installed.

    transformers imports it with whatever may read speech: pipelines, processors, and with these the trainers.
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
        logging.getLogger(__name__).info("torchaudio cannot be loaded, transformers does without it: %s", error)
