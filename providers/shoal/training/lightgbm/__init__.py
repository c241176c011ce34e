"""LightGBM on a gang: what the driver does, what every worker does."""
