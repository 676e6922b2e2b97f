"""`python -m decodefleet_agent` runs the server process."""

import sys

from decodefleet_agent.main import main

sys.exit(main())
