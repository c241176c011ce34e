"""A training without new rows is skipped: drivers one after the other, on a real registry, without a gang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import sqlalchemy as sa

from shoal.data import DataConnector
from shoal.data.dataset_spec import DatasetSpec
from shoal.errors import DataError, InvalidArgumentError, JobError
from shoal.jobs import (
    FunctionJobSpec,
    JobResult,
    JobSpec,
    Register,
    Tracking,
    load_training,
    parse_spec,
    skipping_if_unchanged,
)
from shoal.jobs.credentials import Secrets
from shoal.jobs.driver.attempt_context import AttemptContext, Stopwatch
from shoal.jobs.driver.attempt_metrics import MetricSeries
from shoal.jobs.files import staged_rows
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key, Order
from shoal.jobs.mlflow_run import Run
from shoal.jobs.submission import fingerprint
from shoal.kinds.training import driver
from shoal.models import contest, training_record, withdraw_promotion
from shoal.models.training_record import Fingerprints
from shoal.state import Store
from shoal.state.schema import Job, JobState
from shoal.training.demand import XGBScalingConfig
from shoal.training.run_config import RunConfig
from tests.jobs.driver.test_main import plain_xgboost
from tests.support.job_store import POOL

FIRST_OF_APRIL = "2024-04-01"


def flights(days: int) -> pd.DataFrame:
    """Four rows a day from the 1st of March on."""
    random = np.random.default_rng(0)
    a = random.random(4 * 62)
    day = (pd.Timestamp(2024, 3, 1) + pd.to_timedelta(np.arange(4 * 62) // 4, unit="D")).strftime("%Y-%m-%d")
    return pd.DataFrame({"row": range(4 * 62), "day": day, "a": a, "b": a * a, "y": 3 * a})[: 4 * days]


@dataclass
class Nights:
    """Runs of one pipeline, one after the other; each is a job of its own."""

    store: Store
    spec: JobSpec
    uri: str
    secrets: Secrets = field(default_factory=Secrets)
    number: int = 0

    def run(self, *, job_id: str | None = None, holder: str | None = None, **changes: Any) -> JobResult:
        """Run an attempt as its driver does, and return the result; an error is recorded as the job's end."""
        self.number += 1
        skip = changes.pop("skip", None)
        spec = skipping_if_unchanged(self.spec.model_copy(update=changes), skip)
        name, holder = job_id or f"night-{self.number}", holder or f"airflow:dag/{self.number}"
        order = Order(name, POOL, holder, {"fingerprint": "q"}, {}, None)
        job = attempts.ask(self.store, order, 0.0)
        key = Key(job.id, job.attempt)
        attempts.start(self.store, key, {}, 0.0)
        tags = {
            "shoal.job_id": key.job_id,
            "shoal.attempt": str(key.attempt),
            "shoal.pool": POOL,
            "shoal.holder": order.holder,
        }
        run = Run.begin(Tracking(uri=self.uri, experiment="nights"), name=key.submission_id, tags=tags)
        watch = Stopwatch(Job(created_at=0.0), 0.0)
        metrics = MetricSeries(key)
        place = AttemptContext(self.store, key, run, tags, {}, lambda progress: None, metrics, lambda: None, watch)
        state, result = JobState.FAILED, None
        try:
            assert isinstance(spec, JobSpec)
            result = driver.train_and_publish(staged_rows.staged(spec, key, self.secrets), place)
            state = JobState.SUCCEEDED
        finally:
            plain = result and result.model_dump(mode="json")
            attempts.end(self.store, key, state, 1.0, result=plain)
            if result:
                attempts.collect(self.store, key, 2.0)
            mlflow.end_run()
        return result

    def versions(self) -> list[str]:
        found = mlflow.MlflowClient(self.uri).search_model_versions(f'name = "{self.model}"')
        return sorted(str(version.version) for version in found)

    @property
    def model(self) -> str:
        assert self.spec.register_as is not None
        return self.spec.register_as.model


@pytest.fixture(scope="module")
def logged(mlflow_uri: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that is logged once; that takes longer than the rest of a run."""
    import xgboost

    mlflow.set_tracking_uri(mlflow_uri)
    artifacts = tmp_path_factory.mktemp("artifacts").as_uri()
    experiment = mlflow.MlflowClient(mlflow_uri).create_experiment("one model", artifact_location=artifacts)
    rows = flights(40)
    booster = xgboost.train({"nthread": 1}, xgboost.DMatrix(rows[["a", "b"]], rows["y"]), 2)
    with mlflow.start_run(experiment_id=experiment):
        return mlflow.xgboost.log_model(booster, name="model", pip_requirements=[]).model_uri


@pytest.fixture
def nights(
    store: Store,
    mlflow_uri: str,
    logged: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Nights:
    monkeypatch.setattr("shoal.training.boosting.engine.train", plain_xgboost)
    monkeypatch.setattr(Run, "log_model", lambda *_, **__: logged)
    flights(40).to_parquet(tmp_path / "flights.parquet", row_group_size=50)
    flights(62)[-80:].to_parquet(tmp_path / "holdout.parquet")
    spec = JobSpec(
        dataset=DataConnector.from_parquet(tmp_path / "flights.parquet"),
        eval_set=DataConnector.from_parquet(tmp_path / "holdout.parquet"),
        input_cols=("a", "b"),
        label_col="y",
        n_estimators=3,
        register=Register(
            model=f"it's {request.node.name}"[:100].replace("/", "-").replace(":", "-"),
            metric="rmse",
            holdout=DataConnector.from_parquet(tmp_path / "holdout.parquet"),
        ),
    )
    return Nights(store, spec, mlflow_uri)


def by_filters(nights: Nights, folder: Path) -> Callable[[int], dict[str, Any]]:
    """The filters move on each night, and there may be no row between the old bound and the new one."""
    flights(62).to_parquet(folder / "flights.parquet", row_group_size=50)

    def rows(days: int) -> dict[str, Any]:
        filters = [("row", "<", 4 * days), ("y", ">", -1.0 - nights.number)]
        return {"dataset": DataConnector.from_parquet(folder / "flights.parquet", filters=filters).to_spec()}

    return rows


def by_sql(nights: Nights, folder: Path) -> Callable[[int], dict[str, Any]]:
    url = f"sqlite:///{folder}/warehouse.db"
    nights.secrets = Secrets({"SHOAL_CONNECTION_WAREHOUSE": url})

    def rows(days: int) -> dict[str, Any]:
        engine = sa.create_engine(url)
        flights(days).to_sql("flights", engine, index=False, if_exists="replace")
        engine.dispose()
        sql = "SELECT * FROM flights WHERE day < :today ORDER BY row"
        params = {"today": f"2024-06-{nights.number + 1:02}"}
        return {"dataset": DatasetSpec(sql=sql, params=params, connection="warehouse", time_col="day")}

    return rows


def test_a_metric_that_the_challengers_predictions_do_not_suit_is_refused_before_the_training(nights: Nights) -> None:
    with pytest.raises(InvalidArgumentError, match=r'"rmse" does not suit .* \(multi:softprob\): rmse needs one'):
        nights.run(params={"objective": "multi:softprob", "num_class": 3})


@pytest.mark.parametrize("source", [by_filters, by_sql])
def test_the_third_run_without_new_rows_is_skipped(nights, tmp_path, capsys, source):
    rows = source(nights, tmp_path)
    first, second = nights.run(**rows(40)), nights.run(**rows(41))

    third = nights.run(**rows(41))

    assert (first.skipped, first.model_version, second.skipped, second.model_version) == (None, "1", None, "2")
    reason = (
        f"rows, holdout and settings are those of {nights.model} version 2. To train anyway, set "
        "skip_if_unchanged=False"
    )
    assert (third.skipped, third.model_version, third.promoted) == (reason, "2", None)
    assert (third.model_uri, third.data, third.rows) == (f"models:/{nights.model}/2", second.data, 164)
    assert nights.versions() == ["1", "2"]
    run = mlflow.MlflowClient(nights.uri).get_run(third.mlflow_run_id)
    assert run.data.tags["shoal.skipped"] == reason
    said = capsys.readouterr().out
    assert f"not skipped: rows differ from those of {nights.model} version 1" in said
    assert reason in said
    assert JobResult.model_validate(third.to_dict()) == third
    with pytest.raises(InvalidArgumentError, match="trained no model"):
        load_training(third)


def test_a_file_that_was_written_again_is_trained_though_its_footer_is_the_same(nights, tmp_path, capsys):
    rows = flights(40)
    nights.run()
    assert nights.run().skipped
    before = DataConnector.from_spec(nights.spec.dataset).digest()
    rows.loc[[10, 20], "y"] = rows.loc[[20, 10], "y"].to_numpy()
    rows.to_parquet(tmp_path / "flights.parquet", row_group_size=50)

    corrected = nights.run()

    assert DataConnector.from_spec(nights.spec.dataset).digest() == before
    assert (corrected.skipped, corrected.model_version) == (None, "2")
    assert "not skipped: the times of the files differ" in capsys.readouterr().out


def test_a_model_that_has_lost_the_alias_is_trained(nights):
    client, alias = mlflow.MlflowClient(nights.uri), nights.spec.register_as.alias
    nights.run()
    client.delete_registered_model_alias(nights.model, alias)
    assert nights.run().skipped is None
    assert nights.run().skipped is not None
    version = client.create_model_version(nights.model, "file:///another")
    client.set_registered_model_alias(nights.model, alias, version.version)

    assert training_record.reason_to_skip(
        Run(client, nights.uri, "0", "run", "link"), nights.store, Key("x", 1), "h", nights.spec.register_as,
        Fingerprints("", "", "", ""),
    ) is None  # fmt: skip


def test_a_model_whose_promotion_was_withdrawn_is_trained(nights, capsys):
    nights.run()
    withdraw_promotion("night-1", tracking_uri=nights.uri)
    again = nights.run()
    assert (again.skipped, again.promoted) == (None, True)
    assert "version 1 was promoted, but its promotion was withdrawn" in capsys.readouterr().out


def test_rows_and_times_of_a_query_stand_on_the_version(nights, tmp_path):
    result = nights.run(**by_sql(nights, tmp_path)(40))

    tags = mlflow.MlflowClient(nights.uri).get_model_version(nights.model, "1").tags
    described = {name.removeprefix("shoal.data_"): tag for name, tag in tags.items() if name.startswith("shoal.data_")}
    assert described == {
        "rows": "160",
        "digest": result.data.digest,
        "time_col": "day",
        "time_from": "2024-03-01",
        "time_to": "2024-04-09",
    }


def test_a_holdout_of_a_query_with_days_of_the_training_is_refused(nights, tmp_path):
    """The files of the two queries differ, so only the days tell."""
    dataset = by_sql(nights, tmp_path)(62)["dataset"].model_copy(update={"params": {"today": FIRST_OF_APRIL}})
    later = dataset.model_copy(update={"sql": dataset.sql.replace("<", ">=")})
    both = later.model_copy(update={"params": {"today": "2024-03-31"}})
    register = nights.spec.register_as

    result = nights.run(dataset=dataset, register_as=register.model_copy(update={"holdout": later}))

    assert (result.data.time_from, result.data.time_to, result.promoted) == ("2024-03-01", "2024-03-31", True)
    with pytest.raises(
        ValueError, match="day is 2024-03-01 to 2024-03-31 in the training rows, and 2024-03-31 to 2024"
    ):
        nights.run(dataset=dataset, register_as=register.model_copy(update={"holdout": both}))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"params": {"max_depth": 2}}, id="params"),
        pytest.param({"n_estimators": 4}, id="rounds"),
        pytest.param({"framework": "lightgbm"}, id="library"),
        pytest.param({"input_cols": ("a",)}, id="columns"),
        pytest.param({"run_config": RunConfig(seed=1)}, id="seed"),
        pytest.param({"scaling_config": XGBScalingConfig(num_workers=2)}, id="workers"),
        pytest.param({"eval_set": {}}, id="evaluation rows"),
        pytest.param({"register": {"min_improvement": 0.5}}, id="rules of the promotion"),
    ],
)
def test_other_settings_are_trained(nights, changes):
    register = nights.spec.register_as.model_copy(update=changes.pop("register", {}))
    changed = nights.spec.model_copy(update={"register_as": register, **changes})
    version = driver.fingerprints_of(nights.spec, "rows", "holdout")
    tags = {"shoal.data_digest": "rows", "holdout.rmse.digest": "holdout", "shoal.spec_digest": version.settings}
    tags["shoal.files_digest"] = version.files

    assert version.differences(tags, register) == []
    assert driver.fingerprints_of(changed, "rows", "holdout").differences(tags, register) == ["settings"]
    assert driver.fingerprints_of(changed, "rows", "other").differences(tags, register) == ["holdout", "settings"]
    assert driver.fingerprints_of(nights.spec, "other", "holdout").differences(tags, register) == ["rows"]


def test_what_does_not_change_the_model_is_the_same_training(nights):
    changes = {
        "tracking": Tracking(experiment="another", run_name="until today", tags={"night": "2"}),
        "run_config": RunConfig(artifact_location="/models", priority=3, timeout=60.0, max_restarts=2),
        "register_as": nights.spec.register_as.model_copy(update={"skip_if_unchanged": True}),
        "verbose_eval": True,
    }
    changed = nights.spec.model_copy(update=changes)

    assert driver.fingerprints_of(changed, "rows", "holdout") == driver.fingerprints_of(nights.spec, "rows", "holdout")


def test_a_run_that_is_told_to_train_trains(nights):
    nights.run()
    assert nights.run(skip=False).model_version == "2"


def test_a_run_after_a_failed_promotion_trains(nights, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(contest.Contest, "round", lambda contest: 1 / 0)
        with pytest.raises(JobError, match="division by zero"):
            nights.run()
    assert nights.versions() == ["1"]

    assert nights.run().model_version == "2"
    assert nights.run().skipped


@dataclass(frozen=True)
class Version:
    """A registered version: whose it is, whether its job succeeded, and whether its promotion ended."""

    job_id: str = "last"
    holder: str = "airflow:dag/last"
    state: JobState | None = JobState.SUCCEEDED
    marked: bool = True
    rows: str = "rows"


@pytest.mark.parametrize(
    ("versions", "last"),
    [
        pytest.param([], None, id="the first run"),
        pytest.param([Version()], "1", id="the same training"),
        pytest.param([Version(rows="others")], None, id="new rows"),
        pytest.param([Version(), Version(rows="others")], None, id="only the newest version is compared"),
        pytest.param([Version(), Version(marked=False)], "1", id="a failed promotion, or another program"),
        pytest.param([Version(state=JobState.FAILED)], None, id="a job that failed after its promotion"),
        pytest.param([Version(), Version("failed", state=JobState.FAILED)], "1", id="the run before a failed one"),
        pytest.param([Version(state=None)], "1", id="a job of another store"),
        # Its first attempt was collected, but Airflow has not recorded that: the tasks after it must run.
        pytest.param([Version("mine", "airflow:dag/mine")], None, id="a task that runs again"),
        pytest.param([Version("mine")], "1", id="a job id that each run uses"),
    ],
)
def test_the_last_run(nights, versions, last):
    client, register = mlflow.MlflowClient(nights.uri), nights.spec.register_as
    mine = driver.fingerprints_of(nights.spec, "rows", "holdout")
    client.create_registered_model(nights.model)
    for each in versions:
        if each.state is not None:
            attempts.ask(nights.store, Order(each.job_id, POOL, each.holder, {"fingerprint": "q"}, {}, None), 0.0)
            attempts.end(nights.store, Key(each.job_id, 1), each.state, 1.0)
        tags = {"shoal.job_id": each.job_id, "shoal.attempt": "1", "shoal.holder": each.holder}
        tags |= {"shoal.data_digest": each.rows, "holdout.rmse.digest": "holdout"}
        tags |= {"shoal.spec_digest": mine.settings, "shoal.files_digest": mine.files} if each.marked else {}
        client.create_model_version(nights.model, "file:///model", tags=tags)
    run = Run(client, nights.uri, "0", "run", "link")

    found = training_record.reason_to_skip(run, nights.store, Key("mine", 2), "airflow:dag/mine", register, mine)

    assert (found and found[0]) == last


def test_a_registry_that_cannot_search_fails_no_job(nights, monkeypatch, capsys):
    def refuse(*_: object, **__: object) -> None:
        raise mlflow.MlflowException("not supported")

    monkeypatch.setattr(mlflow.MlflowClient, "search_model_versions", refuse)
    run = Run(mlflow.MlflowClient(nights.uri), nights.uri, "0", "run", "link")
    mine = Fingerprints("rows", "holdout", "settings", "files")

    found = training_record.reason_to_skip(run, nights.store, Key("a", 1), "b", nights.spec.register_as, mine)

    assert found is None
    assert f"the last training of {nights.model} could not be found, so the job trains" in capsys.readouterr().out


REGISTER = {"model": "m", "metric": "rmse", "holdout": {"paths": ["/holdout"]}}
FIELDS = {"dataset": {"paths": ["/rows"]}, "input_cols": ["a"], "label_col": "y", "register": REGISTER}
FUNCTION = {"framework": "pytorch", "train_func": "pkg.module:train", "register": {**REGISTER, "label_col": "y"}}


@pytest.mark.parametrize(
    ("fields", "wanted", "skips"),
    [
        (FIELDS, None, True),
        (FIELDS, False, False),
        (FIELDS, "False", False),
        (FIELDS, "true", True),
        ({**FIELDS, "register": {**REGISTER, "skip_if_unchanged": False}}, None, False),
        ({**FIELDS, "register": {**REGISTER, "skip_if_unchanged": "False"}}, None, False),
        ({**FIELDS, "register": {**REGISTER, "skip_if_unchanged": False}}, True, True),
        ({**FIELDS, "user_code": "/code"}, None, None),
        (FUNCTION, None, None),
        (FUNCTION, False, False),
    ],
)
def test_a_tasks_spec_says_whether_it_is_skipped(fields, wanted, skips):
    spec = parse_spec(fields)

    found = skipping_if_unchanged(spec, wanted)

    assert found.register_as.skip_if_unchanged is skips
    # A retry finds the job of a task that was submitted by a version without this option.
    assert fingerprint(found) == fingerprint(parse_spec({**fields, "register": {**fields["register"]}}))
    assert fingerprint(found) == fingerprint(skipping_if_unchanged(spec, False))
    assert parse_spec(found.document()) == found


def test_a_task_that_registers_nothing_is_not_skipped():
    spec = parse_spec({**FIELDS, "register": None})
    assert skipping_if_unchanged(spec, None) is spec
    assert skipping_if_unchanged(spec, False) is spec


@pytest.mark.parametrize(
    ("fields", "wanted", "said"),
    [
        ({**FIELDS, "register": None}, True, "skip_if_unchanged=True needs register"),
        ({**FIELDS, "user_code": "/code"}, True, "not possible with callbacks or functions of your own"),
        (FUNCTION, True, "not possible for a training function"),
        (FIELDS, "never", "register.skip_if_unchanged='never'"),
    ],
)
def test_a_task_that_cannot_be_skipped_says_so(fields, wanted, said):
    spec = parse_spec(fields)
    assert isinstance(spec, JobSpec | FunctionJobSpec)
    with pytest.raises(InvalidArgumentError, match=said):
        skipping_if_unchanged(spec, wanted)


def test_a_champion_to_continue_from_is_pinned_and_its_rows_count(nights, tmp_path, monkeypatch):
    loaded: list[bytes | None] = []

    def train(request, *, init_model, **options):
        loaded.append(init_model)
        return plain_xgboost(request, **options)

    monkeypatch.setattr("shoal.training.boosting.engine.train", train)
    nights.run()
    client, alias = mlflow.MlflowClient(nights.uri), nights.spec.register_as.alias
    champion = f"models:/{nights.model}@{alias}"

    second = nights.run(init_model=champion, dataset=_other_rows(tmp_path))
    assert loaded[0] is None and loaded[1]
    params = client.get_run(second.mlflow_run_id).data.params
    assert params["init_model"] == f"models:/{nights.model}/1"
    rows = training_record.load_rows(Run(client, nights.uri, "0", "run", "link"), nights.model, second.model_version)
    assert {Path(file.path).name for file in rows.files} == {"flights.parquet", "others.parquet"}

    # The rows of version 1, from which the training continues, are in the holdout.
    first_rows = nights.spec.register_as.model_copy(update={"holdout": nights.spec.dataset})
    with pytest.raises(DataError, match="the holdout has rows that the model is trained on"):
        nights.run(init_model=champion, dataset=_other_rows(tmp_path), register_as=first_rows)


def test_rows_are_unknown_if_those_of_the_continued_model_are(nights, logged):
    result = nights.run(init_model=logged)
    tags = mlflow.MlflowClient(nights.uri).get_model_version(nights.model, result.model_version).tags
    assert training_record.ROWS_TAG not in tags


def _other_rows(folder: Path) -> DatasetSpec:
    flights(20).assign(a=0.5).to_parquet(folder / "others.parquet")
    return DataConnector.from_parquet(folder / "others.parquet").to_spec()
