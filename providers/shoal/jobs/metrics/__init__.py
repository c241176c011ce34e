"""Metrics: `evaluation` compares new models with the champion and a constant; `series` are those that a job reports."""
