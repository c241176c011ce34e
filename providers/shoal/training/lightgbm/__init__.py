"""Distributed LightGBM training: the driver's side and the workers' side."""
