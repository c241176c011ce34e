"""Metrics by which a new model is compared with the champion and with a constant prediction."""
