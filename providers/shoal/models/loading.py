"""Load a model from MLflow: models of the boosting libraries directly, any other model through MLflow's pyfunc."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from sqlalchemy.exc import SQLAlchemyError

from shoal.boosting_libraries import Framework
from shoal.data.numpy_columns import to_matrix
from shoal.data.parquet.source import ParquetSource
from shoal.errors import DataError, InvalidArgumentError, JobError, RegistryError
from shoal.jobs import shipped_code
from shoal.jobs.files import storage
from shoal.jobs.mlflow_run import MARK, is_unreachable
from shoal.kinds.partitions import logged_model
from shoal.kinds.partitions.logged_model import PartitionedModel
from shoal.kinds.training.spec import is_stored
from shoal.lazy_imports import mlflow, np, pa
from shoal.models.registry import is_ours
from shoal.secrets.redaction import redact_value
from shoal.training.boosting.library import BoosterPredictor, class_probabilities, libraries, library_of, owner_of
from shoal.training.host.own_process import ending_forks
from shoal.training.tracking import MODEL_VERSION, is_mlflow_uri


class PyfuncPredictor:
    """Predictor for the rows of tables with an ``mlflow.pyfunc.PyFuncModel``.

    A classifier of scikit-learn predicts probabilities if it can: of the second class ``[rows]`` if there are two
    classes, else of each class ``[rows, classes]``. Any other model predicts what its pyfunc returns.

    Args:
        model: The model.
        input_cols: Names of the input columns; used only if the model does not name its columns.

    Raises:
        DataError: Neither the model nor `input_cols` names the columns.
    """

    def __init__(self, model: Any, input_cols: Sequence[str] = ()) -> None:
        self._model = model
        self._classifier = _classifier(model)
        self.columns = features_of(model, input_cols)
        self.classes = None if self._classifier is None else tuple(self._classifier.classes_.tolist())
        self.code_cols: tuple[str, ...] = ()
        self.gives_classes = None if self._classifier is None else False

    def check(self, source: ParquetSource) -> None:
        """Check that a dataset has the columns of the model; else raise a DataError."""
        if missing := sorted(set(self.columns) - set(source.schema().names)):
            raise DataError(
                f"the dataset lacks columns that the model needs: {', '.join(missing)}. Name a dataset with these "
                "columns"
            )

    def predict_table(self, table: pa.Table) -> np.ndarray:
        """Return the predictions for a table's rows: an array ``[rows]`` or ``[rows, outputs]``.

        Raises:
            DataError: The model cannot predict the rows, or its result is not one row per row of the table.
        """
        schema = self._model.metadata.get_input_schema()
        suited = _as_tensor if schema is not None and schema.is_tensor_spec() else _as_frame
        try:
            rows = suited(table.select(self.columns), schema)
            with ending_forks():
                if self._classifier is not None:
                    return class_probabilities(self._classifier.predict_proba(rows))
                predicted = np.asarray(self._model.predict(rows))
        except Exception as error:
            raise DataError(
                f"the model cannot predict these rows: {str(error).rstrip('.')}. "
                "Compare the columns with the model's signature in MLflow"
            ) from error
        if predicted.ndim not in (1, 2) or len(predicted) != table.num_rows:
            raise DataError(
                f"the model returned an array of shape {list(predicted.shape)} for {table.num_rows} rows, but must "
                "return one prediction, or one row of predictions, per row: correct the model"
            )
        return predicted


def features_of(model: Any, input_cols: Sequence[str]) -> list[str]:
    """Return the names of a model's input columns, in the model's order.

    Raises:
        DataError: Neither the model nor `input_cols` names the columns.
    """
    schema = model.metadata.get_input_schema()
    if schema is not None and not schema.is_tensor_spec() and schema.has_input_names():
        return [str(name) for name in schema.input_names()]
    if schema is None and (fitted := getattr(_raw(model), "feature_names_in_", None)) is not None:
        return [str(name) for name in fitted]
    if schema is not None and len(schema.inputs) != 1:
        raise DataError(
            "the model has a signature with several tensors, so its input is not known: log the model with "
            "signature=mlflow.models.infer_signature(inputs, predictions)"
        )
    if not input_cols:
        lacking = "has no signature" if schema is None else "has a signature that names no columns"
        raise DataError(
            f"the model {lacking}: log the model with a signature of named columns, or list the model's input columns, "
            "in the model's order, in register.input_cols of a training function, or in input_cols of a prediction's "
            "spec"
        )
    return list(input_cols)


def _raw(model: Any) -> Any:
    """Return the estimator of a model that MLflow has saved as one of scikit-learn; None for any other model."""
    return model.get_raw_model() if "sklearn" in model.metadata.flavors else None


def _classifier(model: Any) -> Any:
    """Return the classifier of scikit-learn whose probabilities are the predictions; None for any other model.

    The model's program may have chosen another function of the classifier in MLflow (`pyfunc_predict_fn`). A classifier
    with several labels per row has one array of probabilities per label, so its classes are predicted.
    """
    raw = _raw(model)
    chosen = model.metadata.flavors["python_function"].get("predict_fn", "predict")
    if raw is None or chosen != "predict" or not hasattr(raw, "predict_proba"):
        return None
    from sklearn.base import is_classifier

    return raw if is_classifier(raw) and not isinstance(raw.classes_, list) else None


def _as_frame(table: pa.Table, schema: Any) -> Any:
    frame = table.to_pandas()
    if schema is None:
        return frame
    # The columns are converted to the signature's types, because MLflow refuses float64 values for a float32 column.
    return frame.astype(dict(zip(table.column_names, schema.pandas_types(), strict=True)))


def _as_tensor(table: pa.Table, schema: Any) -> np.ndarray:
    [tensor] = schema.inputs
    if tensor.type.kind in "iu" and (nulls := [name for name in table.column_names if table[name].null_count]):
        raise DataError(f'column "{nulls[0]}" has nulls, but the model takes a tensor of {tensor.type}')
    return to_matrix(table, table.column_names, tensor.type).reshape(len(table), *tensor.shape[1:])


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


def _native(model_uri: str) -> tuple[Any, str | None, Mapping[str, Any]]:
    """Return a model, its boosting library (None if it is another kind of model), and the metadata in its files."""
    with _asking_mlflow(model_uri):
        folder = str(mlflow.artifacts.download_artifacts(artifact_uri=model_uri))
    try:
        info = mlflow.models.get_model_info(folder)
        library = next((each for each in libraries() if each.has_logged(info)), None)
        if library is None:
            with ending_forks():
                model = mlflow.pyfunc.load_model(folder)
            if info.flavors["python_function"].get("loader_module") == logged_model.__name__:
                model = model.get_raw_model()
        else:
            model = library.load_logged(folder, info)
    except Exception as error:  # the files of a model may contain any code, such as pickled classes
        raise _unreadable(model_uri, error) from error
    return model, None if library is None else library.name, info.metadata or {}


def predictor_of(model: Any, input_cols: Sequence[str] = (), *, base_margin_cols: Sequence[str] = ()) -> Predictor:
    """Return an object that predicts tables with a loaded model.

    Raises:
        DataError: The model's input columns or the categories of a column are not known.
    """
    if isinstance(model, PartitionedModel):
        return model
    if (library := owner_of(model)) is None:
        return PyfuncPredictor(model, input_cols)
    names, number = library.features_of(model) or list(input_cols), library.num_features(model)
    if len(names) != number:
        raise DataError(
            f"the model has {number} columns without names, but input_cols names {len(names)}: list the model's input "
            "columns, in the model's order, in input_cols; for a champion, in the tag shoal.input_cols of its version "
            '(a JSON list, such as ["a", "b"])'
        )
    return library.predictor(model, names, base_margin_cols=base_margin_cols)


@contextmanager
def _asking_mlflow(model_uri: str) -> Iterator[None]:
    """Convert an error of MLflow into a `RegistryError` if MLflow cannot be reached, otherwise into an error of the
    model."""

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
    if (named := MODEL_VERSION.fullmatch(model_uri)) is None:
        return False
    with _asking_mlflow(model_uri):
        return is_ours(mlflow.MlflowClient().get_model_version(named["name"], named["version"]))


def load_init_model(model: str, framework: Framework) -> bytes:
    """Load a model from which a training continues, in a format of its library.

    Raises:
        InvalidArgumentError: There is no such file, or the MLflow model is one of another library.
        JobError: The model's files do not exist, MLflow cannot load the model, or a stored file was changed.
        RegistryError: MLflow, or its storage of models, cannot be reached.
    """
    if is_stored(model):
        return shipped_code.read(model)
    if is_mlflow_uri(model) or os.path.isdir(model):
        booster, library, _ = _native(model)
        if library != framework:
            raise InvalidArgumentError(
                f"the model {model} is not a model of {framework}"
                + (f", but of {library}" if library else "")
                + f": train with the library of the model, or continue from a model of {framework}"
            )
        return library_of(framework).serialised(booster)
    try:
        # The user may have named a link. Unlike shoal's own files in shared folders, it is followed.
        return storage.read(model if "://" in model else os.path.realpath(model))
    except OSError as error:
        raise InvalidArgumentError(
            f"init_model {redact_value(model)} cannot be read: {error}. Name a file that {framework} has written, or "
            "an MLflow URI (models:/NAME@ALIAS, models:/NAME/VERSION, runs:/...)"
        ) from error
