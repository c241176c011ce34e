"""Make all pictures, or those of the named parts: ``python -m tests.support.pictures page architecture``."""

from __future__ import annotations

import sys

from tests.support.pictures import FOLDER, PICTURES, architecture, page, runs

MAKERS = {
    "architecture": architecture.make,
    "page": page.make,
    "airflow": runs.make_airflow,
    "prefect": runs.make_prefect,
}


def main(parts: list[str]) -> None:
    """Make the pictures of the parts, and print the size of each."""
    for part in parts or PICTURES:
        MAKERS[part]()
        for name in PICTURES[part]:
            print(f"{name}: {(FOLDER / name).stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
