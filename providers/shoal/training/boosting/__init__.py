"""Gradient boosting: the code that XGBoost and LightGBM share."""
