"""Backend for existing Ray clusters: watch them and request nodes over HTTP."""
