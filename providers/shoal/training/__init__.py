"""Train and predict inside a pool: start groups of workers (gangs) and run each library on them.

Modules of this package must not import `shoal.jobs`.
"""
