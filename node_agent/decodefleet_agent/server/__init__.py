"""The server process of a node agent: gRPC, tokenisation, text out, metrics; the engine is its child."""
