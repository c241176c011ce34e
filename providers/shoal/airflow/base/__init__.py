"""Base classes of shoal's Airflow operators: each adds one ability to the one before."""
