"""The contract between decodefleet's operator, its node agents and their clients."""
