"""Who holds what, as a table for the terminal."""

from collections.abc import Sequence

import torch
from rich.table import Table
from torch import Tensor

from fedalloy.data.dataset import Dataset
from fedalloy.data.partition import Split

TABLE_CLIENTS = 50  # more are summarised
SHOWN_CLIENTS = 20  # of those summarised, these are listed too
TABLE_CLASSES = 20  # more classes are counted, not listed

_QUANTILES = {"least": 0.0, "lower quarter": 0.25, "middle": 0.5, "upper quarter": 0.75, "most": 1.0}


def partition_table(dataset: Dataset, split: Split) -> Table:
    """Samples, test samples and classes per client; quantiles and the first clients where there are many."""
    counts = split.counts(dataset)
    columns = ["samples", "test", "classes"]
    rows = torch.stack([counts.sum(1), split.test_offsets.diff(), (counts > 0).sum(1)], dim=1)
    if dataset.classes <= TABLE_CLASSES:
        columns += _names(dataset.class_names, dataset.classes)
        rows = torch.cat([rows, counts], dim=1)
    table = Table(title=f"{dataset.name}: {split.clients} clients", caption=_caption(dataset, split))
    table.add_column("client")
    for name in columns:
        table.add_column(name, justify="right")
    many = split.clients > TABLE_CLIENTS
    if many:
        for name, quantile in _QUANTILES.items():
            values = rows.double().quantile(quantile, dim=0, interpolation="nearest")
            table.add_row(name, *_cells(values.long()), end_section=name == "most")
    for client, row in enumerate(rows[: SHOWN_CLIENTS if many else None]):
        table.add_row(str(client), *_cells(row))
    if many:
        table.add_row("…")
    return table


def _names(class_names: Sequence[str], classes: int) -> list[str]:
    return list(class_names) or [str(number) for number in range(classes)]


def _cells(row: Tensor) -> list[str]:
    return [str(value) if value else "·" for value in row.tolist()]


def _caption(dataset: Dataset, split: Split) -> str:
    empty = int((split.train_offsets.diff() == 0).sum())
    loose = int((split.owner_of_test < 0).sum())
    notes = [f"{len(split.train_index)} training samples, {len(split.global_test)} in the global test set"]
    if empty:
        notes.append(f"{empty} clients hold no training sample")
    if loose:
        notes.append(f"{loose} global test samples are no client's")
    return "; ".join(notes)
