"""Methods that change the local loss, as plain loops over samples, pairs and classes; no mechanism."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from oracles import Model, World, mean, read, write
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from fedalloy.core.net import Net

Loss = Callable[[Net, Tensor, Tensor], Tensor]  # of the net, a batch and its labels


def descend(
    world: World, net: Net, client: int, round: int, loss_of: Loss, clip: float | None = None
) -> None:
    """Local training of a loss; a batch of one is skipped under BatchNorm."""
    net.train()
    optimiser = torch.optim.SGD(net.parameters(), lr=world.rate(round), momentum=world.momentum)
    for x, y in world.batches(client, round):
        if len(y) == 1 and any(isinstance(m, nn.BatchNorm1d) for m in net.modules()):
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


def plain(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net.head(net.body(x)), y)


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


def fedrcl(
    world: World,
    w_s: float,
    w_p: float,
    tau: float,
    kappa: float,
    most: tuple[int, int] = (1, 2),  # positives and negatives of an anchor
    clip: float | None = 10.0,
    uniform: bool = False,
) -> Model:
    """For perceptrons: the levels are the first and the last hidden layer, before the ReLU."""

    def loss(net: Net, x: Tensor, y: Tensor) -> Tensor:
        hidden, h = [], x
        assert isinstance(net.body, nn.Sequential)
        for layer in net.body:
            if isinstance(layer, nn.ReLU):
                hidden.append(h)
                h = torch.relu(h)
            else:
                h = layer(h)
        levels = hidden[:1] if len(hidden) == 1 else [hidden[0], hidden[-1]]
        terms = torch.cat([torch.stack(list(relaxed(z, y))) for z in levels])
        return F.cross_entropy(net.head(h), y) + terms.mean()

    def relaxed(z: Tensor, y: Tensor) -> Iterator[Tensor]:
        phi = z / z.norm(dim=1, keepdim=True)
        s = phi @ phi.T
        for i in range(len(y)):
            partners = s[i][(y == y[i]) & (torch.arange(len(y)) != i)].sort().values[: most[0]]
            others = s[i][y != y[i]].sort(descending=True).values[: most[1]]
            term = torch.zeros(())
            p = torch.exp((partners if len(partners) else torch.ones(1)) / tau)
            term = term - w_s * torch.log(p / (p + torch.exp(others / tau).sum())).mean()
            r = partners[partners >= kappa]
            one = torch.exp(torch.tensor(1 / tau))
            yield term - w_p * torch.log(one / (one + torch.exp(r / tau).sum()))

    return averaged(world, lambda client: loss, uniform=uniform, clip=clip)


def fedfm(
    world: World,
    lam: float,
    tau: float,
    l2: bool = False,
    start_round: int = 1,
    one_trip: bool = False,
    equal_avg: bool = False,
) -> tuple[Model, dict[int, Tensor]]:
    """The server's model, and its anchors."""
    net = world.net()
    server = read(net)
    anchors: dict[int, Tensor] = {}

    def matched(net: Net, x: Tensor, y: Tensor) -> Tensor:
        z = net.body(x)
        total = F.cross_entropy(net.head(z), y)
        direction = z / z.norm(dim=1, keepdim=True).clamp(min=1e-12)
        unit = {c: a / a.norm() for c, a in anchors.items()}
        share = {c: torch.exp((direction * a).sum(1) / tau) for c, a in unit.items()}
        terms = []
        for c in set(y.tolist()) & set(anchors):
            if l2:
                terms.append(((direction[y == c] - unit[c]) ** 2).mean(1))
            else:
                terms.append(-torch.log(share[c] / sum(share.values()))[y == c])
        return total + lam * torch.cat(terms).mean() if terms else total

    @torch.no_grad()
    def local_anchors(client: int) -> dict[int, tuple[Tensor, int]]:
        data = world.federation.client(client)
        z = net.eval().body(data.prepare(data.x, None))
        return {c: (z[data.y == c].mean(0), int((data.y == c).sum())) for c in set(data.y.tolist())}

    for round in range(1, world.rounds + 1):
        models, sizes, found = [], [], []
        chosen = world.sampled(round)
        for client in chosen:
            write(net, server)
            descend(world, net, client, round, matched if round - 1 >= start_round else plain)
            models.append(read(net))
            sizes.append(float(world.size(client)))
            if one_trip:
                found.append(local_anchors(client))
        server = mean(models, sizes)
        if not one_trip:
            write(net, server)
            found = [local_anchors(client) for client in chosen]
        renewed = {}
        for c in {c for held in found for c in held}:
            rows = [held[c] for held in found if c in held]
            if equal_avg:
                old = [(anchors[c], 1)] * (len(chosen) - len(rows)) if c in anchors else []
                rows = [(row, 1) for row, _ in rows] + old
            total = sum(n for _, n in rows)
            renewed[c] = torch.stack([row * (n / total) for row, n in rows]).sum(0)
        anchors = anchors | renewed
    return server, anchors
