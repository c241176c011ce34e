"""What users of Airflow may do on shoal's page, by Airflow's permissions, and the request that trains a run again.

Airflow serves the applications of plugins to everybody. So each request is checked here. If the check itself fails, the
request is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable
from functools import cache
from typing import Any
from urllib.parse import quote, urlsplit

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.base_auth_manager import BaseAuthManager
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.api_fastapi.auth.managers.models.resource_details import AccessView, DagAccessEntity, DagDetails
from airflow.api_fastapi.core_api.security import bearer_scheme, get_user
from airflow.configuration import conf
from airflow.models.dag import DagModel
from anyio import from_thread
from fastapi import HTTPException, Request

from shoal.airflow.deployment import deployment_in_database, has_teams, store_of
from shoal.airflow.train_again import instances_text, request_body
from shoal.errors import InvalidArgumentError
from shoal.pool.holder import ALL_TEAMS, DagRunHolder
from shoal.ui.access import Viewer
from shoal.ui.app import EngineRequest

log = logging.getLogger(__name__)


class AirflowAccess:
    """Permissions of Airflow's users on shoal's page.

    To see the page, a user needs the permission to see Airflow's list of plugins, from which Airflow builds its menu.
    Airflow's separate permission for custom views is not used, because the simple auth manager gives it to every
    viewer. Jobs of a DAG of this Airflow are shown to users who may read the logs of its tasks.

    To see the page of a team, at ``teams/TEAM/``, a user must also be a member of the team. It shows the team's store.

    To change pools, a user needs the permission to edit connections, because a connection contains the options of a
    pool. To end the jobs and leases of a DAG run of this Airflow, a user needs the permission to edit runs of the DAG;
    for all other jobs and leases, the permission to edit connections. If Airflow has several teams, a user can change
    the pool of a team, and end other jobs and leases of a team, only as its member.
    """

    def viewer(self, request: Request) -> Viewer:
        """Return the user who is logged in to Airflow.

        Raises:
            HTTPException: No user is logged in (401). The user may not see the page, or the permissions cannot be
                checked (403).
        """
        try:
            user = from_thread.run(_user, request)
            manager = get_auth_manager()
            may_see = manager.is_authorized_view(access_view=AccessView.PLUGINS, user=user)
            may_act = manager.is_authorized_connection(method="PUT", user=user)
            asked = request.path_params.get("team")
            team = asked if asked and asked in _teams_of(manager, user) else None
            name, token = user.get_name() or user.get_id(), _csrf_token(user.get_id())
        except HTTPException as error:
            if error.status_code == 401:
                raise HTTPException(401, "log in to Airflow, and open this page again") from None
            raise
        except Exception:
            log.exception("the permissions of a request cannot be checked")
            why = "your permissions cannot be checked: see the log of Airflow's API server"
            raise HTTPException(403, why) from None
        if may_see is not True:
            raise HTTPException(
                403, "you may not see this page: ask your administrator for the permission to see Airflow's plugins"
            )
        return Viewer(
            name,
            may_act=may_act is True,
            csrf_token=token,
            may_end_some=lambda: (
                may_act is True
                or manager.is_authorized_dag(method="PUT", access_entity=DagAccessEntity.RUN, user=user) is True
                or bool(manager.get_authorized_dag_ids(user=user, method="PUT"))
            ),
            may_end=lambda holder, team: _may_end(
                manager, user, holder, otherwise=may_act is True and (team is None or _is_in_team(manager, user, team))
            ),
            may_read=_reader(manager, user),
            may_act_for=lambda team: _is_in_team(manager, user, team),
            team=ALL_TEAMS,
            page_team=team,
            store=store_of(team),
            teams_to_see=lambda: [name for name in _teams_of(manager, user) if store_of(name)],
        )


def _is_in_team(manager: BaseAuthManager[Any], user: BaseUser, team: str) -> bool:
    """Return whether a user may act for a team. An Airflow without teams does not ask."""
    if not has_teams():
        return True
    from airflow.api_fastapi.auth.managers.models.resource_details import TeamDetails

    # With the method GET, Airflow asks whether a user belongs to a team.
    return manager.is_authorized_team(method="GET", details=TeamDetails(name=team), user=user) is True


def _teams_of(manager: BaseAuthManager[Any], user: BaseUser) -> list[str]:
    """Return the names of a user's teams. Without teams, Airflow cannot say who may see which store."""
    if not has_teams():
        return []
    from airflow.models.team import Team

    return [name for name in sorted(Team.get_all_team_names()) if _is_in_team(manager, user, name)]


def _may_end(manager: BaseAuthManager[Any], user: BaseUser, holder: str, *, otherwise: bool) -> bool:
    """Return whether a user may end the jobs and leases of a holder.

    Args:
        manager: Airflow's auth manager.
        user: The user.
        holder: The holder.
        otherwise: The answer for a holder that is no DAG run of this Airflow.
    """
    if (run := _own_run(holder)) is None:
        return otherwise
    details = DagDetails(id=run.dag_id, team_name=DagModel.get_team_name(run.dag_id))
    return (
        manager.is_authorized_dag(method="PUT", access_entity=DagAccessEntity.RUN, details=details, user=user) is True
    )


def _reader(manager: BaseAuthManager[Any], user: BaseUser) -> Callable[[str], bool]:
    """Return a function that returns whether a user may see the jobs of a holder: those of a DAG of this Airflow only
    if the user may read the logs of its tasks."""
    deployment = cache(deployment_in_database)

    @cache
    def may_read_dag(dag_id: str) -> bool:
        details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id))
        logs = DagAccessEntity.TASK_LOGS
        return manager.is_authorized_dag(method="GET", access_entity=logs, details=details, user=user) is True

    def may_read(holder: str) -> bool:
        run = DagRunHolder.of(holder)
        return run is None or run.deployment not in (None, deployment()) or may_read_dag(run.dag_id)

    return may_read


def _own_run(holder: str) -> DagRunHolder | None:
    """Return the DAG run of this Airflow that a holder is; None for any other holder."""
    run = DagRunHolder.of(holder)
    return run if run is not None and run.deployment in (None, deployment_in_database()) else None


async def _user(request: Request) -> BaseUser:
    # All of Airflow's own routes have the dependency `get_user`. `get_user` reads the header or the cookie, and refuses
    # revoked tokens. `AuthManagerDep` would fail here, because it reads `app.state`, and a mounted application has a
    # state of its own.
    return await get_user(request, None, await bearer_scheme(request))


def _csrf_token(user_id: str) -> str:
    """Return the user's CSRF token.

    The token is bound to the user and not to the cookie: auth managers replace the cookie while a page is open, and
    with `simple_auth_manager_all_admins` there is no cookie.
    """
    key = conf.get_mandatory_value("api", "secret_key").encode()
    return hmac.new(key, f"shoal csrf {user_id}".encode(), hashlib.sha256).hexdigest()


def train_again(holder: str) -> EngineRequest:
    """Return the request that clears the failed task instances of a DAG run, and what they need.

    Raises:
        InvalidArgumentError: The holder is no run of this Airflow, or none of the run's tasks has failed.
    """
    if (run := _own_run(holder)) is None:
        raise InvalidArgumentError(f"{holder} is no run of this Airflow: use the page of its own Airflow")
    body = request_body(run.dag_id, run.run_id)
    base = urlsplit(conf.get("api", "base_url", fallback="") or "").path.rstrip("/")
    return EngineRequest(
        f"{base}/api/v2/dags/{quote(run.dag_id, safe='')}/clearTaskInstances",
        body,
        f"Airflow clears {instances_text(body['task_ids'])} of run {run.run_id}. Trainings that have succeeded keep "
        "their results.",
    )
