"""Compute pools: nodes, scaling with rollback, leases and the journal. Independent of data and models."""
