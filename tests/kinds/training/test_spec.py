from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from pydantic import ValidationError

from shoal import jobs
from shoal.data import DataConnector
from shoal.data.dataset_spec import DatasetSpec
from shoal.errors import InvalidArgumentError
from shoal.jobs import JobSpec, Register, Tracking
from shoal.jobs.ids import checked, is_interactive, job_id
from shoal.jobs.submission import fingerprint
from shoal.kinds.function.spec import FunctionJobSpec
from shoal.training.boosting.request import TrainRequest
from shoal.training.run_config import RunConfig

TRAIN = {"dataset": {"paths": ["/data/train"]}, "input_cols": ["a", "b"], "label_col": "y"}
HOLDOUT = {"paths": ["/data/holdout"]}
REGISTER = {"model": "m", "metric": "rmse", "holdout": HOLDOUT}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input_cols": []}, "input_cols"),
        ({"input_cols": ["a", "y"]}, 'the label "y" is also in input_cols'),
        ({"categorical_cols": ["a", "c"]}, 'categorical_cols names "c", which is not among input_cols'),
        ({"weight_col": "a"}, "but these columns have more than one: a"),
        ({"n_estimators": 0}, "n_estimators"),
        ({"early_stopping_rounds": 5}, "early_stopping_rounds needs an eval_set"),
        ({"n_estimatorz": 5}, "n_estimatorz"),
        ({"params": {"objective": object()}}, "params"),
        ({"run_config": {"job_id": "../../etc"}}, 'job_id "../../etc" is not legal'),
        (
            {"register": {"model": "m", "metric": "rmsle", "holdout": HOLDOUT}},
            '"rmsle" is unknown; did you mean "rmse"',
        ),
        (
            {"register": {"model": "m", "metric": "auc", "mode": "min", "holdout": HOLDOUT}},
            "whose best value is the maximum",
        ),
        ({"register": {"model": "a/b", "metric": "auc", "holdout": HOLDOUT}}, "not a legal name"),
        ({"register": {"model": "m", "alias": "latest", "metric": "auc", "holdout": HOLDOUT}}, 'alias "latest"'),
        ({"register": {"model": "m", "metric": "auc"}}, "register.holdout"),
        ({"register": {**REGISTER, "metrics": "auc"}}, "register.metrics='auc': must be a list such as"),
        ({"register": {**REGISTER, "metrics": ["aucc"]}}, 'did you mean "auc"'),
        ({"register": {**REGISTER, "min_improvement": -1}}, "register.min_improvement=-1"),
        ({"register": {**REGISTER, "must_reach": float("nan")}}, "register.must_reach"),
        ({"register": {**REGISTER, "slice_tolerance": 1}}, 'slice_tolerance needs the option "by"'),
        ({"register": {**REGISTER, "baseline": "best"}}, 'unknown register.baseline "best"'),
        ({"register": {**REGISTER, "metric": "ndcg@5"}}, "needs group_col"),
        ({"register": REGISTER, "eval_set": {"holdout": HOLDOUT}}, 'an eval set has the name "holdout"'),
    ],
)
def test_what_is_wrong_is_refused_by_name(fields, said):
    with pytest.raises(InvalidArgumentError, match=said):
        JobSpec.parse(TRAIN | fields)


def test_a_stored_spec_with_an_eval_set_called_holdout_can_be_read():
    JobSpec.parse(TRAIN | {"register": REGISTER, "eval_set": {"holdout": HOLDOUT}, "fingerprint": "q"})


def test_every_public_name_is_there():
    assert all(getattr(jobs, name) is not None for name in jobs.__all__)
    with pytest.raises(AttributeError, match="no attribute 'submitt'"):
        _ = jobs.submitt


@pytest.mark.parametrize("one", [{"paths": ["/data/valid"]}, DatasetSpec(paths=["/data/valid"])])
def test_a_single_eval_set_gets_a_name(one):
    assert JobSpec.parse(TRAIN | {"eval_set": one}).eval_set == {"eval": DatasetSpec(paths=["/data/valid"])}


def test_the_json_of_a_spec_is_the_spec():
    spec = JobSpec.parse(
        TRAIN
        | {
            "eval_set": {"valid": {"paths": ["/data/valid"]}},
            "register": {"model": "m", "metric": "auc", "holdout": HOLDOUT},
        }
    )

    assert JobSpec.model_validate(spec.document()) == spec
    assert spec.document()["register"]["model"] == "m"


def test_options_of_register_are_part_of_the_fingerprint():
    spec = JobSpec.parse(TRAIN | {"register": REGISTER})
    assert spec.model_copy(update={"tracking": None}).document() == {**spec.document(), "tracking": None}

    given = {"metrics": ["mae"], "must_reach": 3.0, "baseline": None, "by": "a", "slice_tolerance": 1.0}
    changed = JobSpec.parse(TRAIN | {"register": {**REGISTER, **given}})
    assert changed.document()["register"] == {**spec.document()["register"], **given}
    assert JobSpec.parse(changed.document()) == changed
    assert fingerprint(changed) != fingerprint(spec)


@pytest.mark.parametrize("tracking", [Tracking(experiment="e"), {"experiment": "e"}, None])
def test_tracking_in_the_run_config_is_the_specs(tracking):
    """Callers of estimators and distributors write it there; a stored spec has it in one place."""
    inside = JobSpec(**TRAIN, run_config=RunConfig(tracking=tracking, seed=3))
    beside = JobSpec(**TRAIN, run_config=RunConfig(seed=3), tracking=tracking)

    assert inside == beside == JobSpec.parse(TRAIN | {"run_config": {"tracking": tracking, "seed": 3}})
    assert inside.document() == beside.document()
    assert "tracking" not in inside.document()["run_config"]
    with pytest.raises(InvalidArgumentError, match="tracking is given twice, in the spec and in run_config"):
        JobSpec(**TRAIN, run_config=RunConfig(tracking=tracking), tracking=tracking)


def test_an_estimators_request_and_back():
    spec = JobSpec.parse(TRAIN | {"categorical_cols": ["b"], "eval_set": {"eval": {"paths": ["/data/valid"]}}})

    request = TrainRequest(**{name: getattr(spec, name) for name in TrainRequest.model_fields})

    assert request.categorical_cols == ("b",)
    assert JobSpec(**dict(request)) == spec


def test_fingerprints_stay_from_version_to_version():
    """A task that is retried after an upgrade of shoal finds its job by them."""
    fields = TRAIN | {
        "params": {"objective": "reg:squarederror", "eta": 0.1, "names": ["ä", None, True]},
        "eval_set": {"eval": {"paths": ["/data/eval"]}},
    }
    session = {"MLFLOW_EXPERIMENT_NAME": "mine", "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "true"}
    asked = fingerprint(JobSpec.parse(fields).identifying("retrain", session))
    assert asked == "14dfbf021d9fcdbf138c6af562f149ae1cacabd24de691eedb0fe76650280e82"
    assert job_id("xgboost", "airflow:d/r", asked, "task/-1") == "xgboost-c2c4803e1425"

    session |= {"MLFLOW_TRACKING_URI": "http://tracking:5000", "MLFLOW_EXPERIMENT_ID": "5"}
    tracked = fingerprint(JobSpec.parse(fields).identifying("retrain", session))
    assert tracked == "aa260a0d6270c78f36b9c7779a9653c16aa1053b8f046052e0aae76f2792e438"

    odd = fingerprint(JobSpec.parse(TRAIN | {"params": {"missing": float("nan")}}).identifying("retrain", {}))
    assert job_id("xgboost", "airflow:d/r", odd, "task/-1") == "xgboost-82fd3d9eaa38"

    function = FunctionJobSpec(train_func="pkg.module:train", hyper_params={"epochs": 3}).identifying("retrain", {})
    assert job_id("pytorch", "airflow:d/r", fingerprint(function), "task/-1") == "pytorch-9c6b2fea1fbb"


def test_a_priority_makes_no_other_job():
    plain, urgent = (JobSpec(**TRAIN, run_config=RunConfig(priority=priority)) for priority in (0, 7))

    assert JobSpec.parse(urgent.document()).run_config.priority == 7
    assert fingerprint(plain) == fingerprint(urgent)
    with pytest.raises(InvalidArgumentError, match="priority=1001: Input should be less than or equal to 1000"):
        RunConfig(priority=1001)


def test_a_spec_does_not_change():
    with pytest.raises(ValidationError):
        JobSpec.parse(TRAIN).label_col = "other"  # type: ignore[misc]


def test_connectors_stand_for_their_specs():
    connector = DataConnector.from_parquet("/data/train")

    spec = JobSpec(
        dataset=connector,
        input_cols=("a",),
        label_col="y",
        eval_set=connector,
        register=Register(model="m", metric="rmse", holdout=connector),
    )

    assert spec.dataset == DatasetSpec(paths=("/data/train",))
    assert spec.eval_set == {"eval": spec.dataset}
    assert spec.register_as is not None
    assert spec.register_as.holdout == spec.dataset


def test_the_metric_says_what_is_better():
    assert Register(model="m", metric="rmse", holdout=HOLDOUT).best == "min"
    assert Register(model="m", metric="auc", holdout=HOLDOUT).best == "max"


class TestCompleted:
    def test_the_submitters_tracking_server_is_taken_where_none_is_named(self):
        surroundings = {"MLFLOW_TRACKING_URI": "http://tracking:5000"}
        named = JobSpec.parse(TRAIN | {"tracking": {"uri": "http://mine:5000"}})

        assert JobSpec.parse(TRAIN).completed("p", surroundings).tracking.uri == "http://tracking:5000"
        assert named.completed("p", surroundings).tracking.uri == "http://mine:5000"
        assert JobSpec.parse(TRAIN).completed("p", {}).tracking.uri is None

    def test_relative_paths_of_datasets_start_in_the_submitters_folder(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        paths = ["flights/*.parquet", "/data/train", "~/x", "s3://bucket/x"]
        spec = JobSpec.parse(TRAIN | {"dataset": {"paths": paths}, "params": {"paths": ["left/alone"]}})

        completed = spec.completed("p", {})

        assert completed.dataset.paths == (f"{tmp_path}/flights/*.parquet", *paths[1:])
        assert completed.params == {"paths": ["left/alone"]}

    def test_a_relative_database_is_the_submitters(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        spec = JobSpec(**TRAIN, tracking=Tracking(uri="sqlite:///runs.db"))

        assert spec.completed("p", {}).tracking.uri == f"sqlite:///{tmp_path}/runs.db"
        absolute = JobSpec(**TRAIN, tracking=Tracking(uri="sqlite:////runs.db"))
        assert absolute.completed("p", {}).tracking.uri == "sqlite:////runs.db"

    @pytest.mark.parametrize(
        ("tracking", "name", "number"),
        [
            ({}, "mine", None),
            ({"experiment": "shoal"}, "mine", None),
            ({"uri": "http://tracking:5000"}, "mine", None),
            ({"uri": "http://another:5000"}, "shoal", None),
            ({"experiment": "named"}, "named", None),
            ({"experiment_id": "7"}, "shoal", "7"),
        ],
    )
    def test_the_submitters_experiment_is_taken_where_none_is_named(self, tracking, name, number):
        surroundings = {"MLFLOW_TRACKING_URI": "http://tracking:5000", "MLFLOW_EXPERIMENT_NAME": "mine"}
        completed = JobSpec.parse(TRAIN | {"tracking": tracking}).completed("p", surroundings).tracking
        assert (completed.experiment, completed.experiment_id) == (name, number)

        by_id = JobSpec.parse(TRAIN).completed("p", {"MLFLOW_EXPERIMENT_ID": "5", "MLFLOW_EXPERIMENT_NAME": "mine"})
        assert (by_id.tracking.experiment, by_id.tracking.experiment_id) == ("shoal", "5")

    def test_an_experiment_is_named_once(self):
        with pytest.raises(InvalidArgumentError, match='experiment="a" and experiment_id="5" both select an'):
            Tracking(experiment="a", experiment_id="5")

    def test_the_pool_is_written_down(self):
        assert JobSpec.parse(TRAIN).completed("retrain", {}).run_config.pool_name == "retrain"


class TestIds:
    def test_an_engine_that_asks_again_means_the_same_job(self):
        assert job_id("xgboost", "airflow:dag/run", "q") == job_id("xgboost", "airflow:dag/run", "q")
        assert job_id("xgboost", "airflow:dag/run", "q") != job_id("xgboost", "airflow:dag/other", "q")
        assert job_id("xgboost", "airflow:dag/run", "q") != job_id("xgboost", "airflow:dag/run", "r")

    @pytest.mark.parametrize("holder", ["cli:me@here", "python:me@here/1"])
    def test_a_person_who_asks_again_means_another(self, holder):
        assert is_interactive(holder)
        assert job_id("xgboost", holder, "q") != job_id("xgboost", holder, "q")

    @pytest.mark.parametrize("illegal", ["", "a b", "a/b", "..", "x" * 101, "a\n"])
    def test_an_id_that_is_no_part_of_a_path_is_refused(self, illegal):
        with pytest.raises(InvalidArgumentError):
            checked(illegal)


class TestQuestion:
    def test_equal_data_staged_twice_are_one_fingerprint(self, fresh_home: Path):
        frame = pd.DataFrame({"a": [1.0, 2.0], "b": [0.0, 1.0], "y": [0.0, 1.0]})
        first, second = DataConnector.from_dataframe(frame), DataConnector.from_dataframe(frame)
        other = DataConnector.from_dataframe(frame * 2)

        def ask(connector: DataConnector) -> str:
            return fingerprint(JobSpec(dataset=connector, input_cols=("a", "b"), label_col="y"))

        assert first.staging != second.staging
        assert ask(first) == ask(second)
        assert ask(first) != ask(other)

    def test_rotated_credentials_do_not_change_it(self):
        def ask(password: str) -> str:
            return fingerprint(JobSpec(**TRAIN, tracking=Tracking(uri=f"http://me:{password}@tracking")))

        assert ask("first") == ask("second")

    def test_another_seed_does(self):
        assert fingerprint(JobSpec(**TRAIN)) != fingerprint(JobSpec(**TRAIN, run_config=RunConfig(seed=1)))
