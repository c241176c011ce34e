"""The message about trained models, from their lines alone."""

from __future__ import annotations

import math

import pytest

from shoal.jobs import ModelLine, RecentVersion, summary_message


def line(value: float | None = 17.25, *recent: tuple[float | None, bool], **changes: object) -> ModelLine:
    versions = [
        RecentVersion(version=str(len(recent) - at), value=each, promoted=promoted)
        for at, (each, promoted) in enumerate(recent)
    ]
    fields = {
        "model": "delays-UA", "outcome": "promoted", "version": "12", "metric": "rmse", "value": value,
        "champion": 18.0, "champion_version": "9", "sentence": "it is better", "recent": versions,
    }  # fmt: skip
    return ModelLine.parse({**fields, **changes})


def test_one_model_is_named_in_the_subject_and_compared_with_its_last_versions():
    said = summary_message([line(17.25, (17.5, False), (18.0, True), (16.0, False), (None, False))])
    assert said.subject == "promoted: delays-UA version 12, rmse 17.25"
    assert said.text.splitlines() == [
        "promoted  delays-UA: rmse 17.25, champion 18: it is better",
        "          rmse of the last 3 versions, newest first: 17.5, 18*, 16 (* promoted; each on its own holdout); "
        "version 12 is better than 2 of 3",
    ]


@pytest.mark.parametrize(
    ("given", "comparison"),
    [
        (line(17.0), []),
        (line(17.0, (None, True), (math.nan, False)), []),
        (line(17.0, (18.0, True)), ["rmse of the last version: 18* (* promoted); version 12 is better than 1 of 1"]),
        (line(math.nan, (18.0, False)), ["rmse of the last version: 18"]),
        (line(0.75, (0.5, False), metric="auc"), ["auc of the last version: 0.5; version 12 is better than 1 of 1"]),
    ],
)
def test_comparison_with_earlier_versions(given, comparison):
    assert [text.strip() for text in summary_message([given]).text.splitlines()[1:]] == comparison


def test_several_models_have_a_line_each_and_a_headline():
    failed = line(None, outcome="failed", model="delays-<b>", version=None, champion=None, sentence="no rows")
    said = summary_message([line(), failed])
    assert said.subject == "2 jobs: 1 promoted, 1 failed"
    assert said.text.splitlines()[1] == "failed    delays-<b>: no rows"
    assert "delays-&lt;b&gt;" in said.html and said.html.startswith("<pre>")


def test_a_failed_model_has_no_version_in_the_subject():
    failed = line(None, outcome="failed", version=None, champion=None, sentence="no rows")
    assert summary_message([failed]).subject == "failed: delays-UA"
