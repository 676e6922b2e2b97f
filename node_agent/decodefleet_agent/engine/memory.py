"""Pins the process's memory, so that no step ever waits for a page to come back from swap."""

from __future__ import annotations

import ctypes
import logging
import os

log = logging.getLogger(__name__)

_MCL_CURRENT, _MCL_ONFAULT = 1, 4


def lock_memory() -> bool:
    """Locks what has been touched so far: weights, pool and code. False, and a line in the log, where that is not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mlockall"):
        log.info("memory_locked=false reason=this system has no mlockall")
        return False
    # Without MCL_ONFAULT the kernel would fill every reserved mapping, gigabytes that PyTorch never touches.
    if libc.mlockall(_MCL_CURRENT | _MCL_ONFAULT):
        log.info("memory_locked=false reason=%s (RLIMIT_MEMLOCK, or the capability IPC_LOCK, permits it)", os.strerror(ctypes.get_errno()))
        return False
    log.info("memory_locked=true")
    return True
