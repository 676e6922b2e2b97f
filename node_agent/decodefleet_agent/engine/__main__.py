"""`python -m decodefleet_agent.engine FD`: the engine process, started by the server process."""

import logging
import os
import sys

# OpenMP reads it when PyTorch loads. By default its threads spin for milliseconds at every barrier, which takes the cores from
# whoever shares them: two engines on two cores were four times slower than with a short spin.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

from decodefleet_agent.engine.process import main

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
sys.exit(main(int(sys.argv[1])))
