"""Run by compilation.py, in a process of its own: compile one library by torch.utils.cpp_extension, and load it once.

    python -c "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')" compile_worker.py ARGUMENTS.json

That it can be loaded is part of the build: a missing symbol shows here, before others find the library. Imports nothing
of this package, and must not be run as a script: beside it lie modules with the names of Python's own (philox.py).
"""

import json
import os
import shlex
import sys

from torch.utils import cpp_extension

if __name__ == "__main__":
    # cpp_extension writes this folder into the linker's command as it is: a space in torch's path would cut it in two.
    cpp_extension.TORCH_LIB_PATH = shlex.quote(cpp_extension.TORCH_LIB_PATH)
    # And a compiler of several words (CXX="ccache g++") it takes for one with spaces in its name.
    if len(shlex.split(os.environ["CXX"])) > 1:
        with open("compiler.sh", "w") as script:  # in the folder of the build, which is the working one
            script.write(f'#!/bin/sh\nexec {os.environ["CXX"]} "$@"\n')
        os.chmod("compiler.sh", 0o755)
        os.environ["CXX"] = "./compiler.sh"
    # Nor does it look for CUDA where torch has none. The sources compile there, too; only linking them is impossible.
    cpp_extension.CUDA_HOME = os.environ.get("CUDA_HOME")
    cpp_extension.load(**json.loads(sys.argv[2]), is_python_module=False, verbose=True)
