"""The node agent: a gRPC server and the decoding engine behind it."""
