"""Compute pools: nodes, scaling with rollback, leases, and the journal (the record of requests in the database).

The modules of this package do not import shoal's modules for data and models.
"""
