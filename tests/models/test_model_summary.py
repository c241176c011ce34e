"""The summary of many models: one line per model, in the order of the specs."""

from __future__ import annotations

import json

import pytest

from shoal.errors import InvalidArgumentError, JobFailedError
from shoal.jobs import JobResult, JobSpec, ModelLine, NoResult, summary, summary_headline, summary_table


def spec_of(model: str | None, **fields) -> JobSpec:
    register = model and {"model": model, "metric": "rmse", "holdout": {"paths": ["/data/test"]}}
    return JobSpec.parse(
        {"dataset": {"paths": ["/data"]}, "input_cols": ["x"], "label_col": "y", "register": register, **fields}
    )


def result_of(rmse: float, *, promoted: bool | None, champion: float | None = None) -> JobResult:
    reason = "better" if promoted else "champion_not_beaten"
    return JobResult.parse(
        {
            "job_id": "xgboost-1", "attempt": 1, "model_path": "/m", "model_digest": None, "model_uri": "/m",
            "metrics": {"holdout-rmse": rmse, "holdout-mae": 1.0}, "best_iteration": None, "rows": 10,
            "num_workers": 1, "seconds": 2.0, "restarts": 0, "peak_memory_per_worker": [], "mlflow_run_id": None,
            "model_version": None if promoted is None else "7", "promoted": promoted,
            "champion": None if champion is None else {"version": "6", "value": champion},
            "decision": None if promoted is None else {"reason": reason, "sentence": f"rmse {rmse} decided"},
        }
    )  # fmt: skip


def test_one_line_per_model_with_outcome_metric_and_champion():
    names = ("a", "b", "c", "d", "e")
    specs = [spec_of(f"delays-{name}") for name in names]
    results = [
        result_of(17.25, promoted=True, champion=18.0),
        result_of(19.0, promoted=False, champion=18.0).to_dict(),
        JobFailedError("job x failed:\ncolumn y is null in 3 rows"),
        NoResult("no rows since the last run", skipped=True),
        result_of(17.0, promoted=True),
    ]

    lines = summary([specs[0].document(), *specs[1:]], results)

    assert [str(line) for line in lines] == [
        "promoted  delays-a: rmse 17.25, champion 18: rmse 17.25 decided",
        "kept      delays-b: rmse 19, champion 18: rmse 19.0 decided",
        "failed    delays-c: job x failed: column y is null in 3 rows",
        "skipped   delays-d: no rows since the last run",
        "promoted  delays-e: rmse 17: rmse 17.0 decided",
    ]
    assert (lines[0].version, lines[0].champion, lines[0].champion_version) == ("7", 18.0, "6")
    assert (lines[2].metric, lines[2].value, lines[2].version) == ("rmse", None, None)
    assert summary_headline(lines) == "5 jobs: 2 promoted, 1 kept, 1 failed, 1 skipped"
    assert [row["champion"] for row in summary_table(lines)] == ["18", "18", "-", "-", "-"]


def test_no_metric_of_a_champion_that_knows_rows_of_the_holdout():
    late = result_of(2.9, promoted=True, champion=2.8).to_dict()
    late["champion"]["unseen_rows"] = 144

    [line] = summary([spec_of("a")], [late])

    assert str(line) == "promoted  a: rmse 2.9: rmse 2.9 decided"
    assert (line.champion, line.champion_version) == (None, "6")


def test_a_champion_that_could_not_be_read_has_no_metric():
    [line] = summary([spec_of("a")], [result_of(2.9, promoted=False, champion=float("nan"))])

    assert str(line) == "kept      a: rmse 2.9: rmse 2.9 decided"


def test_lines_survive_json_also_with_nan():
    result = result_of(float("nan"), promoted=False, champion=1.0)
    [line] = summary([spec_of("a")], [result.to_dict()])

    assert repr(JobResult.model_validate_json(result.model_dump_json())) == repr(result)
    again = ModelLine.parse(json.loads(json.dumps(line.to_dict(), allow_nan=False)))

    assert str(again) == str(line) == "kept      a: rmse nan, champion 1: rmse nan decided"


def test_a_model_that_is_not_registered_has_the_name_of_its_job():
    named, unnamed = spec_of(None, run_config={"job_id": "nightly-a"}), spec_of(None)

    lines = summary([named, unnamed], [result_of(1.0, promoted=None), NoResult("killed")])

    assert [str(line) for line in lines] == [
        "trained   nightly-a: the model is not registered",
        "failed    xgboost: y: killed",
    ]


def test_a_wrong_spec_keeps_its_name_in_the_line_of_its_failure():
    wrong = {"register": {"model": "delays-a", "metric": "rmse"}, "label": "y"}

    [line] = summary([wrong], [ValueError("unknown option")])

    assert str(line) == "failed    delays-a: unknown option"


def test_a_long_cause_keeps_both_ends_and_hides_credentials():
    [line] = summary([spec_of("a")], [NoResult(f"job 1: {'x' * 1000} postgresql://me:secret-word@host/db failed")])

    assert line.sentence.startswith("job 1: x") and line.sentence.endswith("failed") and len(line.sentence) == 303
    assert "secret-word" not in line.sentence


@pytest.mark.parametrize(
    ("results", "message"), [([], "1 specs and 0 results"), ([None], "give a JobResult or its dict")]
)
def test_missing_and_foreign_results_are_refused(results, message):
    with pytest.raises(InvalidArgumentError, match=message):
        summary([spec_of("a")], results)


def test_a_job_that_skipped_its_training_says_why():
    skipped = result_of(0.0, promoted=None).model_copy(update={"skipped": "nothing new since version 6"})

    (line,) = summary([spec_of("delays-a")], [skipped.to_dict()])

    assert str(line) == "skipped   delays-a: nothing new since version 6"


def test_a_metric_of_ranking_has_its_value():
    result = result_of(0.0, promoted=True).model_copy(update={"metrics": {"holdout-ndcg@10": 0.7}})
    spec = spec_of("ranker", group_col="q").model_copy(deep=True)
    register = spec.register_as.model_copy(update={"metric": "ndcg@10"})

    (line,) = summary([spec.model_copy(update={"register_as": register})], [result])

    assert (line.metric, line.value) == ("ndcg@10", 0.7)
