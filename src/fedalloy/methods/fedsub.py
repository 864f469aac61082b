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
from fedalloy.core.state import Box
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

    def init_server(self, server: ServerView, my: Box) -> None:
        if not server.local.plain_sgd:
            raise FedAlloyError(
                "FedSub's dual step needs plain SGD; use --optimizer sgd --momentum 0 --weight-decay 0"
            )

    def before_training(self, client: ClientView, my: Box) -> None:
        my.keep["dual"] = self._renewed(client, my)
        my.memo["push"] = my.keep["dual"] / (client.lr * _planned(client))

    def gradient(self, step: StepView, my: Box, oracle: Oracle) -> Tensor:
        site, round = step.client.site, step.client.round
        g = oracle(step)
        projected = torch.cat([self._scaled(block, g) for block in self.blocks(site, round)])
        return self.decode(site, projected + my.memo["push"], round)

    def after_upload(self, client: ClientView, my: Box, items: Items) -> None:
        moved = items["share.weights"] - client.received
        my.keep["B"] = self.encode(client.site, moved, client.round)
        my.keep["round"] = torch.tensor(client.round)

    def _scaled(self, block: Block, g: Tensor) -> Tensor:
        return block.projected(g) * self.scale if block.cut.rank else block.projected(g)

    def _renewed(self, client: ClientView, my: Box) -> Tensor:
        """Lambda in this round's coordinates."""
        site, cuts = client.site, self.cuts(client.site)
        if "B" not in my.keep:
            return client.weights.flat.new_zeros(self.coded_size(site))
        dual, then, got = my.keep["dual"], int(my.keep["round"]), client.boxes["share"].got
        # The first missed update is the mean of the client's own last round, unless its reply was refused then or it
        # stayed away so long that the dense weights came instead: the dual waits.
        if len(got["updates"]) and int(got["since"]) == then:
            moved = my.keep["B"] - got["updates"][: len(dual)]
            dual = dual + moved * torch.cat(
                [dual.new_full((cut.coded_size,), float(cut.rank > 0)) for cut in cuts]
            )
        if self.transport and self.epoch(then) != self.epoch(client.round):
            full = self.decode(site, dual, then)
            dual = torch.cat([block.projected(full) for block in self.blocks(site, client.round)])
        return dual


def _planned(client: ClientView) -> int:
    """K, the number of local steps to come."""
    if client.local.steps is not None:
        return client.local.steps
    whole, rest = divmod(client.data.samples, client.local.batch)
    single = rest == 1 and client.site.has_batchnorm  # a batch that is left out
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
