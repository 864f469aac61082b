"""SSF (Subspace SCAFFOLD): SCAFFOLD in a fresh random subspace each round, control variates kept full-dimensional.

Zhu, Huang, Xu, Li. 2026, arXiv 2604.25467.
"""

from typing import Literal

from fedalloy.core.alloy import Alloy, alloy
from fedalloy.core.parameters import AtLeastOne, Positive, Share01
from fedalloy.core.registry import recipe
from fedalloy.mechanisms.stream import Stream
from fedalloy.mechanisms.subspace import Side, Subspace
from fedalloy.methods.scaffold import Control


@recipe("SSF", family="communication", paper="Zhu, Huang, Xu, Li, 2026, arXiv 2604.25467")
def ssf(
    ratio: Share01 = 0.2,
    server_lr: Positive = 1.0,
    refresh: AtLeastOne = 1,
    scope: Literal["tensor", "whole"] = "tensor",
    side: Side = "left",
    min_rows: AtLeastOne = 4,
    agg_weights: Literal["size", "uniform"] = "uniform",
) -> Alloy:
    # Steps follow P^T P (g + c - c_i); c_i += P^T (p_i+ - p_i) is the projected change that also goes to the server:
    # the part of c_i outside the active subspace is untouched (residual backfill).
    stream = Stream(agg_weights=agg_weights, server_lr=server_lr)
    control = Control(agg_weights=agg_weights)
    return alloy("SSF", stream, control, Subspace(ratio, refresh, scope, side, min_rows))
