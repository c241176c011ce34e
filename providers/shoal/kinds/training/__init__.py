"""Jobs that train an XGBoost or LightGBM model."""
