"""Put the value of a column into the names of a spec: model, experiment, MLflow run, tags and job id."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from shoal.data.syntax import Scalar
from shoal.errors import InvalidArgumentError, shown
from shoal.jobs.specs.function import AnyJobSpec, parse_spec

_PLACEHOLDER = re.compile(r"(?<!\{)\{([^{}\s]+)\}(?!\})")
"""Pattern of a placeholder such as ``{carrier}``. A template of Airflow such as ``{{ ds }}`` does not match."""

_NOT_IN_A_NAME = re.compile(r"[^\w.-]+")
_NOT_IN_AN_ID = re.compile(r"[^A-Za-z0-9._-]+")


class Names:
    """The names in a spec that contain a column's value: model, experiment, MLflow run, tags and job id.

    Args:
        spec: The spec, without a job id.
        job_id: Job id of the spec, which may contain the placeholder.
        column: Name of the column.

    Raises:
        InvalidArgumentError: A name has the placeholder of another column.
    """

    def __init__(self, spec: AnyJobSpec, job_id: str | None, column: str) -> None:
        self._job_id = job_id
        self._column = column
        self._placeholder = f"{{{column}}}"
        register, tracking = spec.register_as, spec.tracking
        self._model = None if register is None else register.model
        named = {
            "register.model": self._model,
            "tracking.experiment": tracking and tracking.experiment,
            "tracking.run_name": tracking and tracking.run_name,
            "run_config.job_id": job_id,
        }
        for field, name in named.items():
            for found in _PLACEHOLDER.findall(name or ""):
                if found != column:
                    raise InvalidArgumentError(
                        f'{field}="{name}" contains the placeholder {{{found}}}: the only placeholder is '
                        f"{self._placeholder}, with the name of the column. Use this placeholder, or remove the other "
                        "one"
                    )

    def texts(self, values: Sequence[Scalar]) -> list[str]:
        """Convert each value to a text that a name can contain, and check that no two values become the same text.

        Letters, digits, ``_``, ``-`` and ``.`` of a value are kept. Each sequence of other characters becomes ``_``.

        Raises:
            InvalidArgumentError: Two values give the same name or the same job id.
        """
        texts = [_NOT_IN_A_NAME.sub("_", str(value).strip()) or "_" for value in values]
        self._check_unique(values, texts)
        if self._job_id is not None:
            self._check_unique(values, [_NOT_IN_AN_ID.sub("_", text) for text in texts])
        return texts

    def _check_unique(self, values: Sequence[Scalar], texts: Sequence[str]) -> None:
        first: dict[str, Scalar] = {}
        for value, text in zip(values, texts, strict=True):
            if text in first:
                raise InvalidArgumentError(
                    f'the values {shown(first[text])} and {shown(value)} of column "{self._column}" both become '
                    f'"{text}" in names: change one of these values in the table, or leave one of them out of values='
                )
            first[text] = value

    def filled(self, spec: AnyJobSpec, text: str) -> dict[str, Any]:
        """Put a value's text into all names of a spec, and return the spec as plain data for JSON.

        Raises:
            InvalidArgumentError: A name that contains the value is too long or not legal.
        """
        document = spec.document()
        if self._model is not None:
            document["register"]["model"] = self._with_value(self._model, text)
        if tracking := document.get("tracking"):
            for field in ("experiment", "run_name"):
                tracking[field] = tracking[field] and tracking[field].replace(self._placeholder, text)
            tracking["tags"] = {name: tag.replace(self._placeholder, text) for name, tag in tracking["tags"].items()}
        if self._job_id is not None:
            document["run_config"]["job_id"] = self._with_value(self._job_id, _NOT_IN_AN_ID.sub("_", text))
        return parse_spec(document).document()

    def _with_value(self, name: str, text: str) -> str:
        """Return a name with the value in place of the placeholder, or at the end if there is no placeholder."""
        return name.replace(self._placeholder, text) if self._placeholder in name else f"{name}-{text}"
