"""Provide the base classes of shoal's Airflow operators: `CheckedOperator`, `PoolOperator` and `WaitingOperator`. Each
class is a subclass of the previous class."""
