"""The engines that are compared, one file each, behind `decodefleet_agent.bench.protocol.Peer`.

They run in child processes, in whatever environment has their library: each file imports that library and the standard one only.
"""
