"""Run by compilation.py, in a process of its own: compile one library by torch.utils.cpp_extension, and load it once.

    python -c "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')" compile_worker.py ARGUMENTS.json

Loading it is part of the build: a missing symbol shows here, before others find the library. Imports nothing of this
package.
"""

import json
import os
import shlex
import sys

from torch.utils import cpp_extension

if __name__ == "__main__":
    # cpp_extension writes this folder into the linker's command unquoted: a space in torch's path would split it.
    cpp_extension.TORCH_LIB_PATH = shlex.quote(cpp_extension.TORCH_LIB_PATH)
    # It also takes a compiler of several words (CXX="ccache g++") for one with spaces in its name.
    if len(shlex.split(os.environ["CXX"])) > 1:
        with open("compiler.sh", "w") as script:  # in the folder of the build, which is the working one
            script.write(f'#!/bin/sh\nexec {os.environ["CXX"]} "$@"\n')
        os.chmod("compiler.sh", 0o755)
        os.environ["CXX"] = "./compiler.sh"
    # It does not look for CUDA if torch has none, where the sources still compile (but cannot be linked).
    cpp_extension.CUDA_HOME = os.environ.get("CUDA_HOME")
    cpp_extension.load(**json.loads(sys.argv[2]), is_python_module=False, verbose=True)
