"""Entrance: Airflow connections of type `compute_pool`, and the fields of Prefect's block."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from tests.airflow import home  # noqa: F401 - before anything imports Airflow
from tests.entrances.conftest import refusals
from tests.entrances.test_pools import FIELDS, fields
from tests.entrances.wrong_values import SECRET, documents, many, names, number_texts, numbers, texts, urls

extras = st.one_of(
    st.none(),
    texts,
    documents.map(json.dumps),
    st.dictionaries(st.sampled_from(FIELDS), st.one_of(number_texts, texts, urls(), numbers), max_size=4).map(
        json.dumps
    ),
)


@many
@given(
    host=st.one_of(st.none(), names, texts, urls()),
    schema=st.one_of(st.none(), st.just("local"), st.just("ray"), texts),
    login=st.one_of(st.none(), texts),
    port=st.one_of(st.none(), st.integers(-1, 70_000)),
    extra=extras,
)
@example(host="retrain", schema=None, login=None, port=None, extra="{")
@example(host="retrain", schema=None, login=None, port=None, extra="[1]")
def test_connections(nothing_left, host: Any, schema: Any, login: Any, port: Any, extra: Any):
    from airflow.sdk import Connection

    from shoal.airflow.hooks import ComputePoolHook, spec_of

    connection = Connection(
        conn_id="pool", conn_type="compute_pool", host=host, schema=schema, login=login, password=SECRET, port=port,
        extra=extra,
    )  # fmt: skip
    with refusals():
        spec_of(connection)

    class Hook(ComputePoolHook):
        @classmethod
        def get_connection(cls, conn_id: str) -> Connection:
            return connection

    said = Hook("pool").test_connection()[1]
    assert said
    assert SECRET not in said
    nothing_left()


@many
@example(fields={"name": "a", "backend": "\ud800"}, named=False, name="a")
@given(fields=fields, named=st.booleans(), name=names)
def test_blocks(fields: dict[str, Any], named: bool, name: str):
    from pydantic import ValidationError

    from shoal.prefect import ComputePool

    with refusals(ValidationError):  # Prefect shows a block's form again with what pydantic found
        block = ComputePool(**({"name": name, **fields} if named else fields))
        assert block.spec.uri
