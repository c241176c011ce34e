"""Train gradient boosting models: the code that is the same for XGBoost and LightGBM."""
