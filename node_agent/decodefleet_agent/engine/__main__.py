"""`python -m decodefleet_agent.engine FD`: the engine process, started by the server process."""

import logging
import sys

from decodefleet_agent.engine.process import main

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
sys.exit(main(int(sys.argv[1])))
