"""Entrance: paths, and what a SQL query and its connection may be called."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.data import DataConnector
from tests.entrances.conftest import refusals
from tests.entrances.wrong_values import SECRET, documents, many, texts, urls

# Names that no file system of this machine serves: a scheme of the cloud would be asked over the network.
LOCAL_SCHEMES = st.sampled_from(["file://", "file:", "//", "x+y://", "local://", "memory://"])
local_urls = urls(LOCAL_SCHEMES)
FOLDER = "/FOLDER"
"""Stands for a folder of the test, so that no example makes a folder at the root of the file system."""


@many
@given(path=st.one_of(texts, local_urls, st.lists(texts, max_size=2), documents))
@example(path=f"file:user:{SECRET}@host/{'a' * 300}")
@example(path="a\0b")
@example(path="\ud800")
@example(path="~nobody-at-all/x")
@example(path="file://[::1")
def test_paths(nothing_left, path: Any):
    with refusals():
        DataConnector.from_parquet(path).num_rows()
        pytest.fail("nothing is there")
    nothing_left()


@many
@example(location="file://host/%00")
@example(location=f"file:user:{SECRET}@host/{'a' * 300}")
@given(location=st.one_of(urls(LOCAL_SCHEMES, FOLDER), st.sampled_from(["a\0b", "\ud800", "/proc/x", "/dev/null"])))
def test_staging_locations(nothing_left, tmp_path: Path, location: str):
    import pandas as pd

    location = location.replace(FOLDER, f"{tmp_path}/a/b/c", 1)
    with refusals():
        DataConnector.from_dataframe(pd.DataFrame({"a": [1]}), staging_location=location).discard_staging()
    # The location itself stays: it is the caller's. What was staged there must be gone, so that it is empty.
    for folder, _, _ in os.walk(tmp_path, topdown=False):
        if folder != str(tmp_path):
            os.rmdir(folder)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


identifiers = st.one_of(texts, st.sampled_from(['"', '""', "a:b", ":x", "%s", "a.b", "select", "_shoal_staging", "\\"]))


@many
@given(columns=st.lists(identifiers, min_size=1, max_size=3), table=identifiers)
@example(columns=[":x"], table="t")
def test_identifiers(nothing_left, tmp_path: Path, columns: list[str], table: str):
    """A query that the database takes arrives with its columns as they are called; nothing else is left staged."""
    database = tmp_path.parent / f"{tmp_path.name}.db"
    select = ", ".join(f"1 AS {_quoted(name)}" for name in columns)
    query = f"SELECT {select} FROM (SELECT 1) AS {_quoted(table)}"
    with refusals():
        connector = DataConnector.from_sql(query, f"sqlite:///{database}")
        try:
            assert connector.to_arrow().column_names == columns
        finally:
            connector.discard_staging()
    nothing_left()


@many
@given(
    query=st.one_of(texts, documents, st.sampled_from(["SELECT 1", "SELECT 1 AS a, 2 AS a", "PRAGMA x", "SELECT :x"])),
    connection=st.one_of(
        st.just("sqlite://"), texts, documents, urls(st.sampled_from(["sqlite://", "postgresql://", "nosuch://", ""]))
    ),
)
@example(query="SELECT 1", connection=sqlite3.connect)
def test_queries(nothing_left, query: Any, connection: Any):
    with refusals():
        DataConnector.from_sql(query, connection).discard_staging()
    nothing_left()
