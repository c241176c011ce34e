"""Build a message about trained models: for each model its outcome, its metric, and the metrics of earlier versions.

The functions only build the message, which Airflow's notifiers and Prefect's automations send.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.jobs.many.summary import ModelLine, summary_headline
from shoal.jobs.metrics.evaluation import best_mode
from shoal.jobs.mlflow.promotion_decision import is_better

_INDENT = " " * 10
"""Indent of the second line about a model. With this indent, the line begins below the model's name."""


@dataclass(frozen=True)
class Message:
    """A message for people, as plain text and as HTML.

    Attributes:
        subject: The message in one line.
        text: The whole message as plain text.
    """

    subject: str
    text: str

    @property
    def html(self) -> str:
        """Return the text as HTML, with a fixed-width font and all special characters escaped."""
        return f"<pre>{html.escape(self.text)}</pre>"


def summary_message(lines: Sequence[ModelLine]) -> Message:
    """Build a message for people about the trainings of one or more models.

    For one model, the subject names the outcome. For several models, the subject counts the outcomes. The text has a
    line per model with outcome, metric, the champion's metric and the reason, and below that line the metrics of the
    last ten versions.

    Args:
        lines: One line per model; see `shoal.jobs.many.summary`.

    Example:
        >>> print(summary_message(summary(specs, results)).text)
    """
    subject = _subject(lines[0]) if len(lines) == 1 else summary_headline(lines)
    parts = []
    for line in lines:
        parts.append(str(line))
        if comparison := _against_recent(line):
            parts.append(f"{_INDENT}{comparison}")
    return Message(subject, "\n".join(parts))


def _subject(line: ModelLine) -> str:
    version = "" if line.version is None else f" version {line.version}"
    value = "" if line.value is None else f", {line.metric} {line.value:.6g}"
    return f"{line.outcome}: {line.model}{version}{value}"


def _against_recent(line: ModelLine) -> str:
    """Return a sentence about the metrics of earlier versions; promoted versions get an asterisk.

    For example: ``rmse of the last 2 versions, newest first: 18, 17.5* (* promoted; each on its own holdout)``.
    """
    known = [each for each in line.recent if each.value is not None]
    if line.metric is None or not known:
        return ""
    listed = ", ".join(f"{each.value:.6g}{'*' if each.promoted else ''}" for each in known)
    one = len(known) == 1
    text = f"{line.metric} of the last {'version' if one else f'{len(known)} versions, newest first'}: {listed}"
    notes = ["* promoted"] if any(each.promoted for each in known) else []
    if not one:
        notes.append("each on its own holdout")
    if notes:
        text += f" ({'; '.join(notes)})"
    if line.value is None or not math.isfinite(line.value):
        return text
    mode = best_mode(line.metric)
    beaten = sum(is_better(line.value, each.value, mode) for each in known)
    return f"{text}; version {line.version} is better than {beaten} of {len(known)}"
