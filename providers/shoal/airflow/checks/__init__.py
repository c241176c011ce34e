"""Check the arguments of operators: when Airflow loads a DAG, and in the setup task of a block."""
