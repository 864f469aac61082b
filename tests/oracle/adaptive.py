"""Personal methods as plain loops, written from the papers' algorithm boxes, as in `oracles.py`."""

from collections.abc import Iterator
from itertools import combinations, count

import torch
import torch.nn.functional as F
from oracles import Model, World, descend, mean, read, write
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedalloy.core.net import Net
from fedalloy.core.random import generator


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


def fedpac(
    world: World, lam: float, head_lr: float, combine: bool
) -> tuple[Model, dict[int, Tensor], Tensor, Tensor]:
    """The whole net (its head is of no account), the clients' heads, the centroids and the classes they have."""
    net = world.net()
    server = read(net)
    classes, width = world.federation.dataset.classes, net.width
    first = parameters_to_vector(net.head.parameters()).detach().clone()
    heads: dict[int, Tensor] = {}
    centroids, seen = torch.zeros(classes, width), torch.zeros(classes, dtype=torch.bool)
    for round in range(1, world.rounds + 1):
        chosen = world.sampled(round)
        models, sizes, sent, H, V = [], [], [], [], []
        sums, counts = torch.zeros(classes, width, dtype=torch.float64), torch.zeros(classes)
        for client in chosen:
            write(net, server)
            vector_to_parameters(heads.get(client, first).clone(), net.head.parameters())
            data = world.federation.client(client)
            x, n = data.prepare(data.x, None), data.samples
            with torch.no_grad():
                z = net.eval()(x).features
            shares = [float((data.y == c).sum()) / n for c in range(classes)]
            means = torch.stack(
                [z[data.y == c].mean(0) if s else torch.zeros(width) for c, s in enumerate(shares)]
            )
            norms = [float(z[data.y == c].square().sum(1).mean()) if s else 0.0 for c, s in enumerate(shares)]
            H.append(torch.tensor(shares)[:, None] * means)
            V.append(
                sum(
                    s * q - s**2 * float(m.square().sum())
                    for s, q, m in zip(shares, norms, means, strict=True)
                )
                / n
            )
            targets = torch.where(seen[:, None], centroids, means) if bool(seen.any()) else None
            rate = head_lr * world.lr_decay ** (round - 1)
            stage(world, net, list(net.head.parameters()), rate, client, round, 0, 1, 0.0, None)
            stage(
                world,
                net,
                list(net.body.parameters()),
                world.rate(round),
                client,
                round,
                1,
                world.epochs,
                lam,
                targets,
            )
            with torch.no_grad():
                z = net.eval()(x).features
            sums.index_add_(0, data.y, z.double())
            counts += torch.bincount(data.y, minlength=classes)
            sent.append(parameters_to_vector(net.head.parameters()).detach().clone())
            models.append(read(net))
            sizes.append(float(n))
        server = mean(models, sizes)
        held = counts > 0
        centroids[held] = (sums[held] / counts[held, None]).float()
        seen |= held
        stacked, flat = torch.stack(sent).double(), torch.stack(H).double().flatten(1)
        for i, client in enumerate(chosen):
            away = flat[i] - flat
            P = torch.tensor(V, dtype=torch.float64).diag() + away @ away.T
            heads[client] = (best_of_all_faces(P) @ stacked).float() if combine else sent[i]
    return server, heads, centroids, seen


def stage(
    world: World,
    net: Net,
    trained: list[nn.Parameter],
    rate: float,
    client: int,
    round: int,
    number: int,
    epochs: int,
    lam: float,
    targets: Tensor | None,
) -> None:
    """Some epochs on a part of the net, with an optimiser of its own."""
    data = world.federation.client(client)
    optimiser = torch.optim.SGD(trained, lr=rate, momentum=world.momentum)
    net.train()
    for epoch in range(epochs):
        draw = generator(world.seed, round, client, number, epoch, "batches")
        for index in torch.split(torch.randperm(data.samples, generator=draw), world.batch):
            if len(index) == 1 and "batch" in world.model:
                continue
            out, y = net(data.prepare(data.x[index], None)), data.y[index]
            loss = F.cross_entropy(out.logits, y)
            if targets is not None:
                loss = loss + lam * ((out.features - targets[y]) ** 2).mean()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()


def best_of_all_faces(P: Tensor) -> Tensor:
    """The minimum of a^T P a over the simplex, without weights below 1e-3."""
    found: list[tuple[float, Tensor]] = []
    for size in range(1, len(P) + 1):
        for face in map(list, combinations(range(len(P)), size)):
            x = torch.linalg.solve(P[face][:, face], torch.ones(size, dtype=P.dtype))
            a = torch.zeros(len(P), dtype=P.dtype)
            a[face] = x / x.sum()
            if bool((a >= 0).all()):
                found.append((float(a @ P @ a), a))
    _, best = min(found, key=lambda pair: pair[0])
    best = torch.where(best < 1e-3, 0, best)
    return best / best.sum()
