"""Keep an Optuna study in the store, as the two methods that `optuna.storages.JournalStorage` asks of a backend.

Optuna's own storage in a database cannot be used, because its migrations and those of shoal use the same table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shoal.errors import MissingExtraError
from shoal.jobs.journal import study_logs
from shoal.jobs.journal.attempts import Key
from shoal.jobs.journal.steps import patiently
from shoal.state import Store
from shoal.state.databases import dump_json, load_json

if TYPE_CHECKING:
    import optuna


STUDY = "search"
"""Name of the study in its storage, which has only this study. Optuna's hyperband pruner depends on the name."""

_DURABLE = frozenset({0, 6})
"""Optuna's codes of the entries that are written at once: a new study, and the end of a trial. All others wait for the
next of these or for `flush`: a transaction of SQLite takes 9 ms on a slow disk, and a search has thousands of reports.
A trial whose driver was killed before its end is repeated, so its reports are not needed."""


class StudyJournal:
    """Journal of one study, as a backend of `optuna.storages.JournalStorage`.

    Only the driver of the job's newest attempt may append. While the store cannot be used, an append is repeated.

    Args:
        store: Store that has the journal.
        key: Attempt that reads, and writes while it runs.
        study: Number of the attempt that has begun the study; see `shoal.jobs.journal.study_logs.study_of`.
    """

    def __init__(self, store: Store, key: Key, study: int) -> None:
        self._store = store
        self._key = key
        self._study = study
        self._written: int | None = None
        """Number of entries in the store; None before this process has appended any."""
        self._recent: list[str] = []
        """The newest entries, which Optuna has not read yet, or which are not in the store yet."""
        self._first_recent = 0

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Add entries to the journal. Only a new study and the end of a trial are written at once.

        Raises:
            FencedError: The attempt is not running, or is not the newest attempt of its job.
        """
        if self._written is None:
            self._written = self._first_recent = study_logs.append(self._store, self._key, self._study, [], None)
        self._recent += map(dump_json, logs)
        if any(log["op_code"] in _DURABLE for log in logs):
            self.flush()

    def flush(self) -> None:
        """Write the entries that are not in the store yet, in one transaction.

        Raises:
            FencedError: The attempt is not running, or is not the newest attempt of its job.
        """
        if self._written is None:
            return
        written, entries = self._written, self._recent[self._written - self._first_recent :]
        if entries:
            self._written = patiently(
                self._store, lambda: study_logs.append(self._store, self._key, self._study, entries, written)
            )

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        """Return the entries from the given number on."""
        if self._written is None or log_number_from < self._first_recent:
            entries = patiently(
                self._store, lambda: study_logs.read(self._store, self._key.job_id, self._study, log_number_from)
            )
            if self._written is not None:
                entries += self._recent[self._written - self._first_recent :]
            return [load_json(entry) for entry in entries]
        del self._recent[: (kept := min(log_number_from, self._written)) - self._first_recent]
        self._first_recent = kept
        return [load_json(entry) for entry in self._recent[log_number_from - kept :]]


def require_optuna() -> None:
    """Check that Optuna is installed.

    Raises:
        MissingExtraError: Optuna is not installed.
    """
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("optuna", "tune") from error


def copy_of(store: Store, key: Key, study: int) -> optuna.Study:
    """Return a copy in memory of a study in the store, which a user may change."""
    require_optuna()
    import optuna

    memory = optuna.storages.InMemoryStorage()
    shown = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # the copy is no new study for the user
    try:
        optuna.copy_study(
            from_study_name=STUDY,
            from_storage=storage_of(StudyJournal(store, key, study)),
            to_storage=memory,
            to_study_name=STUDY,
        )
    finally:
        optuna.logging.set_verbosity(shown)
    return optuna.load_study(study_name=STUDY, storage=memory)


def storage_of(journal: StudyJournal) -> optuna.storages.BaseStorage:
    """Return Optuna's storage of a study in the store."""
    require_optuna()
    import optuna

    backend: Any = journal
    return optuna.storages.JournalStorage(backend)
