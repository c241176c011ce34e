"""MLflow calls of user code in workers: they go to the job's run, whose experiment they may choose."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shoal.training.reporting import GangContext
from shoal.training.timeouts import SET_EXPERIMENT_WAIT_S
from shoal.training.tracking import experiment_id

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment
    from mlflow.entities import Run as MlflowRun


def after_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call a function as soon as a module is imported, or at once if the module is already imported."""
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder(MetaPathFinder):
    """Entry of ``sys.meta_path`` for one module. Python's other finders find the module, and this finder makes sure
    that `act` is called after the import."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the module, with a loader that calls `act`; return None for all other modules."""
        if fullname != self._name:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._act)
                return spec
        return None


class _Loader(Loader):
    """Loader that loads a module with the module's own loader, and then calls `act`."""

    def __init__(self, loader: Any, act: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._act = act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module that the module's own loader creates."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module with the module's own loader, and then call `act` with the module."""
        assert module.__spec__ is not None
        # The module's own loader is restored, because other code uses this loader, for example to read the module's
        # data files.
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._act(module)


ARTIFACTS = "SHOAL_MLFLOW_ARTIFACTS"
"""Environment variable with the URI of the folder for artifacts of new experiments; not set if MLflow's server decides
where artifacts are."""

JOB_RUN_TAG = "shoal.job_run"
"""Tag of the first MLflow run of a job. The value of the tag is the id of the run that the job uses now. The tag exists
only if rank 0 has called ``set_experiment``."""

FIRST_RUN_TAG = "shoal.first_run"
"""Tag of an MLflow run that has replaced the first run of a job. The value of the tag is the id of the first run."""

MOVED_NOTE = "mlflow_run"
"""Key of the note (message to the driver) with which rank 0 sends the id of the job's new run."""

_RUN_ID = "MLFLOW_RUN_ID"

_POLL_SECONDS = 0.25


def let_user_choose_experiment(gang: GangContext) -> None:
    """If the job has an MLflow run, replace ``mlflow.set_experiment`` by shoal's when user code imports MLflow."""
    if os.environ.get(_RUN_ID):
        job = _JobRun(gang, os.environ[_RUN_ID], os.environ.get("MLFLOW_TRACKING_URI"))
        after_import("mlflow", job.replace_set_experiment)


class _JobRun:
    """The job's MLflow run in this worker, with a method that replaces ``mlflow.set_experiment`` by shoal's version."""

    def __init__(self, gang: GangContext, first: str, uri: str | None) -> None:
        self._gang = gang
        self._first = first
        self._uri = uri

    def replace_set_experiment(self, mlflow: ModuleType) -> None:
        """Replace ``set_experiment`` in `mlflow` by a function that moves the job to a run in the chosen experiment."""
        original = mlflow.set_experiment

        @functools.wraps(original)
        def set_experiment(experiment_name: str | None = None, *args: Any, **options: Any) -> Experiment:
            # MLflow removes MLFLOW_RUN_ID from the environment when user code starts the job's run in this process. If
            # the variable is missing, user code has already started the job's run. The new experiment is then for
            # further runs, which do not belong to the job.
            if not os.environ.get(_RUN_ID):
                return original(experiment_name, *args, **options)
            # User code has chosen another tracking server, which does not have the job's run. Runs on that server do
            # not belong to the job.
            if mlflow.get_tracking_uri() != self._uri:
                del os.environ[_RUN_ID]
                return original(experiment_name, *args, **options)
            client = mlflow.MlflowClient()
            if self._gang.rank:
                run = self._wait_for_rank_0(client)
                os.environ[_RUN_ID] = run.info.run_id
                return original(experiment_id=run.info.experiment_id)
            if experiment_name is not None and os.environ.get(ARTIFACTS):
                experiment_id(client, experiment_name, os.environ[ARTIFACTS])
            experiment = original(experiment_name, *args, **options)
            os.environ[_RUN_ID] = self._find_or_create_run(client, experiment.experiment_id)
            return experiment

        mlflow.set_experiment = mlflow.tracking.fluent.set_experiment = set_experiment  # type: ignore[attr-defined]

    def _find_or_create_run(self, client: MlflowClient, experiment: str) -> str:
        """Find or create the job's MLflow run in an experiment, and return the run's id.

        If this worker has replaced a lost worker, it finds the run that the lost worker has created.
        """
        first = client.get_run(self._first)
        run = client.get_run(first.data.tags.get(JOB_RUN_TAG, self._first))
        if run.info.experiment_id != experiment:
            tags = {name: value for name, value in first.data.tags.items() if name != JOB_RUN_TAG}
            tags[FIRST_RUN_TAG] = self._first
            run = client.create_run(experiment, tags=tags, run_name=first.info.run_name)
        run_id = str(run.info.run_id)
        client.set_tag(self._first, JOB_RUN_TAG, run_id)
        self._gang.note({MOVED_NOTE: run_id})
        return run_id

    def _wait_for_rank_0(self, client: MlflowClient) -> MlflowRun:
        """Return the MLflow run that rank 0 has chosen, or the job's first run if rank 0 does not choose a run in
        time."""
        deadline = time.monotonic() + SET_EXPERIMENT_WAIT_S
        while (chosen := client.get_run(self._first).data.tags.get(JOB_RUN_TAG)) is None:
            if time.monotonic() > deadline:
                self._gang.log(
                    f"rank {self._gang.rank} called mlflow.set_experiment, but rank 0 did not call it within "
                    f"{SET_EXPERIMENT_WAIT_S:.0f} s: only rank 0's call has an effect, so the experiment of the job's "
                    "MLflow run is unchanged"
                )
                chosen = self._first
                break
            time.sleep(_POLL_SECONDS)
        return client.get_run(chosen)


def adopt_model(log: Callable[[str], None]) -> None:
    """Assign the worker's last logged model to the job's MLflow run, if user code logged the model without a run.

    The id of the job's run is in the environment variable MLFLOW_RUN_ID, but MLflow's `log_model` does not use this
    variable. A model that is logged without an active run therefore belongs to no run.
    """
    mlflow, run_id = sys.modules.get("mlflow"), os.environ.get("MLFLOW_RUN_ID")
    if mlflow is None or not run_id:
        return
    try:
        model = mlflow.last_logged_model()
        if model is not None and not model.source_run_id:
            output = mlflow.entities.LoggedModelOutput(model.model_id, step=0)
            mlflow.MlflowClient().log_outputs(run_id, models=[output])
    except Exception as error:
        log(f"the logged MLflow model could not be assigned to the job's run {run_id}: {error}")
