"""Reconcile pools: start and end nodes until they match the demand."""
