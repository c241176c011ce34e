"""Deal the rows of a dataset to the workers of a boosting training, using only the row counts from the Parquet footers.

Each worker must get a fair sample of the dataset, even if the dataset is sorted by time, label or group: some results,
such as the leaves of quantile objectives and the metric auc, are means of the workers' own results. If each worker gets
:data:`FAIR_GROUPS` row groups or more, whole row groups are dealt, and no row group is read twice. Otherwise, workers
form teams. Whole row groups are dealt to the teams, and all workers of a team read each row group of the team and keep
their share of its rows, in short runs; see :class:`shoal.data.planning.row_groups.Deal`.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from shoal.data.planning.row_groups import Deal, RowGroup, RowRange, Shard, checked, is_even, shuffled

FAIR_GROUPS = 8
"""Number of row groups per worker from which whole row groups are a fair sample of a dataset.

With eight row groups that are spread over a table in time order, the means of the workers differ by at most one eighth
of the table's trend.
"""

# A worker of a team reads the row groups of the whole team. These numbers limit the size of teams, and so the extra
# reads: a team has four workers, or as many as it needs to get four row groups. If the number of workers is not a
# multiple of this size, the other workers join the teams, which then are less than twice as large.
_TEAM_WORKERS = 4
_TEAM_GROUPS = 4


def deal_rows(row_groups: Sequence[RowGroup], num_workers: int, seed: int) -> tuple[Shard, ...]:
    """Deal the rows of all row groups to workers, so that each worker gets a fair sample and nearly as many rows.

    As with :func:`shoal.data.planning.contiguous.plan_shards`, the plan depends only on the rows of the row groups, the
    order of their paths, the number of workers and the seed.

    Returns:
        One shard per worker, by rank, with at most one row range per row group. Every row is in exactly one shard, and
        no shard is empty. The sizes differ by at most one row, or each size is within 1 % of the mean. If the row
        groups have equal sizes, a worker reads at most eight row groups, or less than eight times its share of the row
        groups, whichever is more.

    Raises:
        InvalidArgumentError: If `num_workers` is less than 1 or a row group is listed twice.
        DataError: If there are fewer rows than workers.
    """
    groups = checked(row_groups, num_workers)
    teams = _teams(len(groups), num_workers)
    dealt = _deal_whole(groups, [len(team) for team in teams], seed)
    if not is_even([load for mine, team in zip(dealt, teams, strict=True) for load in _loads(mine, team)]):
        _even_out(dealt, _capacities(sum(group.rows for group in groups), teams))
    parts: list[list[RowRange]] = [[] for _ in range(num_workers)]
    loads = [0] * num_workers
    for i, group in enumerate(groups):
        counts = [0] * num_workers
        for mine, team in zip(dealt, teams, strict=True):
            each, extra = divmod(mine.get(i, 0), len(team))
            for place, rank in enumerate(sorted(team, key=lambda rank: loads[rank])):
                counts[rank] = each + (place < extra)
        readers = [rank for rank in range(num_workers) if counts[rank]]
        shares = tuple(counts[rank] for rank in readers)
        for place, rank in enumerate(readers):
            deal = Deal(shares, place, f"{seed}/{i}") if len(readers) > 1 else None
            parts[rank].append(RowRange(group.path, group.index, 0, group.rows, deal))
            loads[rank] += counts[rank]
    return tuple(Shard(tuple(mine)) for mine in parts)


def _teams(num_groups: int, num_workers: int) -> list[range]:
    """Divide the ranks into teams of nearly equal size."""
    for_fair_sample = -(-FAIR_GROUPS * num_workers // num_groups)
    limit = max(_TEAM_WORKERS, -(-_TEAM_GROUPS * num_workers // num_groups))
    number = max(1, num_workers // min(for_fair_sample, limit))
    bounds = [num_workers * i // number for i in range(number + 1)]
    return [range(bounds[i], bounds[i + 1]) for i in range(number)]


def _deal_whole(groups: Sequence[RowGroup], sizes: Sequence[int], seed: int) -> list[dict[int, int]]:
    """Deal whole row groups to teams, and return for each team a dict: index of the row group -> number of its rows.

    Of each N successive row groups, each of N teams gets one, if the row groups have equal sizes. Which one depends on
    the seed, so that a period in the data, such as a week, has no effect. Otherwise each row group goes to the team
    that has the fewest rows per worker so far.
    """
    place = {group: i for i, group in enumerate(shuffled(range(len(groups)), seed))}
    dealt: list[dict[int, int]] = [{} for _ in sizes]
    heap = [(0.0, team) for team in range(len(sizes))]
    for start in range(0, len(groups), len(sizes)):
        block = range(start, min(start + len(sizes), len(groups)))
        for group in sorted(block, key=place.__getitem__):
            load, team = heap[0]
            dealt[team][group] = groups[group].rows
            heapq.heapreplace(heap, (load + groups[group].rows / sizes[team], team))
    return dealt


def _loads(mine: Mapping[int, int], team: range) -> list[int]:
    """Return the number of rows of each worker of a team that divides its rows evenly."""
    each, extra = divmod(sum(mine.values()), len(team))
    return [each + (place < extra) for place in range(len(team))]


def _capacities(total: int, teams: Sequence[range]) -> list[int]:
    """Return the number of rows that each team should get, so that the shards of all workers differ by at most one
    row."""
    share, extra = divmod(total, sum(map(len, teams)))
    return [len(team) * share + sum(rank < extra for rank in team) for team in teams]


def _even_out(dealt: Sequence[dict[int, int]], capacities: Sequence[int]) -> None:
    """Move rows from teams that have too many to teams that have too few. At most N - 1 row groups are then divided
    between N teams."""
    room = [capacity - sum(mine.values()) for mine, capacity in zip(dealt, capacities, strict=True)]
    short = [team for team, rows in enumerate(room) if rows > 0]
    for team, mine in enumerate(dealt):
        # The largest row groups come first, so that as few row groups as possible are divided.
        for group in sorted(mine, key=lambda group: -mine[group]):
            while room[team] < 0 and mine[group]:
                other = short[-1]
                moved = min(-room[team], room[other], mine[group])
                mine[group] -= moved
                dealt[other][group] = dealt[other].get(group, 0) + moved
                room[team] += moved
                room[other] -= moved
                if not room[other]:
                    short.pop()
