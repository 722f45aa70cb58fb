"""LightConv and DynamicConv for fairseq (Wu et al. 2019, Pay Less Attention with Lightweight and Dynamic Convolutions).

`fairseq-train --user-dir lightconv_plugin …` imports this package. It patches fairseq where it fails or is wrong with
current versions of Python, torch and numpy (compat/), and registers the models (models/), the criterions (criterions/)
and --task translation_fast (generation/). `import lightconv_plugin.ops` gives any PyTorch program the operators without
importing fairseq, which takes seconds. All are registered once fairseq is imported, before or after this package.
"""

import importlib.util
import sys
from importlib.abc import MetaPathFinder

__version__ = "0.2.0"


def _register() -> None:
    from lightconv_plugin import compat

    compat.apply()
    importlib.import_module("lightconv_plugin.models")
    importlib.import_module("lightconv_plugin.criterions")
    importlib.import_module("lightconv_plugin.generation.task")


class _WhenFairseqArrives(MetaPathFinder):
    """Runs `_register` right after the first `import fairseq` in a process that imported this package earlier.

    Without it, the models would not be registered if a process imports lightconv_plugin.ops and then uses
    `--user-dir lightconv_plugin`: fairseq does not import a user directory again.
    """

    _asking = False

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "fairseq" or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_then_register(module):
                sys.meta_path.remove(self)
                run(module)
                _register()

            spec.loader.exec_module = run_then_register  # type: ignore[method-assign]
        return spec


if sys.modules.get("fairseq") is not None:  # None: importing it raises ModuleNotFoundError
    _register()
else:
    sys.meta_path.insert(0, _WhenFairseqArrives())
