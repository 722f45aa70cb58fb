"""How fast kernels can be at best, from their machine code alone: no GPU.

nvcc compiles the kernels for a device, nvdisasm lists their instructions (SASS), and a few of a launch's blocks are
executed here, on the launch's own parameters and made-up tensors. That counts what a device would do: instructions that
warps issue, accesses to shared memory, bytes moved.

    launches.py      what a call of a launcher launches: kernels, grids, parameters (launches.cpp)
    listing.py       a kernel's instructions and constants from a .cubin
    operations.py    what each instruction computes: with operands.py, integers.py, floats.py
    steps.py         branches, and instructions that reach memory
    device.py        blocks, warps, memory
    execution.py     some blocks of a call
    report.py        the table: python -m tests.cuda.speed.report
"""
