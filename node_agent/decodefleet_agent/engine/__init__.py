"""The decoding engine, in its own process: schedule, run, postprocess."""
