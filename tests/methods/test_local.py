"""Local: nothing is exchanged, every client goes its own way."""

from pathlib import Path

import pytest
import torch
from laboratory import BATCHNORM, MLP, Lab, dealt, digits, far, run

from fedalloy.core.wire import Items
from fedalloy.experiment.folder import RunFolder
from fedalloy.methods import local


def private(folder: Path, clients: int = 6) -> list[Items]:
    """Every client's own state at the end of a run."""
    return [RunFolder(folder / "run").vault.load(k, before=10**6) for k in range(clients)]


def test_no_byte_is_exchanged(tmp_path: Path) -> None:
    """Check: both byte counters stay 0 over a whole run. There is no global accuracy: absent, not 0."""
    result = run(tmp_path, digits(), "local", BATCHNORM, rounds=2)
    assert (result.summary["bytes_up"], result.summary["bytes_down"]) == (0, 0)
    for line in result.history:
        assert sum(line["bytes_up"].values()) == sum(line["bytes_down"].values()) == 0
        assert not any(name.startswith("global") for name in line["metrics"])
    assert result.summary["metric"] == "personal_local_acc"


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_a_client_does_not_notice_the_others(model: str) -> None:
    """Check: client k's weights after T rounds are the same bits whether the other clients exist or not."""
    together, alone = (Lab(local(), digits(), model, lr=0.1, momentum=0.9) for _ in range(2))
    for _ in range(3):
        together.round()
        alone.round([4])
    for name in ("own.weights", "own.buffers"):
        assert torch.equal(together.keeps[4][name], alone.keeps[4][name])


def test_a_federation_of_one() -> None:
    """Check: the same in a federation that consists of this client only."""
    first = digits().split.train(0).tolist()
    together, alone = Lab(local(), digits(), lr=0.1), Lab(local(), dealt([first]), lr=0.1)
    for _ in range(3):
        together.round()
        alone.round()
    assert torch.equal(together.keeps[0]["own.weights"], alone.keeps[0]["own.weights"])


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_every_client_carries_on_where_it_stopped(model: str) -> None:
    lab = Lab(local(), digits(), model, lr=0.1)
    lab.round()
    stopped = {name: value.clone() for name, value in lab.keeps[3].items()}
    client = lab.trained(3)
    assert torch.equal(client.received, stopped["own.weights"])
    assert torch.equal(client.received_buffers, stopped["own.buffers"])
    assert far(client.weights.flat, client.received) > 0


def test_all_start_from_the_same_weights() -> None:
    lab = Lab(local(), digits(), lr=0.1)
    first, second = lab.trained(0).received, lab.trained(1).received
    assert torch.equal(first, second)
    assert torch.equal(first, lab.replica.initial)


def test_everyone_trains_whatever_the_participation(tmp_path: Path) -> None:
    result = run(tmp_path, digits(), "local", rounds=2, participation=0.2)
    assert [line["participants"] for line in result.history] == [list(range(6))] * 2


def test_with_participation_only_the_sampled_client_changes(tmp_path: Path) -> None:
    """Check: participation_applies and one client per round: exactly that client's weights change."""
    method, rounds = "local(participation_applies=True)", 4
    states, drawn = [], []
    for last in range(1, rounds + 1):
        result = run(tmp_path / str(last), digits(), method, rounds=last, participation=0.2)
        states.append(private(tmp_path / str(last)))
        drawn.append(result.history[-1]["participants"])
    assert all(len(clients) == 1 for clients in drawn)
    assert len({clients[0] for clients in drawn}) > 1
    for before, after, (sampled,) in zip(states, states[1:], drawn[1:], strict=False):
        for client in range(6):
            same = before[client].keys() == after[client].keys() and all(
                torch.equal(before[client][name], after[client][name]) for name in before[client]
            )
            assert same == (client != sampled)


def test_both_averages_coincide_for_equal_test_splits(tmp_path: Path) -> None:
    """Check: C.Avg and D.Avg coincide when all test splits have equal size; they differ otherwise."""
    train = [range(60), range(60, 90), range(90, 300)]
    equal, unequal = (
        [range(1000, 1050), range(1050, 1100), range(1100, 1150)],
        [range(1000, 1150), range(1150, 1160), range(1160, 1170)],
    )
    both = []
    for name, test in (("equal", equal), ("unequal", unequal)):
        result = run(tmp_path / name, dealt(train, test), "local", rounds=1, epochs=3)
        metrics = result.history[-1]["metrics"]
        both.append((metrics["personal_local_acc"], metrics["personal_local_acc_clients"]))
    assert both[0][0] == pytest.approx(both[0][1], abs=1e-12)
    assert abs(both[1][0] - both[1][1]) > 1e-3


def test_own_data_are_easier_than_everyones_under_skew(tmp_path: Path) -> None:
    """Check, behaviour: far better on the own split than on the global set under skew; alike with IID data."""
    gaps = {}
    for skew in ("dirichlet:0.1", "iid"):
        result = run(
            tmp_path / skew, digits(6, skew), "local", "mlp", rounds=3, epochs=3, lr=0.1, eval_every=3
        )
        metrics = result.history[-1]["metrics"]
        gaps[skew] = metrics["personal_local_acc_clients"] - metrics["personal_on_global_acc"]
    assert gaps["dirichlet:0.1"] > 0.3
    assert abs(gaps["iid"]) < 0.05


def test_clients_with_one_class_count_in_the_mean(tmp_path: Path) -> None:
    """Pitfall: a client that holds one class knows one class: about 1/C on the global set, not dropped."""
    federation = digits(10, "pathological:1")
    result = run(tmp_path, federation, "local", rounds=3, epochs=2, lr=0.1, eval_every=3)
    metrics = result.history[-1]["metrics"]
    assert metrics["personal_on_global_acc"] == pytest.approx(0.1, abs=0.02)
    assert metrics["personal_local_acc_clients"] == 1


def test_architectures_may_differ(tmp_path: Path) -> None:
    run(tmp_path, digits(), "local", models="mlp(hidden=8),mlp(hidden=16, norm=batch)", rounds=1)
    kept = private(tmp_path)
    assert [state["own.weights"].numel() for state in kept] == [610, 1242] * 3
    assert [state["own.buffers"].numel() for state in kept] == [0, 32] * 3
