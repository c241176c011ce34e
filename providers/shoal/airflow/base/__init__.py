"""Base classes of shoal's Airflow operators: `CheckedOperator`, its subclass `PoolOperator`, and its subclass
`WaitingOperator`."""
