"""The `shoal` command: subcommands, error messages and exit codes.

Modules that take long to import are imported only by the commands that need them, so that `shoal --help` stays fast.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shoal import __version__
from shoal.cli import doctor, ending, history, init, jobs, many, models, pools, ui
from shoal.cli.ending import EPILOG, ExitCode, InterruptedCommandError, exit_code
from shoal.cli.output import Json, print_error, print_json, show
from shoal.errors import ShoalError

# Base class of typer's usage errors. Older releases of typer import this class from click, and newer releases contain
# their own copy. So the class is found by its name among the base classes of `typer.BadParameter`.
_UsageError: type[BaseException] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


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
            sys.exit(code or ExitCode.DONE)
        except (ShoalError, InterruptedCommandError) as error:
            print_error(error, as_json=as_json)
            sys.exit(exit_code(error))
        except _UsageError as error:
            _say_usage(error, as_json)
            sys.exit(ExitCode.WRONG_ARGUMENT)
        except KeyboardInterrupt:  # a second Ctrl-C came while the message about the first Ctrl-C was printed
            sys.exit(ExitCode.INTERRUPTED)
        # Any other exception is a bug in shoal. The exception is raised again, because the user needs the traceback for
        # a bug report.
        except Exception as error:
            if as_json:
                print_error(error, as_json=True)
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
            raise InterruptedCommandError("interrupted") from None


def _say_usage(error: BaseException, as_json: bool) -> None:
    message = str(getattr(error, "format_message", error.__str__)()).strip()
    context = getattr(error, "ctx", None)
    if not message:  # the command had no arguments, so typer has already printed the help
        return
    if context is not None:
        error.add_note(f"see `{context.command_path} --help`")
    print_error(error, as_json=as_json, message=message, code=ExitCode.WRONG_ARGUMENT)


app = typer.Typer(
    cls=_ShoalGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EPILOG,
)


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
    as_json: Json = False,
) -> None:
    """Train XGBoost, LightGBM and PyTorch models on elastic compute pools."""
    if version and as_json:
        print_json({"version": __version__})
    elif version:
        show(f"shoal {__version__}")
    elif ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
    elif as_json:
        raise typer.BadParameter("--json must follow a command, for example `shoal pool list --json`")
    if version:
        raise typer.Exit


app.add_typer(pools.app, name="pool")
app.command()(jobs.train)
app.command()(jobs.tune)
app.add_typer(jobs.app, name="jobs")
app.add_typer(many.app, name="many")
app.add_typer(models.app, name="models")
app.command()(pools.sweep)
app.command()(history.history)
app.command()(doctor.doctor)
app.command()(init.init)
app.command()(ui.ui)


def main() -> None:
    """Run the `shoal` command. This function is the entry point of the console script."""
    ending.install()
    app()
