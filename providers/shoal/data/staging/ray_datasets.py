"""Write the rows of a Ray Data pipeline to Parquet files in a staging directory; Ray's tasks write the files."""

from __future__ import annotations

import os
from typing import Any

from shoal.data.parquet.filesystems import resolve
from shoal.data.parquet.paths import is_local
from shoal.data.ray_data import connected_ray
from shoal.data.staging.location import staged
from shoal.errors import InvalidArgumentError


def stage_ray_dataset(dataset: Any, staging_location: str | os.PathLike[str] | None) -> str:
    """Run a Ray Data pipeline and write its rows to Parquet files in a new staging directory.

    Raises:
        MissingExtraError: If Ray is not installed.
        InvalidArgumentError: If this process is not connected to Ray, or if no location was given and the nodes are on
            several hosts.
        DataError: If the location is not writable.
    """
    with staged(staging_location) as directory:
        ray = connected_ray()
        hosts = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
        if is_local(directory) and len(hosts) > 1 and staging_location is None:
            raise InvalidArgumentError(
                f"the pool's nodes are on {len(hosts)} hosts, which do not share the directory "
                f"{os.path.dirname(directory)}: pass staging_location= with a directory or URI that all hosts can reach"
            )
        filesystem, inner = resolve(directory)
        dataset.write_parquet(inner, filesystem=filesystem, try_create_dir=False, compression="zstd")
    return directory
