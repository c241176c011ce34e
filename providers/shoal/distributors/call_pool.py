"""Find the pool on which a call runs, and start an embedded pool if the call cannot use another pool."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256

from shoal.errors import JobError, NoPoolError, PoolNotFoundError
from shoal.jobs.journal import attempts
from shoal.jobs.scheduling import fewest_nodes
from shoal.jobs.spec import AnyJobSpec
from shoal.os_processes import ProcessId
from shoal.pool.api import ComputePool
from shoal.pool.backends.local.backend import inherited_environment, require_linux
from shoal.pool.backends.local.gpus import ALL, Gpu, gpu_turn, look, may_be_contended
from shoal.pool.holder import job_holder
from shoal.pool.options.base import is_pool_name
from shoal.pool.selection import defined_pool, which_pool
from shoal.pool.spec import PoolSpec, pool_name_of
from shoal.pool.status import NodeStatus
from shoal.pool.timeouts import IDLE_TIMEOUT, JOB_LEASE_TTL
from shoal.pool.waiting import end_if_abandoned
from shoal.state import Store
from shoal.state.home import default_url, home
from shoal.state.schema import JOB_ENDED, PoolState
from shoal.training.cluster import Node
from shoal.training.demand import GangDemand

_DIGEST_LENGTH = 8
"""Number of hexadecimal digits of the hash that shortens a long pool name. A pool name has at most 40 characters."""


@contextmanager
def pool_for(
    name: str | None,
    embedded: Callable[[str], AbstractContextManager[str]],
    *,
    size_on: Callable[[PoolSpec, Sequence[Node]], int],
    leases_named: bool = False,
    job_id: str | None = None,
) -> Iterator[str]:
    """Yield the name of the pool that a call uses: the pool that the user has named, else the only pool that is up.
    If there is no such pool, start an embedded pool with `embedded`, whose argument says why.

    A pool that the user has named by its URI is leased for the call, which creates it and brings it up if necessary.

    Args:
        name: Name or URI of the pool.
        embedded: Function that starts an embedded pool.
        size_on: Function of a pool's settings and its active nodes that returns how many nodes are leased.
        leases_named: Whether nodes of a pool without a URI are leased, too.
        job_id: Id of the job with which the lease ends; None: the lease ends with the call.

    Raises:
        PoolNotFoundError: No pool has this name.
        InvalidArgumentError: The URI is wrong.
        CapacityTimeoutError: Other embedded pools did not release the GPUs in time.
    """
    defined, selected, why = defined_pool(name), None, ""
    try:
        selected = defined.name if defined else which_pool(Store(), name, only_up=True)
    except NoPoolError as error:
        why = str(error)
    if selected is None:
        with embedded(why) as started:
            yield started
        return
    if defined is None and not leases_named:
        yield selected
        return
    pool = ComputePool(defined or selected, holder=job_holder(job_id) if job_id else None)
    status = None
    try:
        status = pool.describe()
    except PoolNotFoundError:
        if defined is None:
            raise
    settings = defined
    if status is not None and (settings is None or status.state == PoolState.UP.value):
        settings = PoolSpec.parse(status.uri)  # those of a pool that is up stay, whatever the URI says
    assert settings is not None
    active = status.active if status else ()
    size = size_on(settings, [Node(name=each.name, cpus=each.cpus, gpus=each.gpus) for each in active])
    if job_id is None:
        with pool.lease(size, bring_up=True):
            yield selected
        return
    # If another call has submitted the same job before, the job has a lease. Do not make this lease smaller.
    held = [lease.size for lease in (status.leases if status else ()) if lease.holder == pool.holder]
    with _leased_for_job(pool, max([size, *held]), job_id):
        yield selected


def pool_for_job(
    spec: AnyJobSpec, job_id: str | None = None, *, may_call_ray: bool | None = None
) -> AbstractContextManager[str]:
    """Yield the name of the pool that a job uses (see `pool_for`). No nodes are leased for the job, unless the pool is
    named by its URI.

    Args:
        spec: Spec of the job.
        job_id: Id of the job that an embedded pool ends with; None: the pool ends with this process.
        may_call_ray: Whether the job's function may call Ray itself. None: as the kind of the spec says.
    """
    if may_call_ray is None:
        may_call_ray = spec.may_call_ray
    demand = spec.demand()

    def embedded(why: str) -> AbstractContextManager[str]:
        gpus, least_gpus, timeout_s = gpus_of(demand), least_gpus_of(demand), spec.run_config.timeout
        # A pool without Ray has no GPUs.
        ray = may_call_ray or demand.needs_ray or (gpus != 0 and may_be_contended(os.environ))
        libraries = "torch" if spec.framework == "pytorch" and not ray else None
        return embedded_pool(
            gpus=gpus, least_gpus=least_gpus, ray=ray, libraries=libraries, job_id=job_id, timeout_s=timeout_s, why=why
        )

    return pool_for(
        spec.run_config.pool_name, embedded, size_on=lambda pool, _: fewest_nodes(demand, pool), job_id=job_id
    )


def gpus_of(demand: GangDemand) -> int:
    """Return the number of GPUs that an embedded pool needs for a job: `ALL` if the job's workers may use GPUs, else
    0."""
    # On a machine without GPUs, the reason is not asked for, because this may import the library of the training.
    if demand.gang.gpus < 0 and may_be_contended(os.environ) and demand.why_cpu():
        return 0
    return ALL if demand.gang.gpus or demand.counts_gpus else 0


def least_gpus_of(demand: GangDemand) -> int:
    """Return the smallest number of GPUs that an embedded pool must have to run a job that uses GPUs."""
    gang = demand.gang
    is_fixed = gang.workers > 0 and gang.gpus > 0 and not demand.run_config.clamp
    return gang.workers * gang.gpus if is_fixed else 1


@contextmanager
def embedded_pool(
    *,
    cpus: int = 0,
    gpus: int = ALL,
    least_gpus: int = 1,
    ray: bool = True,
    libraries: str | None = None,
    job_id: str | None = None,
    timeout_s: float | None = None,
    why: str = "",
) -> Iterator[str]:
    """Yield the name of an embedded pool: a one-node pool that belongs to this process or to a job.

    A pool that belongs to this process stays up for the next calls of the process (see `pool_of_process`). If other
    embedded pools have claimed the GPUs that a new pool needs, first wait until the other pools have released these
    GPUs.

    Raises:
        InvalidArgumentError: This machine has fewer GPUs than `gpus`, or no /proc.
        CapacityTimeoutError: Other embedded pools did not release the GPUs in time.
    """
    require_linux()
    own = len(os.sched_getaffinity(0))
    gpus = gpus if ray else 0
    reason = f"{why}. This call uses an embedded pool\n" if why else ""
    few = f" (it offers {cpus} CPUs, as requested, but this process has only {own})" if cpus > own else ""
    spec = PoolSpec(
        name=f"embedded-{os.getpid()}" if job_id is None else pool_of_job(job_id),
        max_nodes=1,
        cpus_per_node=max(own, cpus),
        gpus_per_node=gpus,
        ray=ray,
        libraries=libraries,
    )
    if job_id is None:

        def start(spec: PoolSpec, is_new: bool) -> tuple[ComputePool, bool]:
            with gpu_turn(spec, timeout_s, _say, least_gpus) as found:
                if is_new:
                    # The kernel may have given this process the id of an earlier one, whose pool had the same name.
                    end_if_abandoned(Store(), spec.name)
                    _say(f"{reason}starting a pool that is embedded in this process and ends with it, {spec.uri}{few}")
                pool = ComputePool(spec)
                pool.up(owner=ProcessId.mine())
            nodes = _active_nodes(pool)
            _warn_without_gpus(nodes, found)
            return pool, bool(found) or any(node.gpus for node in nodes)

        with pool_of_process(spec, start) as name:
            yield name
        return
    _end_pool_of_earlier_attempt(spec, job_id)
    with ExitStack() as turn:
        found = turn.enter_context(gpu_turn(spec, timeout_s, _say, least_gpus))
        ends = "which goes down when the job has ended, even if this process ends earlier"
        _say(f"{reason}job {job_id} runs on a pool of its own, {spec.uri}{few}, {ends}")
        pool = ComputePool(spec, holder=job_holder(job_id))
        with _leased_for_job(pool, 1, job_id, owner=ProcessId.mine()):
            turn.close()
            _warn_without_gpus(_active_nodes(pool), found)
            yield pool.name


def pool_of_job(job_id: str) -> str:
    """Return the name of the embedded pool of a job. Two jobs never get the same name.

    If the job's id contains characters that a pool's name cannot have, or is too long, the name ends with a hash of the
    id.
    """
    name = f"embedded-{job_id}"
    if is_pool_name(name):
        return name
    digest = sha256(job_id.encode()).hexdigest()[:_DIGEST_LENGTH]
    return f"{pool_name_of(name)[: 39 - _DIGEST_LENGTH].rstrip('-')}-{digest}"


def _end_pool_of_earlier_attempt(spec: PoolSpec, job_id: str) -> None:
    """Take down the embedded pool of a job's earlier attempt if the new attempt needs a pool with other settings.

    The old pool would end by itself soon after the earlier attempt. But the new pool has the same name, so the new pool
    cannot start while the old pool is up.
    """
    pool = ComputePool(spec)
    with suppress(PoolNotFoundError):
        status = pool.describe()
        is_reusable = status.state != PoolState.UP.value or PoolSpec.parse(status.uri) == spec
        # If the earlier attempt has not ended, the pool is kept, because the new submission attaches to this attempt or
        # is rejected.
        if not is_reusable and not _is_unfinished(job_id):
            pool.down()


def _active_nodes(pool: ComputePool) -> Sequence[NodeStatus]:
    """Return the active nodes of an embedded pool; none if the pool is down, or was deleted."""
    with suppress(PoolNotFoundError):
        return pool.describe().active
    return ()


def _warn_without_gpus(nodes: Sequence[NodeStatus], found: Sequence[Gpu]) -> None:
    """Print a warning if an embedded pool has no GPU although this machine has GPUs."""
    if not found or any(node.gpus for node in nodes):
        return
    claimants = ", ".join(sorted({claimant.pool for claimant in look(found)[1]}))
    _say(
        f"WARNING: this call has no GPU, and runs on the CPUs: all GPUs of this machine are claimed ({claimants}). To "
        "use them, name the pool that has claimed them with pool_name=, or take it down"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _leased_for_job(pool: ComputePool, size: int, job_id: str, owner: ProcessId | None = None) -> Iterator[None]:
    """Lease nodes for a job that the ``with`` block submits. The lease lasts until the job ends, even if this process
    ends earlier.

    If the block raises and the job does not run, the lease is released at once. If this process is killed in the block,
    the lease expires a minute later.
    """
    lease = pool.lease(size, ttl=JOB_LEASE_TTL, bring_up=True, owner=owner)
    try:
        with lease.renewed():
            yield
    except BaseException:
        # The job may be running although the block failed: another call may have submitted the same job before. In this
        # case the nodes stay leased until the job ends.
        if _is_unfinished(job_id):
            lease.leave_to_job()
        else:
            lease.release()
        raise
    lease.leave_to_job()


def _is_unfinished(job_id: str) -> bool:
    try:
        return attempts.latest(Store(), job_id).state not in JOB_ENDED
    except JobError:
        return False


_Key = tuple[object, ...]

Start = Callable[[PoolSpec, bool], tuple[ComputePool, bool]]
"""Type of a function that starts a pool, or does nothing if the pool is up. The function's arguments are the definition
of the pool, and whether this process starts the pool for the first time. The function returns the pool, and whether
this machine has GPUs that the pool has claimed or could claim."""

_numbers = itertools.count(1)


@dataclass
class _Kept:
    """An embedded pool of this process.

    Attributes:
        spec: Definition of the pool.
        calls: Number of calls that use the pool now.
        pool: The pool; None before it was started.
        up_at: When the pool was last brought up, from `time.monotonic`. A pool that is up is used from then on.
        may_have_gpus: Whether this machine has GPUs that the pool has claimed or could claim.
        turn: Lock that a call holds while it starts or ends the pool.
    """

    spec: PoolSpec
    calls: int = 0
    pool: ComputePool | None = None
    up_at: float = 0.0
    may_have_gpus: bool = True
    turn: threading.Lock = field(default_factory=threading.Lock)


_kept: dict[_Key, _Kept] = {}
_lock = threading.Lock()


def _forget_parents_pools() -> None:
    """Forget the parent's pools in a forked child, because these pools belong to the parent and end with the parent."""
    global _lock
    _lock = threading.Lock()
    _kept.clear()


os.register_at_fork(after_in_child=_forget_parents_pools)


@contextmanager
def pool_of_process(wanted: PoolSpec, start: Start) -> Iterator[str]:
    """Yield the name of an embedded pool of this process. If the process has no pool of the requested size, start one,
    whose name begins with that of `wanted`.

    Concurrent calls share a pool, and the pool's queue decides which of their jobs run at the same time. After its last
    call, a pool stays up for the next call until it has been idle for `IDLE_TIMEOUT`, or this process has ended. But
    on a machine with GPUs, a pool that has requested GPUs goes down at once, so that other processes can use the GPUs.

    Raises:
        Exception: The pool could not be started.
    """
    kept, idle = _take(wanted)
    try:
        for each in idle:
            _end(each)
        with kept.turn:
            now = time.monotonic()
            if kept.pool is None or now - kept.up_at > IDLE_TIMEOUT / 2 or not _active_nodes(kept.pool):
                kept.pool, kept.may_have_gpus = start(kept.spec, kept.pool is None)
                kept.up_at = now
        yield kept.pool.name
    finally:
        with kept.turn:
            with _lock:
                kept.calls -= 1
                is_last = not kept.calls
            if is_last and kept.spec.gpus_per_node and kept.may_have_gpus:
                _end(kept)


def _take(wanted: PoolSpec) -> tuple[_Kept, list[_Kept]]:
    """Choose the embedded pool for a call, and count the call as a user of this pool. Return the pool, and the idle
    pools that have to be ended before the chosen pool is used."""
    # The processes of a pool inherit the environment of the process that starts the pool. So a pool is not used again
    # after an inherited environment variable has changed.
    place = (str(home()), default_url())
    environment = tuple(sorted(inherited_environment().items()))
    with _lock:
        gpus, size = wanted.gpus_per_node, (*place, environment, wanted.cpus_per_node)
        key, with_ray, with_all = (*size, gpus, wanted.ray), (*size, gpus, True), _kept.get((*size, ALL, True))
        may_use_all = gpus == 0 and with_all is not None and not with_all.may_have_gpus
        kept = with_all if may_use_all else _kept.get(with_ray) or _kept.get(key)
        if kept is None:
            named = {"name": f"{wanted.name}-{next(_numbers)}", "idle_timeout": IDLE_TIMEOUT}
            kept = _kept[key] = _Kept(wanted.model_copy(update=named))
        kept.calls += 1
        # End idle pools of other sizes, because they occupy memory and GPUs that the chosen pool may need.
        idle = {other: each for other, each in _kept.items() if not each.calls and other[:2] == place}
        for other in idle:
            del _kept[other]
    return kept, list(idle.values())


def _end(kept: _Kept) -> None:
    # A user may have deleted the pool with `shoal pool delete`.
    with suppress(PoolNotFoundError):
        if kept.pool is not None:
            kept.pool.down()
