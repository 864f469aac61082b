"""Methods that change the local loss, as plain loops over samples, pairs and classes; no mechanism."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from oracles import Model, World, mean, read, write
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from fedalloy.nets.base import Net

Loss = Callable[[Net, Tensor, Tensor], Tensor]  # of the net, a batch and its labels


def descend(
    world: World, net: Net, client: int, round: int, loss_of: Loss, clip: float | None = None
) -> None:
    """Local training of a loss; a batch of one is skipped under BatchNorm."""
    net.train()
    optimiser = torch.optim.SGD(net.parameters(), lr=world.rate(round), momentum=world.momentum)
    for x, y in world.batches(client, round):
        if len(y) == 1 and any(isinstance(m, torch.nn.BatchNorm1d) for m in net.modules()):
            continue
        optimiser.zero_grad()
        loss_of(net, x, y).backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            clip_grad_norm_(net.parameters(), clip)
        optimiser.step()


def averaged(
    world: World, losses: Callable[[int], Loss], *, uniform: bool = False, clip: float | None = None
) -> Model:
    """FedAvg with a loss for each client."""
    net = world.net()
    server = read(net)
    for round in range(1, world.rounds + 1):
        models, sizes = [], []
        for client in world.sampled(round):
            write(net, server)
            descend(world, net, client, round, losses(client), clip)
            models.append(read(net))
            sizes.append(1.0 if uniform else float(world.size(client)))
        server = mean(models, sizes)
    return server


def feduv(world: World, lambda_v: float, lambda_u: float) -> Model:
    def loss(net: Net, x: Tensor, y: Tensor) -> Tensor:
        z = net.body(x)
        o = net.head(z)
        total = F.cross_entropy(o, y)
        count, classes = o.shape
        if count >= 2:
            q = torch.exp(o) / torch.exp(o).sum(1, keepdim=True)
            for c in range(classes):
                deviation = torch.sqrt(((q[:, c] - q[:, c].mean()) ** 2).sum() / (count - 1))
                total = total + lambda_v / classes * torch.clamp(classes**-0.5 - deviation, min=0)
        if count >= 3:
            d = torch.cat([((z[i] - z[:i]) ** 2).sum(1) for i in range(1, count)])
            ordered = d[d > 0].sort().values
            sigma = ordered[(len(ordered) - 1) // 2]
            total = total + lambda_u * torch.exp(-d / sigma).sum() / (count * (count - 1) / 2)
        return total

    return averaged(world, lambda client: loss)


def fedlc(world: World, tau: float, pairwise: bool = False, floor: bool = False) -> Model:
    def of(client: int) -> Loss:
        labels = world.federation.client(client).y.tolist()
        counts = {c: labels.count(c) or int(floor) for c in range(world.federation.dataset.inputs.classes)}
        alone = len(set(labels)) < 2

        def loss(net: Net, x: Tensor, y: Tensor) -> Tensor:
            o = net.head(net.body(x))
            score = {c: torch.exp(o[:, c] - tau * n**-0.25) for c, n in counts.items() if n}
            total = torch.zeros(())
            for true in set(y.tolist()):
                below = sum(s for c, s in score.items() if c != true or not pairwise or alone)
                total = total - torch.log(score[true] / below)[y == true].sum()
            return total / len(y)

        return loss

    return averaged(world, of)
