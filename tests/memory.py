"""What this process takes of the memory, and took at most since a reset, as Linux's /proc tells it."""

import ctypes


def status(name: str) -> float:
    """A line of /proc/self/status, in MiB: VmRSS is what is taken now, VmHWM was the most."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(name))


def reset_peak() -> bool:
    """VmHWM begins anew; False where no process may have that."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # what is free already would hide what is taken again
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True
