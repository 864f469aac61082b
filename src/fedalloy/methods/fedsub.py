"""FedSub: local updates and low-dimensional dual variables, both in a shared random subspace.

Zhang, Xu, Yuan. 2025, arXiv 2509.05213; after the authors' public code.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedalloy.alloy import Alloy, Box, Oracle, alloy
from fedalloy.client import Client, Step
from fedalloy.errors import FedAlloyError
from fedalloy.mechanisms.stream import Stream
from fedalloy.mechanisms.subspace import Draw, Subspace
from fedalloy.ranges import AtLeastOne, Positive, Share01
from fedalloy.registry import recipe
from fedalloy.wire import Items


@dataclass(frozen=True)
class Duals(Subspace):
    """W = X + P^T B; B <- B - eta (s P g + Lambda / (eta K)); Lambda <- Lambda + B - mean B once the mean is known.

    When P changes, Lambda is carried over as P_new P_old^T Lambda; what lies outside the new subspace is lost.
    """

    scale: Positive = 1.0  # s
    transport: bool = True

    @property
    def label(self) -> str:
        return "subspace"

    def start(self, client: Client, my: Box) -> None:
        if not client.local.plain_sgd:
            raise FedAlloyError(
                "FedSub's dual step needs plain SGD; use --optimizer sgd --momentum 0 --weight-decay 0"
            )
        my.memo["dual"] = self._renewed(client, my) / (client.lr * _planned(client))

    def gradient(self, step: Step, my: Box, oracle: Oracle) -> Tensor:
        site, round = step.client.site, step.client.round
        g = oracle(step)
        projected = torch.cat([block.projected(g) for block in self.blocks(site, round)])
        return self.decode(site, self.scale * projected + my.memo["dual"], round)

    def finish(self, client: Client, my: Box) -> Items:
        my.keep["B"] = self.encode(client.site, client.weights.flat - client.received, client.round)
        my.keep["round"] = torch.tensor(client.round)
        return {}

    def _renewed(self, client: Client, my: Box) -> Tensor:
        """Lambda in this round's coordinates."""
        if "B" not in my.keep:
            my.keep["dual"] = torch.zeros(self.coded_size(client.site), dtype=client.weights.flat.dtype)
            return my.keep["dual"]
        then = int(my.keep["round"])
        updates = client.boxes["share"].got["updates"].view(-1, self.coded_size(client.site))
        if len(updates):  # the first one that was missed is the mean of the client's own last round
            my.keep["dual"] += my.keep["B"] - updates[0]
        if self.transport:
            moved = self.decode(client.site, my.keep["dual"], then)
            now = self.blocks(client.site, client.round)
            my.keep["dual"] = torch.cat([block.projected(moved) for block in now])
        return my.keep["dual"]


def _planned(client: Client) -> int:
    """K, the number of local steps to come."""
    if client.local.steps is not None:
        return client.local.steps
    return client.local.epochs * math.ceil(client.data.samples / client.local.batch)


@recipe("FedSub", family="communication", paper="Zhang, Xu, Yuan, 2025, arXiv 2509.05213")
def fedsub(
    ratio: Share01 = 0.2,
    projector: Draw = "gaussian",
    scale: Positive = 1.0,
    refresh: AtLeastOne = 1,
    transport: bool = True,
    scope: Literal["tensor", "global"] = "tensor",
    min_rows: AtLeastOne = 4,
) -> Alloy:
    duals = Duals(ratio, refresh, scope, "left", min_rows, projector, scale, transport)
    return alloy("FedSub", Stream(agg_weights="uniform"), duals)
