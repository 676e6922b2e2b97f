"""The real server process around the scripted engine; takes the arguments of `python -m decodefleet_agent`."""

import pathlib
import sys

from decodefleet_agent.main import main

if __name__ == "__main__":
    sys.exit(main(engine=(sys.executable, str(pathlib.Path(__file__).with_name("scripted_engine.py")))))
