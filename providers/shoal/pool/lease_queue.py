"""Decide in which order waiting leases are granted, and how many nodes the leases of a pool take together.

All functions are pure: they do no I/O and read no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shoal.pool.snapshot import Snapshot
from shoal.state.schema import Lease, PoolState


def leased(snapshot: Snapshot) -> int:
    """Return how many nodes the granted leases take."""
    return taken_by(_granted(snapshot))


def taken_by(leases: Iterable[Lease]) -> int:
    """Return how many nodes the given leases take together: the size of the largest shared lease (shared leases use the
    same nodes) plus the sizes of all exclusive leases."""
    return _nodes_taken(_sizes(leases))


def kept_for(leases: Iterable[Lease], least: int, is_own: Callable[[Lease], bool]) -> int | None:
    """Return how many nodes a job can count on when the leases of others end.

    Args:
        leases: All leases of the pool.
        least: Number of nodes that the pool has without a lease: MIN_NODES or the base demand.
        is_own: Function that says whether a lease lasts at least as long as the job.

    Returns:
        Number of nodes; None if the job has no granted lease, or no other has one: the job may then use all nodes.
    """
    granted = [lease for lease in leases if not lease.waiting]
    own = [lease for lease in granted if is_own(lease)]
    return None if len(own) in (0, len(granted)) else max(least, taken_by(own))


def queue(snapshot: Snapshot) -> list[Lease]:
    """Return the leases that wait for nodes, in the order in which they will be granted.

    A lease inside the block of a granted lease comes first. Otherwise it could wait behind a lease that waits for the
    nodes of this block, and neither would ever be granted.
    """
    granted = {lease.holder for lease in _granted(snapshot)}

    def place(lease: Lease) -> tuple[bool, int]:
        is_inside = any(is_near and holder in granted for holder, is_near in (lease.ancestors or {}).items())
        return not is_inside, lease.queue_number

    return sorted((lease for lease in snapshot.leases if lease.waiting), key=place)


def grantable(snapshot: Snapshot) -> list[Lease]:
    """Return the waiting leases that can be granted now, because they fit into MAX_NODES together with the granted
    leases.

    The first lease that does not fit holds back all leases behind it. Otherwise small leases could overtake a large one
    again and again, and the large one would never be granted. A lease that would exceed the quota of its team holds
    back only the leases of this team.
    """
    if snapshot.pool.state is not PoolState.UP:
        return []
    granted = _granted(snapshot)
    fitting: list[Lease] = []
    held_back: set[str | None] = set()
    for lease in queue(snapshot):
        if lease.team in held_back or _exceeds_quota(snapshot, [*granted, lease], lease.team):
            held_back.add(lease.team)
            continue
        granted.append(lease)
        if taken_by(granted) > snapshot.pool.max_nodes:
            break
        fitting.append(lease)
    return fitting


def quota_of(snapshot: Snapshot, team: str | None) -> int | None:
    """Return the largest number of nodes that the leases of a team may take together; None if there is no limit."""
    limits = (snapshot.pool.quotas or {}).get(team or "")
    return limits["max_nodes"] if limits else None


def quota_note(snapshot: Snapshot, lease: Lease) -> str | None:
    """Return a text that says that a lease waits because of its team's quota; None if the quota does not hold the lease
    back."""
    granted = _granted(snapshot)
    if not lease.waiting or not _exceeds_quota(snapshot, [*granted, lease], lease.team):
        return None
    taken = _nodes_taken(_sizes(granted, lease.team))
    return f'waiting for the quota of team "{lease.team}", {taken} of {quota_of(snapshot, lease.team)} nodes are taken'


def _exceeds_quota(snapshot: Snapshot, leases: Iterable[Lease], team: str | None) -> bool:
    most = quota_of(snapshot, team)
    return most is not None and _nodes_taken(_sizes(leases, team)) > most


def may_resize(snapshot: Snapshot, lease: Lease, size: int) -> bool:
    """Return whether the size of a granted lease may be changed to `size` now.

    The change is allowed if, after the change, all leases together take no more nodes than before. It is also allowed
    if all leases fit into MAX_NODES and no lease waits. A larger size must also fit into the quota of the lease's team.
    """
    rest = [one for one in _granted(snapshot) if one.id != lease.id]
    resized = (size, lease.exclusive)
    quota = quota_of(snapshot, lease.team)
    if size > lease.size and quota is not None and _nodes_taken([*_sizes(rest, lease.team), resized]) > quota:
        return False
    total = _nodes_taken([*_sizes(rest), resized])
    return total <= leased(snapshot) or (total <= snapshot.pool.max_nodes and not queue(snapshot))


def nodes_for(snapshot: Snapshot, lease: Lease, nodes: int) -> int:
    """Return how many of a pool's nodes a lease may use. `nodes` is the number of nodes in the pool.

    The nodes that belong to earlier leases are subtracted. A waiting lease may use no node.
    """
    return 0 if lease.waiting else max(0, nodes - nodes_before(snapshot, lease))


def nodes_before(snapshot: Snapshot, lease: Lease) -> int:
    """Return how many nodes a lease cannot use, because leases that were requested earlier take them.

    A shared lease loses only the nodes of earlier exclusive leases. An exclusive lease loses the nodes of all earlier
    leases.
    """
    earlier = [one for one in _granted(snapshot) if one.queue_number < lease.queue_number]
    return taken_by(one for one in earlier if one.exclusive or lease.exclusive)


def queue_note(ahead: int, taken: int, max_nodes: int) -> str:
    """Return a text about a waiting lease's place in the queue."""
    place = f"for {ahead} lease{'s' * (ahead > 1)} ahead" if ahead else "as the next in the queue"
    return f"waiting {place}, {taken} of {max_nodes} nodes are taken"


def _granted(snapshot: Snapshot) -> list[Lease]:
    return [lease for lease in snapshot.leases if not lease.waiting]


def _sizes(leases: Iterable[Lease], team: str | None = None) -> list[tuple[int, bool]]:
    """Return, for each lease, its size and whether it is exclusive. If `team` is given, return only this team's
    leases."""
    return [(lease.size, lease.exclusive) for lease in leases if team is None or lease.team == team]


def _nodes_taken(sizes: Iterable[tuple[int, bool]]) -> int:
    shared, exclusive = 0, 0
    for size, is_exclusive in sizes:
        if is_exclusive:
            exclusive += size
        else:
            shared = max(shared, size)
    return shared + exclusive
