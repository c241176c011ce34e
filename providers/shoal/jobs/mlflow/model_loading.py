"""Load a model from MLflow: XGBoost and LightGBM models directly, any other model through MLflow's pyfunc."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from shoal.errors import DataError, InvalidArgumentError, JobError, RegistryError
from shoal.jobs.mlflow.job_run import MARK
from shoal.jobs.mlflow.pyfunc import PyfuncPredictor
from shoal.jobs.mlflow.registry import is_ours, is_unreachable
from shoal.jobs.partitions import pyfunc_loader
from shoal.jobs.partitions.pyfunc_loader import PartitionedModel
from shoal.redaction import redact_value
from shoal.training.boosting.model_format import why_unreadable
from shoal.training.boosting.request import Framework
from shoal.training.host.forks import ending_forks
from shoal.training.host.imports import add_estimators
from shoal.training.mlflow.model_uris import VERSION

if TYPE_CHECKING:
    from mlflow.models.model import ModelInfo

    from shoal.training.boosting.prediction import BoosterPredictor


Predictor: TypeAlias = "BoosterPredictor | PyfuncPredictor | PartitionedModel"
"""An object that predicts tables with one model."""


def load(model_uri: str, input_cols: Sequence[str] = (), *, category_codes: bool = False) -> Predictor:
    """Load a model from MLflow, and return an object that predicts tables with it.

    Raises:
        JobError: The model's files do not exist, or MLflow cannot load the model.
        RegistryError: MLflow, or its storage of models, cannot be reached.
        DataError: The model's input columns or the categories of a column are not known.
    """
    model, _, metadata = _native(model_uri)
    mark = metadata.get(MARK)
    predictor = predictor_of(model, input_cols, base_margin_cols=tuple((mark or {}).get("base_margin_cols", ())))
    codes = predictor.code_cols
    if codes and not category_codes and mark is None and not _registered_by_shoal(model_uri):
        raise DataError(
            f"the model {model_uri} has categorical columns, but does not contain their categories: "
            f"{', '.join(codes)}. If these columns of the dataset contain the integer codes on which the model was "
            "trained, set category_codes=true; else use a model that contains its categories"
        )
    return predictor


def load_booster(model_uri: str, framework: Framework) -> bytes:
    """Load a model of XGBoost or LightGBM from MLflow, and return it in a format of the library.

    Raises:
        JobError: The model's files do not exist, or MLflow cannot load the model.
        RegistryError: MLflow, or its storage of models, cannot be reached.
        InvalidArgumentError: The model is one of another library.
    """
    model, library, _ = _native(model_uri)
    if library != framework:
        raise InvalidArgumentError(
            f"the model {model_uri} is not a model of {framework}"
            + (f", but of {library}" if library else "")
            + f": train with the library of the model, or continue from a model of {framework}"
        )
    content: bytes = importlib.import_module(f"shoal.training.{framework}.model").serialised(model)
    return content


def _native(model_uri: str) -> tuple[Any, str | None, Mapping[str, Any]]:
    """Return a model, its boosting library (None if it is another kind of model), and the metadata in its files."""
    import mlflow

    with _asking_mlflow(model_uri):
        folder = str(mlflow.artifacts.download_artifacts(artifact_uri=model_uri))
    try:
        info = mlflow.models.get_model_info(folder)
        framework = next((name for name in get_args(Framework) if name in info.flavors), None)
        if framework == "xgboost" and (why := why_unreadable(framework, _begin_of_file(folder, info))) is not None:
            raise ValueError(why)
        if framework is None:
            with ending_forks():
                model = mlflow.pyfunc.load_model(folder)
            if info.flavors["python_function"].get("loader_module") == pyfunc_loader.__name__:
                model = model.get_raw_model()
        else:
            add_estimators(framework)
            model = importlib.import_module(f"mlflow.{framework}").load_model(folder)
    except Exception as error:  # the files of a model may contain any code, such as pickled classes
        raise _unreadable(model_uri, error) from error
    return model, framework, info.metadata or {}


def _begin_of_file(folder: str, info: ModelInfo) -> bytes:
    with open(Path(folder) / info.flavors["xgboost"]["data"], "rb") as file:
        return file.read(100)


def predictor_of(model: Any, input_cols: Sequence[str] = (), *, base_margin_cols: Sequence[str] = ()) -> Predictor:
    """Return an object that predicts tables with a loaded model.

    Raises:
        DataError: The model's input columns or the categories of a column are not known.
    """
    if isinstance(model, PartitionedModel):
        return model
    library = type(model).__module__.partition(".")[0]
    if library not in get_args(Framework):
        return PyfuncPredictor(model, input_cols)
    module = importlib.import_module(f"shoal.training.{library}.model")
    names, number = module.features_of(model) or list(input_cols), module.num_features(model)
    if len(names) != number:
        raise DataError(
            f"the model has {number} columns without names, but input_cols names {len(names)}: list the model's input "
            "columns, in the model's order, in input_cols; for a champion, in the tag shoal.input_cols of its version "
            '(a JSON list, such as ["a", "b"])'
        )
    predictor: Predictor = module.predictor(model, names, base_margin_cols=base_margin_cols)
    return predictor


@contextmanager
def _asking_mlflow(model_uri: str) -> Iterator[None]:
    """Convert an error of MLflow into a `RegistryError` if MLflow cannot be reached, otherwise into an error of the
    model."""
    import mlflow
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (mlflow.MlflowException, SQLAlchemyError, OSError) as error:
        if not is_unreachable(error):
            raise _unreadable(model_uri, error) from error
        raise RegistryError(
            f"the model {model_uri} cannot be read, because MLflow or its storage cannot be reached: "
            f"{redact_value(str(error).strip())}. Check that the server runs, and try again"
        ) from error


def _unreadable(model_uri: str, error: Exception) -> JobError:
    return JobError(
        f"the model {model_uri} cannot be loaded: {str(error).strip() or type(error).__name__}. "
        "If the model is the champion, give the alias to another version in MLflow, or remove the alias"
    )


def _registered_by_shoal(model_uri: str) -> bool:
    """Return whether a job of shoal registered a version. The models that a training function has logged have no
    `MARK`."""
    import mlflow

    named = VERSION.fullmatch(model_uri)
    if named is None:
        return False
    with _asking_mlflow(model_uri):
        return is_ours(mlflow.MlflowClient().get_model_version(named["name"], named["version"]))
