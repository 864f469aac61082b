"""FedSub: local updates and low-dimensional dual variables, both in a shared random subspace.

Zhang, Xu, Yuan. 2025, arXiv 2509.05213; after the authors' public code.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedalloy.core.alloy import Alloy, Names, alloy
from fedalloy.core.parameters import AtLeastOne, Positive, Share01
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import ClientView, Oracle, ServerView, StepView
from fedalloy.core.wire import Items
from fedalloy.errors import FedAlloyError
from fedalloy.mechanisms.stream import Stream
from fedalloy.mechanisms.subspace import Block, Draw, Side, Subspace


@dataclass(frozen=True)
class Duals(Subspace):
    """W = X + P^T B; B <- B - eta (s P g + Lambda / (eta K)); Lambda <- Lambda + B - mean B once the mean is known.

    When P changes, Lambda is carried over as P_new P_old^T Lambda; what lies outside the new subspace is lost.
    Tensors that travel whole have no dual: they are averaged as in FedAvg.
    """

    scale: Positive = 1.0  # s
    transport: bool = True

    @property
    def label(self) -> str:
        return "subspace"

    @property
    def needs(self) -> Names:
        return super().needs | {"mean updates"}

    def init_server(self, server: ServerView, my: State) -> None:
        if not server.local.plain_sgd:
            raise FedAlloyError(
                "FedSub's dual step needs plain SGD; use --optimizer sgd --momentum 0 --weight-decay 0"
            )

    def before_training(self, client: ClientView, my: State) -> None:
        my.persistent["dual"] = self._renewed(client, my)
        my.scratch["push"] = my.persistent["dual"] / (client.lr * _planned(client))

    def gradient(self, step: StepView, my: State, oracle: Oracle) -> Tensor:
        replica, round = step.client.replica, step.client.round
        g = oracle(step)
        projected = torch.cat([self._scaled(block, g) for block in self.blocks(replica, round)])
        return self.decode(replica, projected + my.scratch["push"], round)

    def after_upload(self, client: ClientView, my: State, items: Items) -> None:
        moved = items["share.weights"] - client.received
        my.persistent["B"] = self.encode(client.replica, moved, client.round)
        my.persistent["round"] = torch.tensor(client.round)

    def _scaled(self, block: Block, g: Tensor) -> Tensor:
        return block.projected(g) * self.scale if block.cut.rank else block.projected(g)

    def _renewed(self, client: ClientView, my: State) -> Tensor:
        """Lambda in this round's coordinates."""
        replica, cuts = client.replica, self.cuts(client.replica)
        if "B" not in my.persistent:
            return client.weights.flat.new_zeros(self.coded_size(replica))
        dual, then, got = my.persistent["dual"], int(my.persistent["round"]), client.states["share"].received
        # The first missed update is the mean of the client's own last round, unless its reply was refused then or it
        # stayed away so long that the dense weights came instead: the dual waits.
        if len(got["updates"]) and int(got["since"]) == then:
            moved = my.persistent["B"] - got["updates"][: len(dual)]
            dual = dual + moved * torch.cat(
                [dual.new_full((cut.coded_size,), float(cut.rank > 0)) for cut in cuts]
            )
        if self.transport and self.epoch(then) != self.epoch(client.round):
            full = self.decode(replica, dual, then)
            dual = torch.cat([block.projected(full) for block in self.blocks(replica, client.round)])
        return dual


def _planned(client: ClientView) -> int:
    """K, the number of local steps to come."""
    if client.local.steps is not None:
        return client.local.steps
    whole, rest = divmod(client.data.samples, client.local.batch)
    single = rest == 1 and client.replica.has_batchnorm  # a batch that is left out
    return max(1, client.local.epochs * (whole + (rest > 0) - single))


@recipe("FedSub", family="communication", paper="Zhang, Xu, Yuan, 2025, arXiv 2509.05213")
def fedsub(
    ratio: Share01 = 0.2,
    projector: Draw = "gaussian",
    scale: Positive = 1.0,
    refresh: AtLeastOne = 1,
    transport: bool = True,
    scope: Literal["tensor", "whole"] = "tensor",
    side: Side = "input",
    min_rows: AtLeastOne = 4,
) -> Alloy:
    duals = Duals(ratio, refresh, scope, side, min_rows, projector, scale, transport)
    return alloy("FedSub", Stream(agg_weights="uniform"), duals)
