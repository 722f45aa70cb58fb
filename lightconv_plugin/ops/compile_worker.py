"""Run by compilation.py in a separate process: compiles one library with torch.utils.cpp_extension and loads it once.

    python -c "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')" compile_worker.py ARGUMENTS LOAD

ARGUMENTS (of cpp_extension.load) and LOAD are JSON. Loading the library is part of the build: a missing symbol is found
here, before other processes see it. LOAD is false for a library that this CPU cannot run. Imports nothing from this
package.
"""

import json
import os
import shlex
import sys

import torch
from torch.utils import cpp_extension

if __name__ == "__main__":
    # cpp_extension writes this folder into the linker's command unquoted: a space in torch's path would split it.
    cpp_extension.TORCH_LIB_PATH = shlex.quote(cpp_extension.TORCH_LIB_PATH)
    # It also mistakes a compiler command of several words (CXX="ccache g++") for a file name with spaces.
    if len(shlex.split(os.environ["CXX"])) > 1:
        with open("compiler.sh", "w") as script:  # in the build folder, which is the working directory
            script.write(f'#!/bin/sh\nexec {os.environ["CXX"]} "$@"\n')
        os.chmod("compiler.sh", 0o755)
        os.environ["CXX"] = "./compiler.sh"
    # It does not look for CUDA if torch was built without it. The sources still compile then (but cannot be linked).
    cpp_extension.CUDA_HOME = os.environ.get("CUDA_HOME")
    if not json.loads(sys.argv[3]):
        torch.ops.load_library = lambda path: None  # type: ignore[method-assign]  # which cpp_extension calls in the end
    cpp_extension.load(**json.loads(sys.argv[2]), is_python_module=False, verbose=True)
