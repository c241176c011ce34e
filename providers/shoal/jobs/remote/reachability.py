"""Refuse a job if the pool's nodes cannot reach the job's files, or lack software that the job needs."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import select

from shoal.errors import InvalidArgumentError, PoolNotFoundError
from shoal.jobs.files import storage
from shoal.jobs.files.storage import default_uri
from shoal.jobs.remote import package
from shoal.jobs.remote.package import is_reachable, is_remote, path_here
from shoal.jobs.spec import OBJECT_STORE, AnyJobSpec
from shoal.pool.api import ComputePool
from shoal.pool.journal import rows
from shoal.pool.spec import PoolSpec
from shoal.secrets.redaction import redact_value
from shoal.state import Store
from shoal.state.home import home
from shoal.state.schema import Pool
from shoal.training.locations import SQLITE

_SHARED = (
    "if all hosts mount it at the same path, name its folder in the option shared_folders of the pool (several folders "
    "are separated by commas)"
)

_MLFLOW_SERVER = "set MLFLOW_TRACKING_URI to an MLflow server"

_TOO_LARGE = (
    f"only data of at most {package.MAX_FRAME_BYTES // 2**20} MiB are sent with a job, so set "
    f"run_config.artifact_location, or pass staging_location=, with a URI in {OBJECT_STORE}"
)


def spec_of(store: Store, pool: str) -> PoolSpec:
    """Return the settings of a pool.

    Raises:
        PoolNotFoundError: There is no such pool.
    """
    with store.reading() as session:
        spec = session.scalar(select(Pool.spec).where(Pool.name == pool))
        if spec is None:
            raise PoolNotFoundError(pool, rows.pool_names(session))
    return PoolSpec.model_validate(spec)


def located(spec: AnyJobSpec, pool: PoolSpec) -> AnyJobSpec:
    """Make sure that the job's results go to a location that the pool's nodes can reach, and return the spec.

    If the spec names no location and the nodes do not share `$SHOAL_HOME`, the results go into the state store. If the
    nodes share `$SHOAL_HOME`, the MLflow database in it is named, because the nodes' own home is another one. In all
    other cases the spec is returned unchanged.
    """
    if not is_remote(pool):
        return spec
    if is_reachable(str(home()), pool):
        if spec.tracking is None or spec.tracking.uri is not None:
            return spec
        return spec.model_copy(update={"tracking": spec.tracking.model_copy(update={"uri": default_uri()})})
    if spec.run_config.artifact_location is not None:
        return spec
    config = spec.run_config.model_copy(update={"artifact_location": storage.IN_STORE})
    return spec.model_copy(update={"run_config": config})


def check(spec: AnyJobSpec, pool: PoolSpec) -> None:
    """Refuse a job that names a file on this machine, if the pool's nodes may be on other hosts.

    A file in one of the pool's `shared_folders` is allowed.

    Raises:
        InvalidArgumentError: The nodes cannot reach a path that the job needs. The message names the option to set.
    """
    if not is_remote(pool):
        return
    for location, what, remedy in _needed(spec):
        path = None if location is None else path_here(location)
        if path is not None and not is_reachable(path, pool):
            raise InvalidArgumentError(
                f'{what} {redact_value(path)} is on this machine, where the nodes of pool "{pool.name}" cannot reach '
                f"it: {remedy}; or, {_SHARED}"
            )
    if spec.register_as is not None and spec.tracking is not None and spec.tracking.uri is None:
        raise InvalidArgumentError(
            f'the nodes of pool "{pool.name}" would register the model in a database of their own, which nobody else '
            f"reads: {_MLFLOW_SERVER}"
        )
    if spec.run_config.artifact_location == storage.IN_STORE and spec.exchanges_files:
        raise InvalidArgumentError(
            "the rows and results of partitions must be written to a location that all nodes can reach: set "
            f"run_config.artifact_location to a URI in {OBJECT_STORE}"
        )
    if spec.run_config.artifact_location == storage.IN_STORE and any(each.sql for each in spec.datasets()):
        raise InvalidArgumentError(
            "a dataset has the option sql, so its rows must be written to a location that all nodes can read: set "
            f"run_config.artifact_location to a URI in {OBJECT_STORE}"
        )


def check_nodes(store: Store, pool: PoolSpec) -> None:
    """Check whether jobs can run on the nodes, once for each pool and environment (`ComputePool.check_nodes`).

    Raises:
        InvalidArgumentError: No job can run on the nodes.
    """
    if is_remote(pool) and (broken := ComputePool(pool.name, store=store, is_named=False).check_nodes()):
        problems = "; ".join(str(each) for each in broken)
        raise InvalidArgumentError(
            f'no job can run on the nodes of pool "{pool.name}": {problems}. Correct this, then run '
            f"`shoal doctor --pool {pool.name}` to check the nodes again"
        )


def _needed(spec: AnyJobSpec) -> Iterator[tuple[str | None, str, str]]:
    """Yield each location that a job needs, with a description and a remedy if it cannot be reached."""
    for dataset in spec.datasets():
        yield dataset.staging, "the staged copy of a frame or a query in", _TOO_LARGE
        for path in dataset.paths:
            yield path, "the dataset", f"copy it to {OBJECT_STORE}"
    yield spec.run_config.artifact_location, "artifact_location", f"set it to a URI in {OBJECT_STORE}"
    tracking = spec.tracking
    if tracking is not None and tracking.uri and tracking.uri != "databricks":
        yield (
            tracking.uri.removeprefix(SQLITE).removeprefix("sqlite:"),
            f"MLflow's database {redact_value(tracking.uri)}, the file",
            f"{_MLFLOW_SERVER}, or set RunConfig(tracking=None) to record nothing",
        )
    yield from spec.locations()
