"""Options of pools on this machine."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from shoal.boosting_libraries import BOOSTING_LIBRARIES
from shoal.option_validation import optional
from shoal.pool.options.base import PoolOptions, items

LIBRARIES = (*BOOSTING_LIBRARIES, "mlflow", "torch")
"""Values of `LocalOptions.libraries`."""


class LocalOptions(PoolOptions):
    """Options of a local:// pool."""

    backend_class: ClassVar[str] = "shoal.pool.backends.local.backend:LocalBackend"

    ray: bool = Field(
        default=True,
        description="Whether the nodes of a local:// pool run Ray. A pool without Ray has no GPUs, starts in a second "
        "or two, and takes less memory. The workers of its jobs are plain processes.",
    )

    ray_dashboard: bool = Field(
        default=False,
        description="Whether the head of a local:// pool runs Ray's dashboard, with Ray's Job API and state API. "
        "The dashboard takes memory and makes the start slower, and shoal's jobs do not need it.",
    )

    libraries: str | None = optional(
        f"Libraries, separated by commas, that the head of a local:// pool imports while the pool starts, "
        f"so that the first job starts sooner: {', '.join(LIBRARIES)}. With mlflow, the head also creates shoal's own "
        "MLflow database if there is none. torch needs ray=false. Default: none; the first job that needs a library "
        "imports it for all jobs."
    )

    python: str | None = optional(
        "Path of the Python interpreter that runs the nodes and jobs of a local:// pool, such as /opt/train/bin/python "
        "of an environment with other libraries than Airflow's. Install the same version of shoal there. Default: the "
        "interpreter of the process that starts the pool."
    )

    def library_names(self) -> list[str]:
        """Return the libraries in the option `libraries` as a list."""
        return items(self.libraries)

    def check_options(self) -> None:
        """Raise an error if a library is unknown, or if options do not fit to a pool without Ray."""
        if not self.ray and self.gpus_per_node:
            raise ValueError(
                f"gpus_per_node={self.gpus_per_node} is not allowed with ray=false, because only Ray divides GPUs "
                "among workers: remove one of the two options"
            )
        if not self.ray and self.ray_dashboard:
            raise ValueError("ray_dashboard=true is not allowed with ray=false: remove one of the two options")
        if unknown := [name for name in self.library_names() if name not in LIBRARIES]:
            raise ValueError(f"libraries={self.libraries}: {unknown[0]} is not one of {', '.join(LIBRARIES)}")
        if self.ray and "torch" in self.library_names():
            raise ValueError("libraries=torch is allowed only with ray=false: with Ray, each job imports it itself")
        if self.python is not None and not self.python.startswith("/"):
            raise ValueError(f"python={self.python} is not an absolute path: begin the path with /")
