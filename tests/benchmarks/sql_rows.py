"""Rows of a query as Parquet files: by ADBC and by SQLAlchemy, side by side, from a PostgreSQL server of its own.

Run it with ``python -m tests.benchmarks.sql_rows``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median

from tests.benchmarks.report import table
from tests.benchmarks.side import Side
from tests.benchmarks.turns import take_turns
from tests.support.postgres import MISSING, Postgres, binaries

ROWS = 1_000_000
WARMING_ROWS = 1_000
MOST = 0.35
"""Largest accepted ratio of the seconds of ADBC and SQLAlchemy."""

MAKE = f"""CREATE TABLE flights AS SELECT i::bigint AS id, i % 12 AS month, random() AS x, random() * i AS y,
    random()::real AS z, i % 3 = 0 AS late, 'carrier ' || i % 1000 AS carrier, DATE '2020-01-01' + i % 1000 AS day,
    TIMESTAMP '2020-01-01' + i * INTERVAL '1 second' AS at, (random() * 1000)::numeric(10, 2) AS price
    FROM generate_series(1, {ROWS}) i"""
QUERY = "SELECT * FROM flights WHERE id <= :last ORDER BY id"

Request = tuple[str, int]
"""URL of the database, and number of rows."""


@contextmanager
def shoal(adbc: bool, partition_by: str | None = None) -> Iterator[Callable[[Request], float]]:
    """As a job stages its rows, with and without the extra `adbc`."""
    from shoal.data import postgresql
    from shoal.data.sql import stage_select

    if not adbc:
        postgresql.find_spec = lambda name: None  # type: ignore[assignment]

    def stage(request: Request) -> float:
        url, last = request
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            assert stage_select(QUERY, {"last": last}, url, folder, partition_by=partition_by) == last
            return time.perf_counter() - began

    yield stage


@contextmanager
def pandas() -> Iterator[Callable[[Request], float]]:
    """As a script does it: `pandas.read_sql` in chunks, and a writer of Parquet files."""
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq
    import sqlalchemy as sa

    def write(request: Request) -> float:
        url, last = request
        with tempfile.TemporaryDirectory() as folder, sa.create_engine(url).connect() as connection:
            began = time.perf_counter()
            connection = connection.execution_options(stream_results=True)
            writer = None
            for chunk in pd.read_sql(sa.text(QUERY), connection, params={"last": last}, chunksize=32_768):
                rows = pa.Table.from_pandas(chunk.astype({"price": float}))
                writer = writer or pq.ParquetWriter(f"{folder}/rows.parquet", rows.schema, compression="zstd")
                writer.write_table(rows)
            assert writer is not None
            writer.close()
            return time.perf_counter() - began

    yield write


SIDES = {
    "shoal, SQLAlchemy": partial(Side, shoal, False),
    "shoal, ADBC": partial(Side, shoal, True),
    "shoal, ADBC, partition_by": partial(Side, shoal, True, "id"),
    "pandas.read_sql": partial(Side, pandas),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare ways to stage the rows of a query.")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each side (default: 5)")
    args = parser.parse_args(argv)
    if binaries() is None:
        print(MISSING)
        return 0
    server = Postgres()
    try:
        server.run(MAKE)
        server.run("VACUUM ANALYZE flights")
        url = server.url("postgres")
        taken = take_turns(SIDES, (url, WARMING_ROWS), (url, ROWS), args.repeat)
    finally:
        server.remove()
    seconds = {name: median(side.turns) for name, side in taken.items() if side.turns}
    today = seconds["shoal, SQLAlchemy"]
    rows = [
        [name, f"{seconds[name]:.1f}", f"{seconds[name] / today:.2f}", f"{side.peak_bytes / 2**20:,.0f}"]
        if side.turns
        else [name, str(side.failure), "", ""]
        for name, side in taken.items()
    ]
    print(table([f"PostgreSQL, {ROWS // 10**6} M x 10", "seconds", "x SQLAlchemy", "peak MiB"], rows))
    ratio = seconds["shoal, ADBC"] / today
    print(f"\nADBC takes {ratio:.2f} of SQLAlchemy's time; accepted: {MOST}")
    return int(ratio > MOST)


if __name__ == "__main__":
    raise SystemExit(main())
