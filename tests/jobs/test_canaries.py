"""Passwords planted in a job's spec are found nowhere but in the driver and its 0600 file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal import RunConfig
from shoal.data.dataset_spec import DatasetSpec
from shoal.errors import InvalidArgumentError
from shoal.jobs import FunctionJobSpec, JobSpec, Register, Tracking, credentials, load_results
from shoal.jobs.files.artifacts import folder, save_results
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key, Order
from shoal.jobs.status import JobStatus
from shoal.jobs.submission import fingerprint
from shoal.state import Store
from shoal.state.schema import JobState
from shoal.training.locations import Claim
from shoal.training.pytorch.request import FunctionResult
from tests.support.job_results import result_of
from tests.support.job_store import POOL

CANARY = "cAnArY"
URI = f"s3://KEY:a/{CANARY}#x?y@bucket/path"
SIGNED = f"https://account.blob.core.windows.net/c/x?sv=1&sig={CANARY}%3D"

BOOSTING: dict[str, Any] = {
    "dataset": {"paths": [URI, SIGNED]},
    "input_cols": ["a", f"postgresql://h/d?password={CANARY}"],
    "label_col": URI,
    "categorical_cols": ["a"],
    "eval_set": {"eval": {"paths": [f" {URI}"]}},
    "params": {"objective": "reg:squarederror", "note": URI, "password": CANARY},
    "weight_col": f"{URI}/w",
    "group_col": f"{URI}/g",
    "user_code": URI,
    "run_config": {"pool_name": URI, "artifact_location": URI},
    "tracking": {
        "uri": f"https://{CANARY}@host", "experiment": URI, "run_name": URI, "tags": {"a/b": URI, "a": SIGNED},
    },
    "register": {"model": "m", "metric": "rmse", "holdout": {"paths": [URI]}},
}  # fmt: skip
FUNCTION: dict[str, Any] = {
    "framework": "pytorch",
    "name": URI,
    "train_func": "module:train",
    "args": [f"host=h password='{CANARY} x' user=me", [URI]],
    "kwargs": {"db": {"api_key": CANARY, "url": SIGNED}, "Authorization": f"Bearer {CANARY}"},
    "dataset_map": {"train": {"paths": [URI]}},
    "hyper_params": {"PWD": CANARY, "odbc": f"Driver={{x}};UID=me;PWD={{a;{CANARY}}};x=1"},
    "run_config": {"artifact_location": URI},
    "tracking": {"uri": f"postgresql://me:12/{CANARY}@db/mlflow"},
}


@pytest.mark.parametrize(("kind", "fields"), [(JobSpec, BOOSTING), (FunctionJobSpec, FUNCTION)])
def test_the_store_has_none_and_the_driver_has_all(
    kind: type[JobSpec | FunctionJobSpec], fields: dict[str, Any], either_store: Path
) -> None:
    spec = kind.parse(fields)
    hidden, uris = credentials.hide(spec.model_copy(update={"fingerprint": fingerprint(spec)}).document())
    store, key = Store(), Key("job", 1)

    order = Order("job", "retrain", "cli:me@here", hidden, {"gcs": "g"}, None)
    attempts.ask(store, order, 0.0)
    attempts.end(store, key, JobState.FAILED, 1.0, error=f"cannot open {URI}")

    row = attempts.load(store, key)
    assert row.error == "cannot open s3://bucket/path"
    assert CANARY not in json.dumps(row.spec)
    assert CANARY not in repr(JobStatus.of(row))
    for file in either_store.rglob("*"):
        assert not file.is_file() or CANARY.encode() not in file.read_bytes()
    assert kind.parse(credentials.reveal(row.spec, uris)).document() == {
        **spec.document(),
        "fingerprint": row.spec["fingerprint"],
    }


def test_the_same_fingerprint_with_other_credentials() -> None:
    rotated = json.loads(json.dumps(BOOSTING).replace(CANARY, "another"))

    assert fingerprint(JobSpec.parse(rotated)) == fingerprint(JobSpec.parse(BOOSTING))


def test_a_fingerprint_stays_from_version_to_version() -> None:
    spec = JobSpec(
        dataset=DatasetSpec(paths=("/data/train",)),
        input_cols=("a", "b"),
        label_col="y",
        tracking=Tracking(uri="http://me:secret@host:5000", tags={"team/x": "http://host:5000/a:b@c"}),
        params={"eta": 0.1, "note": "k=v; a@b"},
    )

    assert fingerprint(spec) == "7d17f4fac077f926d95d8ffd95acd236be490088791d03e9aae672b27c1ed22e"


def test_repr_shows_none() -> None:
    spec = JobSpec.parse({**BOOSTING, "params": {}})

    for shown in (repr(spec), str(spec), repr(spec.run_config), repr(spec.tracking), repr(spec.dataset)):
        assert CANARY not in shown
    assert "s3://bucket/path" in repr(spec.run_config)


def test_errors_of_a_spec_show_none() -> None:
    for fields in (
        {**BOOSTING, "n_estimators": URI},
        {**BOOSTING, "tracking": {"uri": [URI]}},
        {**BOOSTING, "run_config": {"timeout": SIGNED}},
        {**BOOSTING, "register": {"model": URI, "metric": "rmse", "holdout": {"paths": [URI]}}},
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            JobSpec.parse(fields)
        assert CANARY not in str(caught.value)
    with pytest.raises(InvalidArgumentError) as wrong:
        JobSpec(dataset=[URI], input_cols=URI, label_col=[URI])
    assert CANARY not in str(wrong.value)
    with pytest.raises(InvalidArgumentError) as illegal:
        Register(model=URI, metric="rmse", holdout=DatasetSpec(paths=(URI,)))
    assert CANARY not in str(illegal.value)
    with pytest.raises(InvalidArgumentError) as limits:
        RunConfig(artifact_location=URI, seed=URI)
    assert CANARY not in str(limits.value) + str(limits.value.__cause__)


def test_a_result_has_none_and_is_read_with_the_location_as_it_was_given(store: Store) -> None:
    attempts.ask(store, Order("job", POOL, "cli:me@here", {"fingerprint": "q"}, {}, None), 0.0)
    location = f"memory://me:a/{CANARY}@store/models"
    answer = FunctionResult(
        results=(7,), model_dir=f"{location}/model", metrics={}, num_workers=1, seconds=0.5, restarts=0, workers=()
    )  # fmt: skip
    path, digest = save_results(folder(Key("job", 1), location), Claim("job", "the test"), answer)
    attempts.end(store, Key("job", 1), JobState.SUCCEEDED, 1.0, result={}, results_digest=digest)
    result = result_of(model_path=answer.model_dir, model_uri=answer.model_dir, results_path=path)

    assert CANARY not in result.model_dump_json() + repr(result)
    assert result.results_path == "memory://store/models/job/1/results.pkl"
    with pytest.raises(FileNotFoundError):
        load_results(result)
    assert load_results(result, location).results == (7,)
    with pytest.raises(FileNotFoundError) as caught:
        load_results(result.model_copy(update={"results_path": f"{result.results_path}.gone"}), location)
    assert CANARY not in str(caught.value)
