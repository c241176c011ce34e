"""A module beside the files that Airflow loads."""

import scipy


def version() -> str:
    return scipy.__version__
