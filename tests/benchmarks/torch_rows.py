"""How many rows a second come into a training loop, from shoal's datasets and from what is in memory already."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from tests.benchmarks.datasets import Data
from tests.benchmarks.ddp import BATCH_ROWS

IN_MEMORY = "DataLoader, TensorDataset in memory"
AT_ONCE = "DataLoader, the same, indexed a batch at once"
COLUMNS = "shoal, Parquet, a tensor per column"
STACKED = f"shoal, Parquet, stacked to [{BATCH_ROWS}, columns]"

Epoch = Callable[[tuple[str, bool]], float]
"""From a way, and whether rows are shuffled, to the rows per second of an epoch."""


@contextmanager
def loops(data: Data) -> Iterator[Epoch]:
    """Every way to read a dataset, in one process, with one thread."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

    from shoal.data import DataConnector
    from shoal.data.numpy_columns import to_matrix, to_vector

    pa.set_cpu_count(1)
    torch.set_num_threads(1)
    table = pq.read_table(list(data.files))
    features, label = to_matrix(table, data.features), to_vector(table, data.label, "float32")
    in_memory = TensorDataset(torch.from_numpy(features), torch.from_numpy(label))
    del table
    connector = DataConnector.from_parquet(list(data.files))
    columns = {shuffle: connector.to_torch_dataset(BATCH_ROWS, shuffle) for shuffle in (False, True)}

    def batches(way: str, shuffle: bool) -> Iterable[tuple[torch.Tensor | list[torch.Tensor], torch.Tensor]]:
        if way == IN_MEMORY:
            return DataLoader(in_memory, BATCH_ROWS, shuffle)
        if way == AT_ONCE:
            order = RandomSampler(in_memory) if shuffle else SequentialSampler(in_memory)
            return DataLoader(in_memory, batch_size=None, sampler=BatchSampler(order, BATCH_ROWS, drop_last=False))
        split = (
            ([batch[name] for name in data.features], batch[data.label])
            for batch in DataLoader(columns[shuffle], batch_size=None)
        )
        return split if way == COLUMNS else ((torch.stack(x, dim=1), y) for x, y in split)

    def epoch(asked: tuple[str, bool]) -> float:
        rows = 0
        began = time.perf_counter()
        for _, y in batches(*asked):
            rows += len(y)
        seconds = time.perf_counter() - began
        assert rows == data.rows
        return rows / seconds

    yield epoch
