"""Base class of operators whose mapped instances Airflow shows with a name, such as that of a model."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from airflow.sdk import get_current_context
from airflow.sdk.definitions.mappedoperator import OperatorPartial

from shoal.airflow.base.checked import CheckedOperator


class LabelledOperator(CheckedOperator):
    """Base class of operators whose mapped instances Airflow shows with what each instance is about."""

    @classmethod
    def partial(cls, *, task_id: str, **kwargs: Any) -> OperatorPartial:
        """Check the arguments that all instances of a mapped task have in common, as in `CheckedOperator.partial`. By
        default, Airflow shows each instance with what it is about (see `instance_label`).

        :param task_id: Id of the task.
        :param kwargs: Arguments that the instances have in common.
        """
        return super().partial(task_id=task_id, **{"map_index_template": "{{ task.instance_label }}", **kwargs})

    @property
    def instance_label(self) -> str:
        """The map index and what the instance is about, as far as this is known, such as ``3 delays-UA``. The property
        never raises, because Airflow would fail the task."""
        # The text is never a number alone. In a DAG with render_template_as_native_obj, Airflow would convert it to an
        # int, and fail the task.
        label = self.task_id
        with suppress(Exception):
            label = self.job_label
            return f"{get_current_context()['ti'].map_index} {label}"
        return label

    @property
    def job_label(self) -> str:
        """What the instance is about, from the operator's rendered arguments."""
        return self.task_id
