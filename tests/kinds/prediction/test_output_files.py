"""Batch prediction without a cluster: the request, the plan of the files, and the folder that they end in."""

from __future__ import annotations

import itertools
import os

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from shoal.data.parquet.source import ParquetSource
from shoal.data.planning import RowGroup
from shoal.errors import InvalidArgumentError, TrainingError
from shoal.kinds.prediction import output_files, worker
from shoal.kinds.prediction.output_files import MARKER, Output
from shoal.kinds.prediction.spec import PredictJobSpec
from shoal.kinds.prediction.worker import plan_files
from shoal.training.locations import Claim

DATASET = {"paths": ["/data/today"]}
PART = "part-000000000000-2.parquet"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": "models:/delays"}, "names no version: write models:/NAME@ALIAS or models:/NAME/VERSION"),
        ({"model": "models:/delays/latest"}, "names no version"),
        ({"model": "models:/delays/Production"}, "names no version"),
        ({"model": ""}, "model="),
        ({"output_path": " "}, "blank"),
        ({"keep_cols": ["id", "prediction"]}, 'prediction_col "prediction" is also in keep_cols'),
        ({"modell": "x"}, "did you mean model?"),
    ],
)
def test_a_wrong_request_says_what_is_wrong(fields, said):
    with pytest.raises(InvalidArgumentError) as error:
        PredictJobSpec(**{"model": "models:/delays@champion", "dataset": DATASET, "output_path": "/out", **fields})
    assert said in str(error.value)


def test_a_prediction_registers_nothing():
    with pytest.raises(InvalidArgumentError, match="register is only for jobs that train a model"):
        PredictJobSpec(
            model="models:/m@champion",
            dataset=DATASET,
            output_path="/out",
            register={"model": "m", "metric": "rmse", "holdout": DATASET},
        )


@pytest.mark.parametrize(
    ("model", "resolved"),
    [("delays", "{}/delays"), ("models:/m@champion", "models:/m@champion"), ("s3://b/model", "s3://b/model")],
)
def test_a_relative_model_folder_and_output_are_the_callers(tmp_path, monkeypatch, model, resolved):
    monkeypatch.chdir(tmp_path)
    spec = PredictJobSpec(model=model, dataset=DATASET, output_path="out/")
    assert (spec.model, spec.output_path) == (resolved.format(tmp_path), str(tmp_path / "out"))


@settings(deadline=None)
@given(rows=st.lists(st.integers(0, 50), min_size=1, max_size=20), workers=st.integers(1, 6), most=st.integers(1, 60))
def test_every_row_is_in_one_file_in_order(rows, workers, most):
    groups = [RowGroup(f"/data/{number // 3}", number % 3, count) for number, count in enumerate(rows)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_files, "FILE_ROWS", most)
        plan = plan_files(groups, workers)
    in_order = [
        (part.path, part.row_group, row)
        for file in itertools.chain.from_iterable(plan)
        for part in file.ranges
        for row in range(part.start, part.stop)
    ]
    assert in_order == [(group.path, group.index, row) for group in groups for row in range(group.rows)]
    files = list(itertools.chain.from_iterable(plan))
    assert [file.first_row for file in files] == list(itertools.accumulate([0, *(file.rows for file in files)]))[:-1]
    assert sorted(file.name for file in files) == [file.name for file in files]
    shares = [sum(file.rows for file in mine) for mine in plan]
    assert max(shares) - min(shares) <= 1


class TestOutput:
    @pytest.fixture(params=["local", "uri"])
    def place(self, request, tmp_path):
        import fsspec

        yield str(tmp_path / "out") if request.param == "local" else "memory://bucket/out"
        fsspec.filesystem("memory").store.clear()

    def write(self, output: Output, name: str = PART, value: int = 1) -> None:
        import fsspec

        with fsspec.open(f"{output.staging}/{name}", "wb") as file:
            parquet.write_table(pa.table({"prediction": [value, value]}), file)

    def publish(self, output: Output, *, key: str = "k", overwrite: bool = False) -> None:
        output.publish([PART], key=key, model="models:/m/1", rows=2, overwrite=overwrite)

    def published(self, place: str, value: int, *, key: str = "k", overwrite: bool = False, job: str = "job") -> Output:
        output = Output(place, Claim(job, "me"))
        assert not output.finished(key, overwrite=overwrite)
        output.prepare()
        self.write(output, value=value)
        self.publish(output, key=key, overwrite=overwrite)
        return output

    def read(self, place: str) -> list[int]:
        import fsspec

        fs, root = fsspec.core.url_to_fs(place)
        if not fs.exists(root):
            return []
        return [
            value
            for path in sorted(fs.ls(root, detail=False))
            if path.endswith(".parquet")
            for value in parquet.read_table(path, filesystem=fs)["prediction"].to_pylist()
        ]

    def test_the_same_predictions_are_found_and_others_refused(self, place):
        output = self.published(place, 1)
        assert self.read(place) == [1, 1]
        assert output.finished("k", overwrite=False)
        with pytest.raises(
            InvalidArgumentError,
            match=r"already has other predictions, by the model models:/m/1: .* or set overwrite=True",
        ):
            output.finished("other", overwrite=False)
        self.published(place, 2, key="other", overwrite=True, job="another")
        assert self.read(place) == [2, 2]

    def test_predictions_that_lack_a_file_are_made_again(self, place):
        import fsspec

        output = self.published(place, 1)
        fs, root = fsspec.core.url_to_fs(place)
        fs.rm_file(f"{root}/{PART}")
        assert not output.finished("k", overwrite=False)
        self.published(place, 3)
        assert self.read(place) == [3, 3]

    def test_a_file_that_did_not_arrive_ends_it_and_nothing_is_published(self, place):
        output = Output(place, Claim("job", "me"))
        output.prepare()
        with pytest.raises(TrainingError, match=r"part-000000000000-2\.parquet, are missing in"):
            self.publish(output)
        output.discard()
        assert self.read(place) == []

    def test_an_attempt_that_was_replaced_publishes_nothing(self, place):
        output = Output(place, Claim("job", "me"), lambda: False)
        output.prepare()
        self.write(output)
        with pytest.raises(TrainingError, match="a newer attempt has begun"):
            self.publish(output)
        assert self.read(place) == []

    def test_a_job_that_was_overtaken_by_another_replaces_nothing(self, place):
        late = Output(place, Claim("late", "me"))
        assert not late.finished("other", overwrite=False)
        late.prepare()
        self.write(late, value=2)
        self.published(place, 1)
        with pytest.raises(InvalidArgumentError, match="or set overwrite=True"):
            self.publish(late, key="other")
        late.discard()
        assert self.read(place) == [1, 1]

    def test_what_a_killed_attempt_of_another_job_left_goes_with_the_next_job(self, place):
        """Of a night whose driver was killed: the next night's job has another id."""
        import fsspec

        killed, running = Output(place, Claim("killed", "me", 2)), Output(place, Claim("running", "me"))
        for output in (killed, running):
            output.prepare()
            self.write(output)

        Output(place, Claim("next", "me"), has_ended=lambda claim: claim == Claim("killed", "me", 2)).prepare()

        def left(output: Output) -> bool:
            fs, root = fsspec.core.url_to_fs(output.staging)
            return fs.exists(f"{root}/{PART}")

        assert (left(killed), left(running)) == (False, True)
        self.publish(running)
        assert self.read(place) == [1, 1]

    @pytest.mark.parametrize("name", ["notes.txt", "notes/of.txt"])
    def test_files_of_others_are_left_alone(self, place, name):
        import fsspec

        fs, root = fsspec.core.url_to_fs(place)
        self.published(place, 1)
        output = Output(place, Claim("second", "me"))
        assert not output.finished("other", overwrite=True)
        output.prepare()
        self.write(output, value=2)
        fs.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
        fs.pipe_file(f"{root}/{name}", b"mine")
        with pytest.raises(InvalidArgumentError, match="contains files that are not complete predictions"):
            self.publish(output, key="other", overwrite=True)
        last_look = output._clear if "://" in place else output._swap
        with pytest.raises(TrainingError, match=r"notes(\.txt)? was added to"):
            last_look()
        output.discard()
        assert fs.cat_file(f"{root}/{name}") == b"mine"
        assert self.read(place) == [1, 1]

    def test_a_folder_that_shoal_did_not_make_or_a_link_is_refused(self, tmp_path):
        place = tmp_path / "out"
        place.mkdir()
        (place / "notes.txt").write_text("mine")
        with pytest.raises(InvalidArgumentError, match="contains files that are not complete predictions"):
            Output(str(place), Claim("job", "me")).finished("k", overwrite=True)
        (tmp_path / "link").symlink_to(place)
        with pytest.raises(InvalidArgumentError, match="is a file or a symbolic link"):
            Output(str(tmp_path / "link"), Claim("job", "me")).finished("k", overwrite=True)

    def test_a_publication_in_an_object_store_that_was_cut_off_is_made_again(self, monkeypatch):
        import fsspec

        place = "memory://cut/out"
        output = Output(place, Claim("job", "me"))
        output.prepare()
        self.write(output)
        with monkeypatch.context() as patch:
            patch.setattr("shoal.jobs.files.storage.write", lambda *_: (_ for _ in ()).throw(OSError("gone")))
            with pytest.raises(OSError, match="gone"):
                self.publish(output)
        self.published(place, 3, job="again")
        assert self.read(place) == [3, 3]
        fsspec.filesystem("memory").store.clear()

    def test_predictions_that_a_killed_attempt_had_set_aside_come_back(self, tmp_path):
        place = tmp_path / "out"
        self.published(str(place), 1)
        killed = Output(str(place), Claim("second", "me", 1))
        place.rename(killed._aside(1))
        retried = Output(str(place), Claim("second", "me", 2))
        retried.restore()
        assert self.read(str(place)) == [1, 1]
        assert sorted(os.listdir(tmp_path)) == ["out"]

    def test_what_a_killed_attempt_left_goes_with_the_next(self, tmp_path):
        place = tmp_path / "out"
        killed = Output(str(place), Claim("job", "me", 1))
        killed.prepare()
        self.write(killed)
        output = Output(str(place), Claim("job", "me", 2))
        output.prepare()
        self.write(output, value=3)
        self.write(output, name=".part-000000000000-2.parquet.0")  # of a worker that was killed while it wrote
        self.publish(output)
        assert self.read(str(place)) == [3, 3]
        assert sorted(os.listdir(tmp_path)) == ["out"]
        assert sorted(os.listdir(place)) == [".shoal-job", MARKER, PART]


def test_a_worker_that_ends_in_the_middle_of_a_file_leaves_none_that_counts(tmp_path, monkeypatch):
    """In an object store, closing the stream completes the file, whatever the reason."""
    import fsspec

    parquet.write_table(pa.table({"a": list(range(300))}), tmp_path / "rows.parquet", row_group_size=100)
    source = ParquetSource(tmp_path / "rows.parquet")
    spec = PredictJobSpec(model="models:/m/1", dataset=DATASET, output_path="/out")
    assignment = worker.Assignment(spec, "models:/m/1", source, ("a",), "memory://worker/out")
    [[file]] = plan_files(source.row_groups(), 1)
    batches = []

    class Twice:
        columns = ("a",)

        def predict_table(self, table):
            batches.append(table)
            if len(batches) == 2:
                raise SystemExit  # as Ray's workers do on SIGTERM
            return table["a"].to_numpy() * 2

    monkeypatch.setattr(worker.loading, "load", lambda *_, **__: Twice())
    with pytest.raises(SystemExit):
        worker.predict(assignment, [file])
    worker.predict(assignment, [file])
    with fsspec.open(f"memory://worker/out/{file.name}") as stored:
        assert parquet.read_table(stored)["prediction"].to_pylist() == [value * 2 for value in range(300)]
    fsspec.filesystem("memory").store.clear()
