"""The `shoal` command: its errors and exit codes, and the commands that belong to no group.

Modules that take long to import are imported only by the commands that need them, so that `shoal --help` stays fast.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from shoal import __version__
from shoal.cli import jobs, models, output, pools
from shoal.cli.plan import plan
from shoal.errors import InvalidArgumentError, ShoalError
from shoal.new_files import write_samples
from shoal.option_validation import duration

# Base class of typer's usage errors. Older releases of typer import this class from click, and newer releases contain
# their own copy. So the class is found by its name among the base classes of `typer.BadParameter`.
_UsageError: type[BaseException] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)

_SIGNS = {"ok": ("ok    ", "green"), "note": ("note  ", "yellow"), "broken": ("BROKEN", "bold red")}

_SAMPLES = "shoal.init"
"""Group of entry points. Each entry point is a function that returns the texts of the samples for one workflow engine,
by name of the file, for a folder. Entry points are used because the modules of the CLI must not import the modules for
workflow engines."""


def _other_commands() -> dict[str, EntryPoint]:
    """Return the commands that other packages add to `shoal`, by name, such as ``check-dags`` of the Airflow provider.

    An entry point of the group ``shoal.commands`` names a `typer.Typer` with one command.
    """
    return {entry.name: entry for entry in entry_points(group="shoal.commands")}


class _ShoalGroup(TyperGroup):
    """Root command, which converts each exception of a subcommand to an error message and an exit code."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        as_json = "--json" in given
        try:
            code = super().main(given, prog_name or "shoal", complete_var, standalone_mode=False, **extra)
            sys.exit(code or output.ExitCode.DONE)
        except (ShoalError, output.InterruptedCommandError) as error:
            output.print_error(error, as_json=as_json)
            sys.exit(output.exit_code(error))
        except _UsageError as error:
            message = str(getattr(error, "format_message", error.__str__)()).strip()
            if message:  # without arguments of the command, typer has already printed the help
                if (context := getattr(error, "ctx", None)) is not None:
                    error.add_note(f"see `{context.command_path} --help`")
                output.print_error(error, as_json=as_json, message=message, code=output.ExitCode.WRONG_ARGUMENT)
            sys.exit(output.ExitCode.WRONG_ARGUMENT)
        except KeyboardInterrupt:  # a second Ctrl-C came while the message about the first Ctrl-C was printed
            sys.exit(output.ExitCode.INTERRUPTED)
        # Any other exception is a bug in shoal. The exception is raised again, because the user needs the traceback for
        # a bug report.
        except Exception as error:
            if as_json:
                output.print_error(error, as_json=True)
            raise

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *sorted(_other_commands())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        # Reading the entry points takes as long as importing all of shoal's own commands. So the entry points are read
        # only for the help, and for commands of other packages.
        if command is None and (entry := _other_commands().get(cmd_name)) is not None:
            command = typer.main.get_command(entry.load())
            command.name = cmd_name
        return command

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # if the exception reached typer, typer would exit without a message
            raise output.InterruptedCommandError("interrupted") from None


app = typer.Typer(
    cls=_ShoalGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=output.EPILOG,
)


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
    as_json: output.Json = False,
) -> None:
    """Train XGBoost, LightGBM and PyTorch models on elastic compute pools."""
    if version:
        output.show_result({"version": __version__}, f"shoal {__version__}", as_json=as_json)
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
    elif as_json:
        raise typer.BadParameter("--json must follow a command, for example `shoal pool list --json`")


app.add_typer(pools.app, name="pool")
app.command()(jobs.train)
app.command()(jobs.tune)
app.command()(plan)
app.add_typer(jobs.app, name="jobs")
app.add_typer(jobs.many_app, name="many")
app.add_typer(models.app, name="models")
app.command()(pools.sweep)


@app.command()
def history(
    pool_name: Annotated[
        str | None, typer.Option("--pool", metavar="NAME", help="List only actions on this pool and its jobs.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(metavar="KIND", help="List only actions of this kind, such as scaled or cancelled.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="AGE", help="Age of the oldest line: hours, days or weeks, such as 7d.")
    ] = None,
    limit: output.Limit = 100,
    as_json: output.Json = False,
) -> None:
    """List actions on pools, jobs and models, the newest first: who acted, when, and with which outcome."""
    from shoal.history import read

    oldest = None if since is None else time.time() - duration(since).total_seconds()
    found = read(pool=pool_name, kind=kind, since=oldest, limit=limit)
    output.require_pool_if(not found, pool_name)
    rows = [
        (output.when(one.at), one.actor, one.kind.value, one.pool, one.subject, one.detail, one.outcome)
        for one in found
    ]
    columns = ("TIME", "ACTOR", "ACTION", "POOL", "SUBJECT", "DETAIL", "OUTCOME")
    output.show_list({"history": found}, columns, rows, "no actions found", as_json=as_json)


@app.command()
def doctor(
    pool: Annotated[
        str | None,
        typer.Option("--pool", help="Check the nodes of this ray:// or kuberay:// pool instead of this machine."),
    ] = None,
    artifact_location: Annotated[
        str | None, typer.Option(help="With --pool: URI or path to which the nodes must be able to write.")
    ] = None,
    as_json: output.Json = False,
) -> None:
    """Check this machine, or the nodes of a ray:// or kuberay:// pool, and print how to fix each problem. The exit code
    is 1 if local pools, or jobs on the given pool, cannot work."""
    from shoal.cli.doctor_checks import all_checks
    from shoal.pool.api import ComputePool

    if pool is None and artifact_location is not None:
        raise InvalidArgumentError(
            "--artifact-location is checked only on the nodes of a pool: add --pool, or remove --artifact-location"
        )
    checks = list(all_checks()) if pool is None else ComputePool(pool).preflight(artifact_location)
    what = "local pools" if pool is None else f"jobs on pool {pool}"
    broken = [check for check in checks if check.status == "broken"]
    if as_json:
        output.print_json({"ok": not broken, "checks": checks})
    else:
        width = max((len(check.name) for check in checks), default=0)
        for check in checks:
            output.show(Text.assemble(_SIGNS[check.status], "  ", check.name.ljust(width), "  ", check.found))
            if check.advice:
                output.show(Text(" " * (8 + width + 2) + "-> " + check.advice, style="dim"))
        where = " on this machine" if pool is None else ""
        names = ", ".join(check.name for check in broken)
        output.show("", f"{what} cannot work, because of: {names}" if broken else f"{what} can work{where}")
    if broken:
        raise typer.Exit(output.ExitCode.FAILED)


@app.command()
def init(
    engine: Annotated[str, typer.Argument(help="Workflow engine: airflow or prefect.")],
    folder: Annotated[Path, typer.Argument(help="Folder for the files, for example Airflow's folder of DAGs.")],
    as_json: output.Json = False,
) -> None:
    """Write sample files to a folder: DAGs or flows that train, predict, warn and clean up; for Prefect, also their
    deployments.

    Files that exist are not overwritten.
    """
    known = {each.name: each for each in entry_points(group=_SAMPLES)}
    if engine not in known:
        raise InvalidArgumentError(f'there are no samples for "{engine}": use {" or ".join(sorted(known))}')
    samples: Callable[[Path], dict[str, str]] = known[engine].load()
    written = write_samples(folder, samples(folder))
    lines = [f"wrote {path}" for path in written] or [f"{folder} already has these files"]
    output.show_result({"written": [str(path) for path in written]}, *lines, as_json=as_json)


@app.command()
def ui(
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Port on 127.0.0.1. 0: any free port.")
    ] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the link; open no browser.")] = False,
) -> None:
    """Show pools, jobs and models on a web page of this machine, until Ctrl-C is pressed.

    The page listens on 127.0.0.1 only, and needs the token in the printed link.
    """
    from shoal.ui.server import serve

    serve(port, opens_browser=not no_browser)


def main() -> None:
    """Run the `shoal` command. This function is the entry point of the console script."""
    output.handle_signals()
    app()
