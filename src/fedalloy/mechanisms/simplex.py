"""The minimum of a quadratic form over the simplex: the convex combination that some error likes best."""

import torch
import torch.nn.functional as F
from torch import Tensor

RIDGE = 1e-11  # of the largest entry: among minima that are equally good the evenest
GAP = 1e-14


def simplex_minimum(P: Tensor) -> Tensor:
    """The a >= 0 with sum 1 that minimises a^T P a, for P positive semi-definite up to rounding, in float64.

    Wolfe's active-set method: add the coordinate with the smallest slope, take the minimum over the coordinates that
    are not zero without regard to signs, walk towards it until one of them becomes zero, and so on until no slope is
    too small. It starts from what is left when, beginning with all, negative coordinates are struck off.
    """
    n, largest = len(P), float(P.diagonal().max())
    if largest <= 0:
        return torch.full((n,), 1 / n, dtype=torch.float64)
    Q = P.double() / largest + RIDGE * torch.eye(n, dtype=torch.float64)
    a = _start(Q)
    for _ in range(10 * n):
        slope = Q @ a
        worst = int(slope.argmin())
        if slope[worst] > a @ slope - GAP:
            break
        lower = _lowered(Q, a, worst)
        if lower @ Q @ lower >= a @ slope:  # as low as rounding allows
            break
        a = lower
    return a


def _start(Q: Tensor) -> Tensor:
    on = torch.arange(len(Q))
    while len(on):
        b = _without_signs(Q, on)
        if bool((b > 0).all()):
            return _spread(b, on, len(Q))
        on = on[b > 0]
    return F.one_hot(Q.diagonal().argmin(), len(Q)).to(Q.dtype)  # Q is noise: any corner will do


def _lowered(Q: Tensor, a: Tensor, new: int) -> Tensor:
    """The minimum over the coordinates that are not zero and a new one, as far as signs allow."""
    active = a > 0
    active[new] = True
    while True:
        on = active.nonzero().flatten()
        best, now = _without_signs(Q, on), a[on]
        if bool((best > 0).all()):
            return _spread(best, on, len(a))
        far = torch.where(best > 0, torch.inf, now / (now - best).clamp(min=torch.finfo(Q.dtype).tiny))
        stop = now + float(far.min()) * (best - now)
        stop[far.argmin()] = 0
        a = _spread(stop.clamp(min=0), on, len(a))
        active = a > 0


def _without_signs(Q: Tensor, on: Tensor) -> Tensor:
    """The b with sum 1 that minimises b^T Q b over some coordinates."""
    solution: Tensor = torch.linalg.solve(Q[on][:, on], torch.ones(len(on), dtype=Q.dtype))
    return solution / solution.sum()


def _spread(values: Tensor, on: Tensor, n: int) -> Tensor:
    return torch.zeros(n, dtype=values.dtype).index_copy_(0, on, values)
