"""The client runtime answers messages: it finds data, replica and private state of a client and does what is asked.

One runtime stands in every process that works for clients; engines bring messages to it and take replies back.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedalloy.core.alloy import Alloy
from fedalloy.core.random import CPU
from fedalloy.core.training import Local
from fedalloy.core.views import EVAL_BATCH
from fedalloy.core.wire import Items, Mail, Reply
from fedalloy.data.federation import Federation
from fedalloy.round.client import client_model, client_round, client_told
from fedalloy.round.replica import Replicas
from fedalloy.round.vault import Vault

CHUNK = 4 * EVAL_BATCH  # samples scored in one errand


def state_before(mail: Mail) -> int | None:
    """An errand starts from the client's newest private state before this round; None where it does not look at it."""
    return {"train": mail.round, "evaluate": mail.round + 1}.get(mail.errand)


@contextmanager
def tiny_is_zero() -> Iterator[None]:
    """In this thread numbers below 1e-38 count as zero.

    A client of a single class is soon so sure of it that many of its gradients are that small, and a CPU is slow with
    such numbers: it would train at half its pace.
    """
    before = (torch.tensor(1e-40) * 1.0).item() == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


@dataclass
class ClientRuntime:
    """All that is needed to act for any client of a federation.

    Clients work on the device of their replicas; messages come from the CPU, replies and private state go back there.
    """

    method: Alloy
    replicas: Replicas
    federation: Federation
    local: Local
    vault: Vault
    seed: int
    on_global: bool = True  # personal models are also tried on the global test set
    secret: int = 0  # what clients draw their noise from; in a simulation nothing is secret

    def __post_init__(self) -> None:
        self.federation = self.federation.on(self.replicas.device)

    def handle(self, mail: Mail) -> Reply:
        """Do what the mail says."""
        errands = {
            "train": self._train,
            "evaluate": self._evaluate,
            "score": self._score,
            "tell": self._tell,
        }
        with tiny_is_zero():
            reply = errands[mail.errand](replace(mail, items=self._here(mail.items)))
            return replace(reply, items=_away(reply.items))

    def _train(self, mail: Mail) -> Reply:
        """One round of training; the client's private state goes back to the vault before the reply leaves."""
        replica, data = self.replicas.of(mail.client), self.federation.client(mail.client)
        keep = self._state(mail)
        info = self.federation.info
        reply, kept = client_round(
            self.method, replica, data, info, self.local, keep, mail, self.seed, self.secret
        )
        self.vault.save(mail.client, mail.round, _away(kept))
        return reply

    def _evaluate(self, mail: Mail) -> Reply:
        """The client's own model on its own test split, by class, and on the global test set."""
        began = time.perf_counter()
        replica, data = self.replicas.of(mail.client), self.federation.client(mail.client)
        keep = self._state(mail)
        scores = client_model(
            self.method, replica, data, self.federation.info, self.local, keep, mail, self.seed
        )
        right = scores(data.x_test).argmax(1) == data.y_test
        items = {
            "right": torch.bincount(data.y_test[right], minlength=data.classes),
            "count": torch.bincount(data.y_test, minlength=data.classes),
        }
        if self.on_global:
            index = self.federation.split.global_test
            y = self.federation.dataset.y[index]
            items["global"] = (scores(self.federation.dataset.x[index]).argmax(1) == y).sum()
        return Reply(mail.round, mail.client, items, seconds=time.perf_counter() - began)

    def _tell(self, mail: Mail) -> Reply:
        """What a client says of the new global model; its private state is not touched."""
        return client_told(
            self.method, self.replicas.of(mail.client), self.federation.client(mail.client), mail
        )

    @torch.inference_mode()
    def _score(self, mail: Mail) -> Reply:
        """A model on one chunk of the scored samples: predictions and losses."""
        began = time.perf_counter()
        name = next(iter(mail.items)).partition(".")[0]
        net = self.replicas.of(0).showing(name, mail.items[f"{name}.weights"], mail.items[f"{name}.buffers"])
        index = self.federation.scored[mail.client * CHUNK : (mail.client + 1) * CHUNK]
        predictions: list[Tensor] = []
        losses: list[Tensor] = []
        for batch in torch.split(index, EVAL_BATCH):
            x = self.federation.prepare(self.federation.dataset.x[batch], None)
            logits = net(x).logits
            predictions.append(logits.argmax(1))
            losses.append(F.cross_entropy(logits, self.federation.dataset.y[batch], reduction="none"))
        items = {"predictions": torch.cat(predictions), "losses": torch.cat(losses)}
        return Reply(mail.round, mail.client, items, seconds=time.perf_counter() - began)

    def _state(self, mail: Mail) -> Items:
        before = state_before(mail)
        assert before is not None
        return self._here(self.vault.load(mail.client, before))

    def _here(self, items: Items) -> Items:
        return {key: value.to(self.replicas.device) for key, value in items.items()}


def _away(items: Items) -> Items:
    return {key: value.to(CPU) for key, value in items.items()}
