"""Reconcile pools: start their missing nodes and end their surplus nodes."""
