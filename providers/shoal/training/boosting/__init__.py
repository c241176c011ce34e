"""Gradient boosting, whichever library does it: what XGBoost and LightGBM have in common."""
