"""What is expected of rows: refused with the figures of all faults, about the rows that filters and splits select."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.data import DataConnector
from shoal.data.dataset_spec import DatasetSpec
from shoal.errors import DataError, InvalidArgumentError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred rows of ten days: `x` counts them, `delay` has a null and a NaN, and keys repeat."""
    made = tmp_path_factory.mktemp("rows")
    begin = datetime(2024, 1, 1, tzinfo=UTC)
    table = pa.table(
        {
            "x": list(range(100)),
            "delay": [None, float("nan"), *map(float, range(98))],
            "day": [date(2024, 1, 1) + timedelta(days=i // 10) for i in range(100)],
            "at": pa.array([begin + timedelta(hours=i) for i in range(100)], pa.timestamp("ns", "Europe/Berlin")),
            "flight": pa.array([f"LH{i % 99}" for i in range(100)], pa.string_view()),
            "half": pa.array([i // 2 for i in range(100)]).cast(pa.float64()),
            "tail": pa.array([None if i > 97 else str(i) for i in range(100)]).dictionary_encode(),
        }
    )
    pq.write_table(table.slice(0, 60), made / "a.parquet", row_group_size=25)
    pq.write_table(table.slice(60), made / "b.parquet")
    return made


AT = "2024-01-12T00:00:00+00:00"


@pytest.mark.parametrize(
    ("expected", "fault"),
    [
        ({"rows": {"min": 101}}, "100 rows, at least 101 expected"),
        ({"rows": {"max": 99}}, "100 rows, at most 99 expected"),
        ({"nulls": {"delay": 0.01}}, '2 of 100 rows have no "delay" (a share of 0.02, at most 0.01 expected)'),
        ({"nulls": {"tail": 0}}, '2 of 100 rows have no "tail" (a share of 0.02, at most 0 expected)'),
        ({"range": {"x": (0, 90)}}, '9 of 100 rows do not match x <= 90 ("x" is from 0 to 99)'),
        ({"range": {"delay": (0.5, None)}}, '1 of 100 rows do not match delay >= 0.5 ("delay" is from 0.0 to 97.0)'),
        (
            {"range": {"day": (None, date(2024, 1, 9))}},
            "10 of 100 rows do not match day <= '2024-01-09' (\"day\" is from '2024-01-01' to '2024-01-10')",
        ),
        ({"range": {"at": ("2024-01-01T01:00+00:00", None)}}, "1 of 100 rows do not match at >= '2024-01-01T01:00+00:"),
        (
            {"fresh": {"column": "day", "within": "23h", "at": AT}},
            f'the newest "day" is 2024-01-10, more than 23h {""}',
        ),
        (
            {"fresh": {"column": "at", "within": "6d", "at": AT}},
            'the newest "at" is 2024-01-05T03:00:00+00:00',
        ),
        ({"fresh": {"column": "at", "within": "1w"}}, f"more than 1w before {datetime.now(UTC).year}-"),
        ({"unique": ["flight"]}, "1 of 100 rows repeat the key of another row, such as 'LH0' in 2 rows"),
        ({"unique": ["x", ["half", "day"]]}, "such as (0.0, '2024-01-01') in 2 rows"),
        (
            {"unique": ["tail"]},
            "(tail) is not unique: 1 of 100 rows repeat the key of another row, such as None",
        ),
    ],
)
def test_rows_that_are_not_as_expected_are_refused_with_figures(
    folder: Path, expected: dict[str, Any], fault: str
) -> None:
    with pytest.raises(DataError, match=re.escape(fault)) as refused:
        DataConnector.from_parquet(folder).expect(**expected)
    assert refused.value.permanent and str(folder) in str(refused.value)


def test_rows_that_are_as_expected_pass_and_all_faults_are_named_at_once(folder: Path) -> None:
    rows = DataConnector.from_parquet(folder)
    met: dict[str, Any] = {
        "rows": {"min": 100, "max": 100},
        "nulls": {"delay": 0.02, "x": 0},
        "range": {"x": (0, 99), "delay": (0, 97), "day": ("2024-01-01", "2024-01-10"), "flight": ("LH", "LH99")},
        "fresh": {"column": "day", "within": "24h", "at": AT},
        "unique": ["x", "at", ["flight", "day"]],
    }
    assert rows.expect(**met) is rows
    with pytest.raises(DataError, match=r"at least 200.*at most 0 expected.*x <= 5.*not unique"):
        rows.expect(rows={"min": 200}, nulls={"delay": 0}, range={"x": (0, 5)}, unique=["flight"])


def test_the_expectation_is_about_the_selected_rows(folder: Path) -> None:
    late = DataConnector.from_parquet(folder, filters=[("x", ">=", 2)])
    late.expect(rows={"min": 98, "max": 98}, nulls={"delay": 0}, range={"x": (2, None)})
    part, other = late.random_split([0.5, 0.5])
    assert part.num_rows() + other.num_rows() == 98
    part.expect(rows={"max": part.num_rows()})
    with pytest.raises(DataError, match=f"{other.num_rows()} rows, at most 5 expected"):
        other.expect(rows={"max": 5})


def test_keys_are_compared_by_their_values_and_not_by_their_hashes(tmp_path: Path) -> None:
    assert hash(-1) == hash(-2)
    summer, winter = (datetime(2024, 10, 27, hour, 30, tzinfo=UTC) for hour in (0, 1))
    table = pa.table({"id": [-1, -2], "at": pa.array([summer, winter], pa.timestamp("us", "Europe/Berlin"))})
    pq.write_table(table, tmp_path / "a.parquet")
    DataConnector.from_parquet(tmp_path).expect(unique=["id", "at"])  # Berlin's clocks show 02:30 twice
    pq.write_table(table.slice(1), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"\(id\) is not unique: 2 of 3 rows .* such as -2 in 2 rows"):
        DataConnector.from_parquet(tmp_path).expect(unique=["id"])


@pytest.mark.parametrize(
    ("expected", "error", "message"),
    [
        ({"nulls": {"dely": 0}}, DataError, 'has no column "dely"; did you mean "delay"?'),
        ({"unique": [["x", "z"]]}, DataError, 'has no column "z"'),
        ({"range": {"x": ("a", None)}}, DataError, "cannot be compared with 'a': give a number"),
        ({"fresh": {"column": "x", "within": "2d"}}, DataError, "so its values have no age"),
        ({"fresh": {"column": "day", "within": "2 months"}}, InvalidArgumentError, "is not a duration"),
        ({"fresh": {"column": "day", "within": "2d", "at": "soon"}}, InvalidArgumentError, "'soon' is not a time"),
        ({"nulls": {"x": 2}}, InvalidArgumentError, "nulls.x=2"),
        ({"range": {"x": (float("nan"), None)}}, InvalidArgumentError, "range.x.0"),
        ({"range": {"x": (0, float("inf"))}}, InvalidArgumentError, "range.x.1"),
        ({"rows": {"least": 2}}, InvalidArgumentError, 'unknown option "rows.least"'),
    ],
)
def test_an_expectation_that_cannot_be_checked_is_refused(
    folder: Path, expected: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        DataConnector.from_parquet(folder).expect(**expected)


def test_a_share_that_is_just_allowed_passes_and_the_last_day_is_an_age(tmp_path: Path) -> None:
    later = pa.array([500_000_000_000_000] * 100, pa.timestamp("ms"))  # after Python's last year
    half = pa.array([0.5] * 100, pa.float16())
    rows = pa.table({"x": [None] * 29 + [1] * 71, "until": [date(9999, 12, 31)] * 100, "later": later, "half": half})
    pq.write_table(rows, tmp_path / "a.parquet")
    assert 0.29 * 100 < 29
    data = DataConnector.from_parquet(tmp_path)
    data.expect(nulls={"x": 0.29}, fresh={"column": "until", "within": "2d"}, range={"half": (0, 1)})
    data.expect(fresh={"column": "later", "within": "2d"})
    data.expect(fresh={"column": "until", "within": "999999d"})
    with pytest.raises(DataError, match="is from '17814-"):
        data.expect(range={"later": (None, "2024-01-01")})


def test_a_spec_without_expectations_is_stored_as_by_earlier_versions() -> None:
    assert not {"expect", "time_split"} & DatasetSpec(paths=("/rows",)).model_dump().keys()
    given = {"paths": ["/rows"], "expect": {"unique": ["id", ["a", "b"]], "range": {"day": [None, date(2024, 1, 1)]}}}
    spec = DatasetSpec.parse(given)
    assert DatasetSpec.parse(spec.model_dump(mode="json")) == spec
