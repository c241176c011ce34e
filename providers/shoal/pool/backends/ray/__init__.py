"""Backend for existing Ray clusters. The backend watches the clusters' nodes and requests nodes over HTTP."""
