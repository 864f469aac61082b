"""FedAvg: sampled clients run local SGD from the server's model, the server averages the results.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas. AISTATS 2017.
"""

from typing import Literal

from fedalloy.core.alloy import Alloy, alloy
from fedalloy.core.parameters import Positive
from fedalloy.core.registry import recipe
from fedalloy.mechanisms.share import Share


@recipe("FedAvg", family="classic", paper="McMahan et al., AISTATS 2017")
def fedavg(
    agg_weights: Literal["size", "uniform"] = "size",
    buffers: Literal["average", "local", "drop"] = "average",
    server_lr: Positive = 1.0,
) -> Alloy:
    return alloy("FedAvg", Share(agg_weights=agg_weights, buffers=buffers, server_lr=server_lr))
