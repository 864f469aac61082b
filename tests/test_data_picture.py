"""Pictures of a partition: everything that is held is shown."""

import torch
from rich.console import Console
from rich.table import Table

from fedalloy.cli.picture import partition_table
from fedalloy.data import Dataset, Dirichlet, Pathological, partition


def dataset(classes: int, names: tuple[str, ...] = ()) -> Dataset:
    y = torch.arange(1200) % classes
    return Dataset("toy", torch.zeros(1200, 1), y, 1000, "vector", classes, names)


def printed(table: Table) -> str:
    console = Console(width=400)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_few_clients_are_all_listed() -> None:
    data = dataset(4, ("ant", "bee", "test", "samples"))
    split = partition(data, 5, Pathological(2), 0)
    table = partition_table(data, split)
    assert table.row_count == 5
    assert [column.header for column in table.columns] == [
        *("client", "samples", "test", "classes"),
        *data.class_names,
    ]
    cells = [list(column.cells) for column in table.columns]
    assert cells[1] == [str(size) for size in split.train_offsets.diff().tolist()]
    assert cells[3] == ["2"] * 5
    assert "1000 training samples, 200 in the global test set" in str(table.caption)


def test_many_clients_are_summarised() -> None:
    data = dataset(4)
    table = partition_table(data, partition(data, 200, Dirichlet(0.01), 0))
    assert table.row_count == 5 + 20 + 1
    assert "middle" in printed(table)
    assert "clients hold no training sample" in str(table.caption)


def test_many_classes_are_counted_only() -> None:
    data = dataset(100)
    table = partition_table(data, partition(data, 5, Pathological(3), 0))
    assert len(table.columns) == 4
    assert "global test samples are no client's" in str(table.caption)
