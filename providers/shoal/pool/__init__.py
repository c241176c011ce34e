"""Compute pools: nodes, scaling with rollback, leases, journal. Knows nothing of data or models."""
