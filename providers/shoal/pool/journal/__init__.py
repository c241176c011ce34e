"""The journal of pools: rows of requests, operations and nodes, and the only functions that change them."""
