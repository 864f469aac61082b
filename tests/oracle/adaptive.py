"""Personal methods as plain loops, written from the papers' algorithm boxes, as in `oracles.py`."""

from collections.abc import Iterator
from itertools import count

import torch
import torch.nn.functional as F
from oracles import Model, World, descend, mean, read, write
from torch import Tensor
from torch.func import functional_call

from fedalloy.nets.base import Net
from fedalloy.random import generator


def fedala(
    world: World, tensors: int, eta_w: float, percent: float, until_converged: bool
) -> tuple[Model, dict[int, Model], dict[int, dict[str, Tensor]]]:
    """The server's model, and of every client that took part its own model and its mixing weights.

    The last `tensors` tensors are mixed; the derivative by W is taken through the mixture itself.
    """
    net = world.net()
    server = read(net)
    own: dict[int, Model] = {}
    weights: dict[int, dict[str, Tensor]] = {}
    for round in range(1, world.rounds + 1):
        models, sizes = [], []
        for client in world.sampled(round):
            write(net, server)
            if client in own:
                first = client not in weights
                W = weights.get(client, {})
                often = 100 if first and until_converged else 1
                weights[client] = mix(
                    world, net, own[client], W, client, round, tensors, eta_w, percent, often
                )
            descend(world, net, client, round)
            own[client] = read(net)
            models.append(own[client])
            sizes.append(float(world.size(client)))
        server = mean(models, sizes)
    return server, own, weights


def mix(
    world: World,
    net: Net,
    old: Model,
    W: dict[str, Tensor],
    client: int,
    round: int,
    tensors: int,
    eta_w: float,
    percent: float,
    often: int,
) -> dict[str, Tensor]:
    """Put the mixture of the net's own and the old weights into the net; the weights it was mixed by."""
    new = {name: p.detach().clone() for name, p in net.named_parameters()}
    pieces = torch.split(old.weights, [p.numel() for p in new.values()])
    before = {name: piece.view_as(new[name]) for name, piece in zip(new, pieces, strict=True)}
    top = list(new)[-tensors:]
    W = W or {name: torch.ones_like(new[name]) for name in top}
    data = world.federation.client(client)
    order = torch.randperm(data.samples, generator=generator(world.seed, round, client, "ala"))
    order = order[: int(data.samples * percent / 100)]
    net.eval()
    losses: list[float] = []
    while len(losses) < often:
        for index in torch.split(order, world.batch):
            leaves = {name: W[name].clone().requires_grad_() for name in top}
            hat = {name: before[name] + (new[name] - before[name]) * leaves[name] for name in top}
            out = functional_call(net, {**new, **hat}, (data.prepare(data.x[index], None),))
            loss = F.cross_entropy(out.logits, data.y[index])
            slopes = torch.autograd.grad(loss, list(leaves.values()))
            W = {name: (W[name] - eta_w * g).clamp(0, 1) for name, g in zip(top, slopes, strict=True)}
        losses.append(loss.item())
        if len(losses) > 10 and float(torch.tensor(losses[-10:]).std(correction=0)) < 0.1:
            break
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name in W:
                p.copy_(before[name] + (new[name] - before[name]) * W[name])
    return W


def laps(world: World, client: int, round: int, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of one of Per-FedAvg's own streams, without end."""
    data = world.federation.client(client)
    for lap in count():
        draw = generator(world.seed, round, client, lap, name, "batches")
        for index in torch.split(torch.randperm(data.samples, generator=draw), world.batch):
            if len(index) > 1 or "batch" not in world.model:
                yield data.prepare(data.x[index], None), data.y[index]


def perfedavg(
    world: World, alpha: float, beta: float, delta: float | None, same: bool, uniform: bool
) -> Model:
    """Every gradient is taken at a model of its own; only the pass on the outer batch leaves its statistics behind."""
    net = world.net()
    server = read(net)
    for round in range(1, world.rounds + 1):
        models, sizes = [], []
        rate = beta * world.lr_decay ** (round - 1)
        for client in world.sampled(round):
            here = Model(server.weights.clone(), server.buffers.clone())
            inner, curved = (laps(world, client, round, name) for name in ("inner", "curvature"))
            for batch in world.batches(client, round):
                if len(batch[1]) == 1 and "batch" in world.model:
                    continue
                g, _ = gradient(net, here, batch if same else next(inner))
                v, buffers = gradient(net, Model(here.weights - alpha * g, here.buffers), batch)
                moved = v
                if delta is not None:
                    third = batch if same else next(curved)
                    ahead, _ = gradient(net, Model(here.weights + delta * v, buffers), third)
                    behind, _ = gradient(net, Model(here.weights - delta * v, buffers), third)
                    moved = v - alpha * (ahead - behind) / (2 * delta)
                here = Model(here.weights - rate * moved, buffers)
            models.append(here)
            sizes.append(1.0 if uniform else float(world.size(client)))
        server = mean(models, sizes)
    return server


def gradient(net: Net, model: Model, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The gradient of a batch's loss in train mode, and the statistics after the pass."""
    write(net, model)
    x, y = batch
    slopes = torch.autograd.grad(F.cross_entropy(net.train()(x).logits, y), list(net.parameters()))
    return torch.cat([g.flatten() for g in slopes]), read(net).buffers
