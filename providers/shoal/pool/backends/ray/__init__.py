"""Backend for existing Ray clusters, which watches their nodes and requests nodes over HTTP."""
