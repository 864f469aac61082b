"""Clients on another device: what they make is there, the mail and what they keep are here, the bits are the same."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from elsewhere import ELSEWHERE, HERE, WrongDevice, elsewhere
from settings import ROWS, VARIANTS, Row

from fedalloy.core import registry
from fedalloy.core.training import Local
from fedalloy.core.wire import Items, Mail, fingerprint
from fedalloy.data.federation import federate
from fedalloy.engines.inline import Inline
from fedalloy.experiment.run import one_thread
from fedalloy.round.evaluate import evaluate
from fedalloy.round.replica import Replicas
from fedalloy.round.runtime import ClientRuntime
from fedalloy.round.server import Server
from fedalloy.round.vault import Vault

FED = federate("digits", clients=2, skew="pathological:5", seed=0, limit=90)
ROUNDS = 2
SLOW = ("cnn-bn",)  # elsewhere is far away
CASES = [(row, row.models[-1]) for row in (*ROWS, *VARIANTS) if row.models[-1] not in SLOW]


class Guarded(Vault):
    """A vault that takes what is here."""

    def save(self, client: int, round: int, keep: Items) -> None:
        assert all(value.device == HERE for value in keep.values())
        super().save(client, round, keep)


class Overheard(Inline):
    """An engine that looks where replies are."""

    def carry(self, mails: Sequence[Mail]) -> Any:
        for reply in super().carry(mails):
            assert all(value.device == HERE for value in reply.items.values())
            yield reply


def play(method: str, model: str, folder: Path, device: torch.device) -> tuple[str, str | None, list[Any]]:
    """Some rounds with evaluations: weights, private state and metrics."""
    alloy, local, vault = registry.make(method), Local(batch=32, lr=0.1), Guarded(folder)

    def replicas(device: torch.device) -> Replicas:
        return Replicas(alloy, (model,), FED.dataset.inputs, 0, rounds=ROUNDS, device=device)

    server = Server(alloy, replicas(HERE).of(0), FED.info, local, 0)
    engine = Overheard(ClientRuntime(alloy, replicas(device), FED, local, vault, 0))
    metrics = []
    for round in range(1, ROUNDS + 1):
        server.round = round
        outcome = server.receive(FED.eligible, engine.carry([server.send(k) for k in FED.eligible]))
        assert not outcome.refused
        for asker in alloy.asking(last=round == ROUNDS):
            server.hear(asker, FED.eligible, engine.carry(server.ask(asker, FED.eligible)))
        metrics.append(evaluate(server, FED, engine)[0])
    return fingerprint(server.state()), vault.fingerprint(), metrics


@pytest.mark.parametrize(("row", "model"), CASES, ids=lambda value: getattr(value, "method", ""))
def test_clients_work_where_their_site_is(row: Row, model: str, tmp_path: Path) -> None:
    with one_thread():
        here = play(row.method, model, tmp_path / "here", HERE)
        with elsewhere():
            there = play(row.method, model, tmp_path / "there", ELSEWHERE)
    assert there == here
    assert (here[1] is not None) == row.private


def test_augmented_images_and_texts_go_there_as_well() -> None:
    prepare = federate("digits", clients=2, augment="crop:2,flip").prepare
    x = FED.dataset.x[:8]
    draws = [torch.Generator().manual_seed(0) for _ in range(2)]
    here = prepare(x, draws[0])
    with elsewhere():
        there = prepare(x.to(ELSEWHERE), draws[1])
        assert there.device == ELSEWHERE
        assert torch.equal(there.to(HERE), here)


def test_what_a_device_refuses_is_refused() -> None:
    """Else the test above would prove nothing."""
    here = torch.ones(3)
    with elsewhere():
        there = torch.ones(3, device=ELSEWHERE)
        assert (there + 1).device == there[0].device == torch.zeros_like(there).device == ELSEWHERE
        assert (there * torch.tensor(2.0))[torch.tensor([0])].device == ELSEWHERE
        assert there.to(HERE).device == (here + 1).device == HERE
        with pytest.raises(WrongDevice, match="two devices"):
            there + here
        with pytest.raises(WrongDevice, match="two devices"):
            here.mul_(there.sum())
        with pytest.raises(WrongDevice, match="writes here"):
            torch.tensor(0.0).add_(there.sum())
        with pytest.raises(WrongDevice, match="generator"):
            there.clone().normal_(generator=torch.Generator())
        with pytest.raises(WrongDevice, match="array"):
            there.numpy()


def test_a_mechanism_that_forgets_the_device_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClientRuntime, "_here", lambda self, items: items)
    with elsewhere(), pytest.raises(WrongDevice):
        play("scaffold", "mlp(hidden=8)", tmp_path, ELSEWHERE)
