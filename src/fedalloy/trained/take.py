"""Models taken out of a run folder: its config, its preprocessing and its checkpoint are all that is needed."""

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedalloy.core import registry
from fedalloy.core.alloy import Alloy
from fedalloy.core.imports import Imports
from fedalloy.core.net import Net
from fedalloy.core.version import VERSION
from fedalloy.core.views import ClientData, Info
from fedalloy.data.batches import Prepare
from fedalloy.data.federation import federate
from fedalloy.data.preprocessing import Preprocessing
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.config import Config
from fedalloy.experiment.folder import RunFolder
from fedalloy.mechanisms.class_means import prototypes
from fedalloy.round.client import Client, personal_client
from fedalloy.round.replica import Replicas
from fedalloy.round.server import Server
from fedalloy.trained.card import Card, Head, Which
from fedalloy.trained.model import Model


class Nearest(nn.Module):
    """Scores by the distance to each class's prototype; a class without one is never chosen."""

    means: Tensor
    seen: Tensor

    def __init__(self, means: Tensor, seen: Tensor) -> None:
        super().__init__()
        self.register_buffer("means", means.clone())
        self.register_buffer("seen", seen.float())

    def forward(self, features: Tensor) -> Tensor:
        scores = -torch.cdist(features, self.means, compute_mode="donot_use_mm_for_euclid_dist")
        return scores.masked_fill(self.seen == 0, -torch.inf)


@dataclass(frozen=True)
class Opened:
    """A run as its last checkpoint left it, without its data."""

    folder: RunFolder
    config: Config
    preprocessing: Preprocessing
    replicas: Replicas
    server: Server

    @classmethod
    def of(cls, path: str | Path, imports: Imports | None = None) -> "Opened":
        """The run in a folder; code outside of FedAlloy only for who may import it."""
        folder = RunFolder.existing(Path(path))
        config = folder.config
        method = registry.make(config.method, imports)
        round, state = folder.checkpoint()
        if not round:
            raise FedAlloyError(f"{path} has no checkpoint yet; carry on with 'fedalloy run --resume {path}'")
        agreed = folder.preprocessing() or _from_data(config, Path(path))
        replicas = Replicas(
            method,
            config.architectures,
            agreed.inputs,
            config.seed,
            config.precision,
            config.rounds,
            imports=imports,
        )
        server = Server(method, replicas.of(0), Info(config.clients, 1), config.local, config.seed)
        server.resume(state, round)
        return cls(folder, config, agreed, replicas, server)

    def model(self) -> Model:
        """The model that is evaluated as the global one."""
        shown = self.server.shown()
        which: Which = "global" if "global" in shown else "aux"
        if which not in shown:
            raise FedAlloyError(
                f"{self.server.method.title} has no global model: every client has its own; "
                "take one with --client, or result.personal(client)"
            )
        net = copy.deepcopy(self.server.replica.showing(which, *shown[which]))
        name = self.config.architectures[0]
        return carded(
            net, self.config, self.server.method, self.server.round, self.preprocessing, name, which
        )

    def personal(self, client: int) -> Model:
        """The model of one client, as it is evaluated."""
        if not 0 <= client < self.config.clients:
            raise FedAlloyError(f"client {client}: there are clients 0 to {self.config.clients - 1}")
        method, replica = self.server.method, self.replicas.of(client)
        if not method.personal:
            raise FedAlloyError(
                f"{method.title} has no personal models; take the global one, without --client"
            )
        if (self.folder.path / "run-id").exists():  # a real federation: its clients' state is theirs
            raise FedAlloyError(
                f"client {client}'s own model is at its site: type 'fedalloy export site-{client} ...' there"
            )
        known = self.folder.vault.load(client, self.server.round + 1)
        data, info = self._data(client), self.server.info
        mail = self.server.send(client, "evaluate")
        asked = personal_client(method, replica, data, info, self.config.local, known, mail, self.config.seed)
        net, head = as_used(asked)
        round, how = self.server.round, self.preprocessing
        return carded(net, self.config, method, round, how, replica.model, "personal", client, head)

    def _data(self, client: int) -> ClientData:
        """What the client holds, where its model is adapted to it before it is used; else nothing."""
        if self.server.method.with_hook("adapt"):
            federation = federate(**self.config.dealing)
            self.folder.checkpoint(federation.dataset.fingerprint)
            return federation.client(client)
        nothing = torch.empty(0, *self.preprocessing.shape), torch.empty(0, dtype=torch.int64)
        return ClientData(*nothing, *nothing, self.preprocessing.classes, Prepare.of(self.preprocessing))


def carded(
    net: Net,
    config: Config,
    method: Alloy,
    round: int,
    how: Preprocessing,
    name: str,
    which: Which,
    client: int | None = None,
    head: Head = "own",
) -> Model:
    """A net with all that is to be known of it; one that is not finite is refused."""
    if not all(bool(torch.isfinite(one).all()) for one in (*net.parameters(), *net.buffers())):
        raise FedAlloyError(f"the model after round {round} is not finite: its training diverged")
    models, expression = config.architectures, method.expression
    told = (expression, config.data, name, models, config.seed, config.rounds, round, which, client, head)
    return Model(net, Card(*told, how, VERSION))


def as_used(client: Client) -> tuple[Net, Head]:
    """A client's net as it answers, and by what."""
    net = copy.deepcopy(client.net.eval())
    if hasattr(net, "aux"):
        del net.aux  # what clients share beside their own models
    if client.method.claimant("predict"):
        means, seen = prototypes(client)
        if bool(seen.any()):
            net.neck, net.head = nn.Identity(), Nearest(means, seen)
            return net, "prototypes"
    return net, "own"


def _from_data(config: Config, path: Path) -> Preprocessing:
    """Of a run that did not keep its preprocessing."""
    try:
        return federate(**config.dealing).dataset.preprocessing
    except FedAlloyError as error:
        raise FedAlloyError(
            f"{path} holds no preprocessing.json, so its data are needed once: {error}"
        ) from None
