"""What the operating system knows of this process."""

import os
from pathlib import Path

_STATM = Path("/proc/self/statm")


def resident_bytes() -> int | None:
    """Physical memory of the process; None where the system has no /proc."""
    if not _STATM.exists():
        return None
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
