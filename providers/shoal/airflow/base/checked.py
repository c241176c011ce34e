"""Base class of operators whose arguments are checked while Airflow loads the DAG."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator, get_current_context
from airflow.sdk.exceptions import AirflowFailException

from shoal.airflow.checks import Arguments
from shoal.errors import InvalidArgumentError

if TYPE_CHECKING:
    from airflow.sdk.definitions.mappedoperator import OperatorPartial


class CheckedOperator(BaseOperator):
    """Base class of operators whose arguments are checked while Airflow loads the DAG, as far as they are known then.

    The constructor of a subclass calls `check` when it has set all attributes.
    """

    @classmethod
    @abstractmethod
    def check_arguments(cls, arguments: Arguments) -> None:
        """Check those arguments that are known.

        :param arguments: Arguments of the constructor.
        :raises InvalidArgumentError: An argument is wrong.
        """

    @classmethod
    def check(cls, task_id: str, arguments: Mapping[str, Any]) -> None:
        """Check those arguments of a task that are known.

        :param task_id: Id of the task, for the message.
        :param arguments: Arguments of the constructor. Those that are missing are not known yet.
        :raises InvalidArgumentError: An argument is wrong.
        :raises AirflowFailException: The same, in a task: Airflow creates the instances of a mapped task only there.
        """
        in_task = _is_in_task()
        try:
            cls.check_arguments(Arguments(arguments, in_task=in_task))
        except InvalidArgumentError as error:
            message = f"task {task_id}: {error}"
            if in_task:
                raise AirflowFailException(message) from error
            raise InvalidArgumentError(message) from None

    @classmethod
    def partial(cls, *, task_id: str, **kwargs: Any) -> OperatorPartial:
        """Check the arguments that all instances of a mapped task have in common, and return Airflow's object for them.

        :param task_id: Id of the task.
        :param kwargs: Arguments that the instances have in common.
        """
        cls.check(task_id, kwargs)
        return super().partial(task_id=task_id, **kwargs)


def _is_in_task() -> bool:
    try:
        get_current_context()
    except RuntimeError:
        return False
    return True
