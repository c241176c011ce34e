"""The rows of pools: what was requested, what was decided, and the only ways they change."""
