"""Load a trained XGBoost model from its bytes, and name its file; read a model from which a training continues."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from shoal.errors import InvalidArgumentError
from shoal.training.boosting.init_model import InitModel
from shoal.training.xgboost.categories import ATTRIBUTE, categories_of, columns_of_codes, note
from shoal.training.xgboost.missing import missing_of
from shoal.training.xgboost.params import native, own_message

if TYPE_CHECKING:
    import xgboost

    from shoal.training.boosting.request import TrainResult

FILE_NAME = "model.ubj"
"""Name of the file of a trained model. XGBoost chooses the file's format by the ending of the name."""


def load(trained: TrainResult) -> xgboost.Booster:
    """Load a trained XGBoost model from its bytes, which contain the best round but not the parameters."""
    import xgboost

    # The machine that loads the model may have no GPU. The file contains the starting scores, one per output, and
    # XGBoost refuses a single number for several outputs of a loaded model.
    params = {name: value for name, value in native(trained.params).items() if name not in ("device", "base_score")}
    booster = xgboost.Booster(params, model_file=bytearray(trained.model))
    # XGBoost adds the objective's default metric to the booster at the first evaluation, even of no eval set.
    booster.eval_set([])
    return booster


def serialised(model: Any) -> bytes:
    """Return a booster, or the booster of a scikit-learn estimator, as bytes.

    Raises:
        InvalidArgumentError: It is no model of XGBoost.
    """
    import xgboost

    booster = model.get_booster() if hasattr(model, "get_booster") else model
    if not isinstance(booster, xgboost.Booster):
        raise InvalidArgumentError(
            f"XGBoost cannot continue from a {type(model).__module__}.{type(model).__name__}: pass an xgboost.Booster, "
            "an XGBoost estimator that is fitted, the path of a model file, or an MLflow URI"
        )
    return bytes(booster.save_raw("ubj"))


def init_model(content: bytes) -> InitModel:
    """Read a model from which a training continues; see :meth:`InitModel.read`."""
    import xgboost

    try:
        booster = xgboost.Booster(model_file=bytearray(content))
    except xgboost.core.XGBoostError as error:
        raise InvalidArgumentError(
            f"XGBoost cannot load init_model: {own_message(error)}. Use a model that XGBoost has written"
        ) from error
    categories = categories_of(booster)
    if categories and booster.attr(ATTRIBUTE) is None:
        booster = _without_own_categories(booster)
        note(booster, categories)
    # The best round belongs to the training that has ended. As in `xgboost.train`, all rounds are continued.
    booster.set_attr(best_iteration=None, best_score=None)
    learner = json.loads(booster.save_config())["learner"]
    sizes = learner["learner_model_param"]
    features = tuple(booster.feature_names or ())
    return InitModel(
        content=bytes(booster.save_raw("ubj")),
        rounds=booster.num_boosted_rounds(),
        features=features,
        num_features=booster.num_features(),
        categories=categories,
        code_cols=columns_of_codes(booster, features),
        objective=learner["objective"]["name"],
        outputs=max(1, int(sizes["num_class"]), int(sizes["num_target"])),
        booster=learner["gradient_booster"]["name"],
        missing=None if math.isnan(missing := missing_of(booster)) else missing,
    )


def _without_own_categories(booster: xgboost.Booster) -> xgboost.Booster:
    """Return a model without the categories that XGBoost itself has stored.

    With them, XGBoost refuses to continue on codes of categories, although the codes are the same.
    """
    import xgboost

    document = json.loads(booster.save_raw("json"))
    gradient_booster = document["learner"]["gradient_booster"]
    trees = gradient_booster.get("gbtree", gradient_booster)["model"]
    trees["cats"] = {"enc": [], "feature_segments": [], "sorted_idx": []}
    return xgboost.Booster(model_file=bytearray(json.dumps(document).encode()))
