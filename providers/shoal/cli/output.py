"""Print results on stdout, and messages and errors on stderr; with ``--json``, errors on stdout. End with an exit code,
also after a signal.

Options that several commands share are here, too: ``--json``, ``--limit`` and durations.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from enum import IntEnum
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from shoal import errors
from shoal.secrets.redaction import redact

if TYPE_CHECKING:
    from shoal.pool.status import PoolStatus


class ExitCode(IntEnum):
    """Exit codes of the `shoal` command. Scripts may rely on these codes, so their numbers do not change."""

    DONE = 0
    FAILED = 1
    WRONG_ARGUMENT = 2
    NOT_FOUND = 3
    NO_CAPACITY = 4
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "failed",
    ExitCode.WRONG_ARGUMENT: "wrong usage or argument; nothing was started",
    ExitCode.NOT_FOUND: "the pool, job or model does not exist",
    ExitCode.NO_CAPACITY: "the pool did not reach the size and was rolled back, or the training does not fit there",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C, SIGTERM)",
}

EPILOG = "\n\n".join(["**Exit codes**", *(f"- {code.value}: {meaning}" for code, meaning in MEANINGS.items())])
"""Text at the end of `shoal --help`."""


class InterruptedCommandError(Exception):
    """The command was interrupted. The message says what happened to the operation that the command had started."""


def exit_code(error: BaseException) -> ExitCode:
    """Return the exit code of the `shoal` command after an error. The code is FAILED unless the type of the error has
    its own code."""
    match error:
        case errors.InvalidArgumentError():
            return ExitCode.WRONG_ARGUMENT
        case errors.PoolNotFoundError() | errors.JobNotFoundError() | errors.ModelNotFoundError():
            return ExitCode.NOT_FOUND
        case errors.ScaleError() | errors.CapacityError():
            return ExitCode.NO_CAPACITY
        case InterruptedCommandError() | KeyboardInterrupt():
            return ExitCode.INTERRUPTED
    return ExitCode.FAILED


_STDERR = 2
_UNFINISHED = "interrupted before everything was undone: see what is left with `shoal pool list` and `shoal jobs list`"


class _Interrupts:
    """State of the signal handler. The state is global, because Python passes only the signal and the frame to a
    handler.

    Attributes:
        notice: Text to print at the first signal; None outside of `on_interrupt`.
        seen: Number of signals since `on_interrupt` began.
    """

    notice: str | None = None
    seen = 0


def handle_signals() -> None:
    """Install the signal handler for SIGTERM and SIGINT (Ctrl-C). The console script calls this function once."""
    signal.signal(signal.SIGTERM, _interrupt)
    # A command that a shell script has started with `&` ignores SIGINT. For such a command no handler is installed, so
    # that it still ignores SIGINT.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)


@contextmanager
def on_interrupt(notice: str, outcome: str) -> Iterator[None]:
    """Print a message when Ctrl-C or SIGTERM interrupts the ``with`` block, and raise InterruptedCommandError.

    Raises:
        InterruptedCommandError: The block was interrupted. The InterruptedCommandError replaces the
            `KeyboardInterrupt`.
    """
    _Interrupts.notice, _Interrupts.seen = notice, 0
    try:
        yield
    except KeyboardInterrupt:
        if _Interrupts.seen > 1:
            outcome = _UNFINISHED
        raise InterruptedCommandError(outcome) from None
    finally:
        _Interrupts.notice = None


def _interrupt(number: int, frame: FrameType | None) -> None:
    _Interrupts.seen += 1
    if _Interrupts.notice and _Interrupts.seen == 1:
        # The signal may have interrupted a write to sys.stderr, and a second write to sys.stderr would then fail. So
        # the text is written directly to the file descriptor.
        os.write(_STDERR, f"\ninterrupted: {_Interrupts.notice}\n".encode())
    raise KeyboardInterrupt


Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document on stdout.")]
Limit = Annotated[int, typer.Option(min=1, metavar="N", help="Greatest number of lines.")]

_PIPE_WIDTH = 200
"""Width in characters of the output to a file or a pipe. By default, rich would cut tables at 80 characters."""


class _Console(Console):
    """Console that escapes the control characters in the texts that it prints."""

    def print(self, *parts: Any, **options: Any) -> None:
        super().print(*(errors.printable(part) if isinstance(part, str) else part for part in parts), **options)


def console(*, stderr: bool = False) -> Console:
    """Build a `rich.Console` that writes to the current sys.stdout or, with `stderr`, to the current sys.stderr."""
    stream = sys.stderr if stderr else sys.stdout
    return _Console(
        stderr=stderr, markup=False, highlight=False, emoji=False, width=None if stream.isatty() else _PIPE_WIDTH
    )


def show(*parts: RenderableType) -> None:
    """Print parts of a result on stdout. Each part is a text or a table."""
    target = console()
    for part in parts:
        target.print(part, soft_wrap=isinstance(part, str))


def say(text: str) -> None:
    """Print a message on stderr."""
    console(stderr=True).print(text, soft_wrap=True)


def print_json(document: Any) -> None:
    """Print a dataclass, pydantic model or plain data as a JSON document; NaN becomes null."""
    from pydantic import TypeAdapter
    from pydantic_core import to_json

    # The JSON of a result has texts for NaN, its plain data do not.
    plain = TypeAdapter(Any).dump_python(document)
    typer.echo(to_json(plain, indent=2, inf_nan_mode="null").decode())


def print_error(error: BaseException, *, as_json: bool, message: str | None = None, code: int | None = None) -> None:
    """Print an error as ``error: …`` on stderr, or with `as_json` as ``{"error": {…}}`` on stdout."""
    # Python represents invalid UTF-8 bytes in a command line argument as lone surrogates, which no stream can write.
    text = errors.printable(redact("\n".join([message or str(error), *getattr(error, "__notes__", [])])))
    if not as_json:
        label = "" if isinstance(error, InterruptedCommandError) else "error: "
        console(stderr=True).print(Text.assemble((label, "bold red"), text), soft_wrap=True)
        return
    fields: dict[str, Any] = {
        "type": type(error).__name__,
        "message": text,
        "exit_code": int(exit_code(error)) if code is None else code,
    }
    if isinstance(error, errors.ScaleError):
        fields["nodes"] = error.nodes
    print_json({"error": fields})


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None) -> Table:
    """Build a table of rows, for :func:`show`. None and empty texts are shown as a dash."""
    made = Table(
        *columns, title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for row in rows:
        made.add_row(*(_cell(value) for value in row))
    return made


def show_result(document: Any, *parts: RenderableType, as_json: bool) -> None:
    """Print the result of a command: parts of a text or, with `as_json`, the JSON document."""
    if as_json:
        print_json(document)
    else:
        show(*parts)


def show_list(
    document: dict[str, Any], columns: Sequence[str], rows: Sequence[Sequence[Any]], empty: str, *, as_json: bool
) -> None:
    """Print a list: as a table, with `as_json` as the JSON document, and without rows as the text `empty`."""
    show_result(document, table(columns, rows) if rows else empty, as_json=as_json)


def require_pool_if(is_empty: bool, name: str | None) -> None:
    """Check that a pool exists if a list for this pool is empty, because the name may be wrong. The name is not checked
    otherwise, because a deleted pool may still have jobs and actions.

    Raises:
        PoolNotFoundError: No pool has this name.
    """
    if name and is_empty:
        from shoal.pool.selection import which_pool
        from shoal.state import Store

        which_pool(Store(), name)


def fields(pairs: Iterable[tuple[str, Any]]) -> Table:
    """Build a list of names and values, one pair per line, for :func:`show`. Pairs without a value are left out."""
    made = Table.grid(padding=(0, 2, 0, 0))
    for name, value in pairs:
        if value is not None and value != "":
            made.add_row(Text(name, style="dim"), _cell(value))
    return made


def when(seconds: float | None) -> str | None:
    """Format a time (in seconds since the epoch) in the local time zone. Return None for None."""
    return None if seconds is None else datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _cell(value: Any) -> Text:
    if isinstance(value, float):
        value = f"{value:.6g}"
    return Text("-" if value is None or value == "" else errors.printable(str(value)), overflow="fold")


class PoolProgress:
    """A callback for `on_progress` that shows how many nodes of a pool are ready. On a terminal, it shows a progress
    bar. Otherwise, it prints lines.

    Without a terminal, a line is printed each time the number of nodes in a state changes.
    """

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._console = console(stderr=True)
        self._bar: Progress | None = None
        self._said: set[str] = set()
        self._last = ""
        self._most = 0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[counts]}", markup=False),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.add_task(self._doing, total=None, counts="")
            self._bar.start()
        else:
            self._console.print(f"{self._doing} …", soft_wrap=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, status: PoolStatus) -> None:
        """Show how many nodes are in which state, and print the error of each failed node once."""
        for node in status.failed:
            line = f"node {node.name} failed: {node.error or 'no reason recorded'} (log: {node.log})"
            if line not in self._said:
                self._said.add(line)
                (self._bar.console if self._bar else self._console).print(line, soft_wrap=True)
        counts = describe_counts(status)
        there = len(status.active) + len(status.pending) + len(status.failed) + len(status.leaving)
        self._most = max(self._most, there)
        if self._bar is not None:
            # While the pool shrinks, the bar shows how many of the nodes that have to end have ended.
            done, total = len(status.active), status.target
            if there > status.target:
                done, total = self._most - there, self._most - status.target
            self._bar.update(self._bar.task_ids[0], completed=done, total=total, counts=counts)
        elif counts != self._last:
            self._console.print(f"{status.name}: {counts}", soft_wrap=True)
        self._last = counts


def describe_counts(status: PoolStatus) -> str:
    """Describe how many nodes of a pool are in which state, for example ``2 of 3 nodes active, 1 pending``."""
    more = [
        f"{len(nodes)} {what}"
        for what, nodes in (("pending", status.pending), ("failed", status.failed), ("leaving", status.leaving))
        if nodes
    ]
    return ", ".join([status.progress(), *more])
