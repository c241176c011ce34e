"""Define the commands `shoal models …`, which list and show the registered models that jobs have trained, promote
versions that wait for a decision, and delete old versions."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import RenderableType

from shoal import models
from shoal.cli.output import ExitCode, Json, Limit, fields, print_json, say, show, show_list, show_result, table, when
from shoal.option_validation import duration

app = typer.Typer(
    no_args_is_help=True, help="List and show registered models, promote waiting versions, and delete old versions."
)

_DAY_S = 24 * 3600
_WAITS = "waits for a decision"

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the registered model.")]
TrackingUri = Annotated[
    str | None,
    typer.Option(
        metavar="URI", help="MLflow server or database. Default: $MLFLOW_TRACKING_URI, or the database in $SHOAL_HOME."
    ),
]


@app.command("list")
def list_(tracking_uri: TrackingUri = None, as_json: Json = False) -> None:
    """List the models that jobs have registered, with their champions and newest challengers."""

    found = models.list_models(tracking_uri)
    rows = [
        (
            model.name,
            model.champion and model.champion.version,
            model.champion and model.champion.metric,
            model.champion and model.champion.value,
            _age(model.champion_since),
            model.registered,
            f"{model.challenger.version}, {when(model.challenger.created_at)}",
            _outcome(model.challenger),
        )
        for model in found
    ]
    columns = ("MODEL", "CHAMPION", "METRIC", "VALUE", "AGE", "REGISTERED", "LAST CHALLENGER", "OUTCOME")
    empty = "no models: jobs register them with the option register of their spec"
    show_list({"models": found}, columns, rows, empty, as_json=as_json)


@app.command("show")
def show_(name: Name, tracking_uri: TrackingUri = None, as_json: Json = False) -> None:
    """Show a model: its champion, the champion's metric per slice, and the last ten challengers."""

    details = models.describe_model(name, tracking_uri)
    status, champion = details.status, details.status.champion
    others = {alias: version for alias, version in status.aliases.items() if alias != status.alias}
    facts = [
        ("model", status.name),
        (status.alias, "none" if champion is None else f"version {champion.version}"),
        ("since", when(status.champion_since)),
        ("age", _age(status.champion_since)),
        *((champion.metrics if champion else {}).items()),
        ("decided by", champion and champion.metric),
        *((f"data {fact}", value) for fact, value in (champion.data if champion else {}).items()),
        ("job", champion and champion.job_id),
        ("MLflow run", champion and champion.mlflow_run_id),
        ("other aliases", ", ".join(f"{alias}: version {version}" for alias, version in others.items())),
        ("versions", f"{details.versions} of {status.registered} registered"),
    ]
    parts: list[RenderableType] = [fields(facts)]
    if details.slices:
        rows = [(each.name, each.rows, each.value) for each in details.slices]
        parts += ["", table(("SLICE", "ROWS", (champion and champion.metric) or "VALUE"), rows)]
    challengers = [
        (each.version, when(each.created_at), each.value, _outcome(each), each.decision) for each in details.challengers
    ]
    parts += ["", table(("VERSION", "REGISTERED", "VALUE", "OUTCOME", "DECISION"), challengers)]
    show_result(details, *parts, as_json=as_json)


@app.command()
def history(name: Name, limit: Limit = 100, tracking_uri: TrackingUri = None, as_json: Json = False) -> None:
    """List a model's versions with their metric, the newest first. The list includes deleted versions that were
    promoted."""

    found = models.model_history(name, limit=limit, tracking_uri=tracking_uri)
    rows = [
        (
            entry.version,
            when(entry.at),
            entry.metric,
            entry.value,
            entry.holdout_digest and entry.holdout_digest[:8],
            _promotion_text(entry),
            entry.job_id,
        )
        for entry in found
    ]
    columns = ("VERSION", "REGISTERED", "METRIC", "VALUE", "HOLDOUT", "OUTCOME", "JOB")
    show_list({"model": name, "versions": found}, columns, rows, "no versions", as_json=as_json)


@app.command()
def promote(
    name: Name,
    version: Annotated[int, typer.Argument(min=1, metavar="VERSION", help="Number of the version.")],
    tracking_uri: TrackingUri = None,
    as_json: Json = False,
) -> None:
    """Promote a version that waits for a decision, if it is better than the champion. Jobs with register.promote=false
    register such versions. If the version is not promoted, the exit code is 1."""
    from shoal.pool.holder import cli_holder

    # With --json, stdout has only the result.
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        result = models.promote_model(
            name, version, tracking_uri=tracking_uri, holder=cli_holder(), on_log=say if as_json else show
        )
    if as_json:
        print_json(result)
    if not result.promoted:
        raise typer.Exit(ExitCode.FAILED)


@app.command()
def prune(
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Age from which versions are deleted: hours, days or weeks, such as 12w.")
    ] = "90d",
    keep_last: Annotated[
        int, typer.Option(min=0, metavar="N", help="Number of newest versions of each model that are kept.")
    ] = 10,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing. Print what would be deleted.")] = False,
    tracking_uri: TrackingUri = None,
    as_json: Json = False,
) -> None:
    """Delete old model versions that have no alias. Versions that shoal has not registered are never deleted."""

    done = models.prune_models(
        older_than=duration(older_than), keep_last=keep_last, tracking_uri=tracking_uri, dry_run=dry_run
    )
    if as_json:
        print_json({"dry_run": dry_run, **asdict(done)})
    else:
        if done.deleted:
            rows = [(each.model, each.version, when(each.created_at)) for each in done.deleted]
            show(table(("MODEL", "VERSION", "REGISTERED"), rows))
        show(f"{len(done.deleted)} versions {'would be deleted' if dry_run else 'deleted'}, {done.kept} kept")
        for sentence in done.failed:
            say(sentence)
    if done.failed:
        raise typer.Exit(ExitCode.FAILED)


def _age(since: float | None) -> str | None:
    """Return the time that has passed since a given time as text, such as `12 d` or `5 h`."""
    if since is None:
        return None
    seconds = max(0.0, time.time() - since)
    for unit, length in (("d", _DAY_S), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _outcome(version: models.VersionStatus) -> str | None:
    if version.promoted is None:
        return _WAITS if version.reason == "waiting" else None
    what = "promoted" if version.promoted else "not promoted"
    return f"{what}: {version.reason.replace('_', ' ')}" if version.reason else what


def _promotion_text(entry: models.HistoryEntry) -> str | None:
    if entry.promoted is None:
        return _WAITS if entry.reason == "waiting" else None
    if not entry.promoted:
        return "not promoted"
    before = f" instead of {entry.previous}" if entry.previous else ""
    at = f" {when(entry.promoted_at)}" if entry.promoted_at else ""
    return f"promoted{at}{before}" + ("" if entry.exists else ", deleted")
