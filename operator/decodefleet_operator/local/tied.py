"""Starts a program that dies with its parent: `python -m decodefleet_operator.local.tied SIGNAL PARENT PROGRAM ARGUMENT...`.

The kernel sends the signal when the parent ends, however it ends. It is asked for in a process of its own, since code between fork and exec
is not safe in a parent with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    wanted, parent, program = signal.Signals[arguments[0]], int(arguments[1]), arguments[2:]
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(wanted), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != parent:  # it ended before the kernel knew
            sys.exit(1)
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
