"""Pictures of a partition: everything that is held is shown."""

import pytest
import torch
from rich.console import Console
from rich.table import Table

from fedalloy.data import Dataset, Dirichlet, Pathological, partition
from fedalloy.data.picture import partition_figure, partition_table


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


@pytest.mark.parametrize("clients", [1, 5, 60])
def test_bars(clients: int) -> None:
    data = dataset(4, ("ant", "bee", "cow", "dog"))
    counts = partition(data, clients, Dirichlet(0.5), 0).counts(data)
    figure = partition_figure(counts, data.class_names)
    assert [bar.name for bar in figure.data] == list(data.class_names)
    assert [list(bar.x) for bar in figure.data] == counts.T.tolist()


def test_heat_map() -> None:
    data = dataset(4)
    counts = partition(data, 61, Dirichlet(0.5), 0).counts(data)
    figure = partition_figure(counts)
    assert len(figure.data) == 1
    assert torch.equal(torch.as_tensor(figure.data[0].z), counts.T)
    assert list(figure.data[0].y) == ["0", "1", "2", "3"]
    assert "samples" in figure.to_json()
