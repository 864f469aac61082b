"""Methods for different models as plain loops: clients keep their nets and exchange small things.

Only the data, the freshly built nets and the order of the batches come from the library.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from oracles import Model, World, mean, read, write
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from fedalloy import models
from fedalloy.core.net import Net, Outputs
from fedalloy.core.random import generator, seed_of

Term = Callable[[Outputs, Tensor], Tensor]  # of what the net says and the labels
Rows = dict[int, Tensor]  # one row for each class that has one


@dataclass
class Ends:
    """Every client's own model, and the rows that the server ends with."""

    own: dict[int, Model] = field(default_factory=dict)
    rows: Rows = field(default_factory=dict)


def batches(world: World, net: Net, client: int, round: int) -> Iterator[tuple[Tensor, Tensor]]:
    """All batches but single samples under BatchNorm."""
    normed = any(isinstance(m, nn.BatchNorm1d) for m in net.modules())
    for x, y in world.batches(client, round):
        if len(y) > 1 or not normed:
            yield x, y


def descend(
    world: World, net: Net, client: int, round: int, term: Term | None
) -> Iterator[tuple[Outputs, Tensor]]:
    """Local training of cross-entropy plus a term; what the net said at every step."""
    net.train()
    optimiser = torch.optim.SGD(net.parameters(), lr=world.rate(round), momentum=world.momentum)
    for x, y in batches(world, net, client, round):
        out = net(x)
        loss = F.cross_entropy(out.logits, y)
        if term is not None:
            loss = loss + term(out, y)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        yield Outputs(*(part.detach() for part in out)), y


def row_means(values: Tensor, y: Tensor) -> Rows:
    return {c: values[y == c].double().mean(0) for c in sorted(set(y.tolist()))}


def mean_features(world: World, net: Net, client: int) -> Rows:
    """Mean features of every class that a client holds, of the model as it stands, in eval mode."""
    data = world.federation.client(client)
    net.eval()
    with torch.no_grad():
        return row_means(net(data.prepare(data.x, None)).features, data.y)


def merged(all_rows: list[Rows], weights: list[dict[int, float]] | None = None) -> Rows:
    """For each class the mean over those that sent it."""
    found = {}
    for c in sorted({c for rows in all_rows for c in rows}):
        pairs = [
            (rows[c], 1.0 if weights is None else weights[k][c])
            for k, rows in enumerate(all_rows)
            if c in rows
        ]
        found[c] = sum((row * w for row, w in pairs), torch.zeros_like(pairs[0][0])) / sum(
            w for _, w in pairs
        )
    return found


def pull(lam: float, P: Rows) -> Term:
    """lam times the mean squared entry of z - P[y]; a class without a row counts as 0."""

    def term(out: Outputs, y: Tensor) -> Tensor:
        z = out.features
        targets = [P[c].float() if c in P else z[i].detach() for i, c in enumerate(y.tolist())]
        return lam * F.mse_loss(z, torch.stack(targets))

    return term


def fedproto(world: World, lam: float, weighted: bool = False, while_training: bool = False) -> Ends:
    net, ends = world.net(), Ends()
    start = read(net)
    for round in range(1, world.rounds + 1):
        sent, counts = [], []
        for client in world.sampled(round):
            write(net, ends.own.get(client, start))
            term = pull(lam, ends.rows) if ends.rows else None
            said = list(descend(world, net, client, round, term))
            if while_training:
                z, y = (torch.cat(column) for column in zip(*((o.features, y) for o, y in said), strict=True))
                rows = row_means(z, y)
            else:
                rows = mean_features(world, net, client)
            ends.own[client] = read(net)
            held = world.federation.client(client).counts.tolist()
            sent.append(rows)
            counts.append({c: float(n) for c, n in enumerate(held)})
        ends.rows = {**ends.rows, **merged(sent, counts if weighted else None)}
    return ends


def toward(lam: float, targets: Rows) -> Term:
    """lam times the cross-entropy to the class's target distribution, summed over known classes, over the batch."""

    def term(out: Outputs, y: Tensor) -> Tensor:
        p = out.logits.softmax(1)
        terms = [-(targets[c].float() * p[i].log()).sum() for i, c in enumerate(y.tolist()) if c in targets]
        return lam * torch.stack([torch.zeros(()), *terms]).sum() / len(y)

    return term


def feddistill(world: World, lam: float, logits: bool = True, leave_one_out: bool = False) -> Ends:
    net, ends = world.net(), Ends()
    start = read(net)
    behind: dict[int, Rows] = {}  # for each class the rows of the clients whose mean the server holds
    for round in range(1, world.rounds + 1):
        sent: dict[int, Rows] = {}
        for client in world.sampled(round):
            write(net, ends.own.get(client, start))
            targets = {}
            for c, holders in behind.items():
                others = [row for k, row in holders.items() if not (leave_one_out and k == client)]
                if others:
                    mean = torch.stack(others).mean(0)
                    targets[c] = mean.softmax(0) if logits else mean
            said = list(descend(world, net, client, round, toward(lam, targets) if targets else None))
            a, y = torch.cat([o.logits for o, _ in said]), torch.cat([y for _, y in said])
            sent[client] = row_means(a if logits else a.softmax(1), y)
            ends.own[client] = read(net)
        for c in {c for rows in sent.values() for c in rows}:
            behind[c] = {client: rows[c] for client, rows in sent.items() if c in rows}
        ends.rows = {c: torch.stack(list(holders.values())).mean(0) for c, holders in behind.items()}
    return ends


def feddistillplus(world: World, lam: float, old: float = 0.0) -> tuple[Model, Tensor]:
    """The server's model and its soft labels."""
    net = world.net()
    server, omega = read(net), torch.eye(10, dtype=torch.float64)
    for round in range(1, world.rounds + 1):
        models, sizes = [], []
        sums, counts = torch.zeros(10, 10, dtype=torch.float64), torch.zeros(10, dtype=torch.float64)
        for client in world.sampled(round):
            data = world.federation.client(client)
            write(net, server)
            divergence = nearer(lam, omega.float())
            for _ in descend(world, net, client, round, divergence):
                pass
            net.eval()
            with torch.no_grad():
                said = net(data.prepare(data.x, None)).logits.softmax(1)
            for label, row in zip(data.y.tolist(), said, strict=True):
                sums[label] += row
                counts[label] += 1
            models.append(read(net))
            sizes.append(float(data.samples))
        server = mean(models, sizes)
        held = counts > 0
        omega[held] = (1 - old) * sums[held] / counts[held, None] + old * omega[held]
    return server, omega


def nearer(lam: float, omega: Tensor) -> Term:
    def term(out: Outputs, y: Tensor) -> Tensor:
        t, p = omega[y], out.logits.softmax(1)
        divergence: Tensor = (torch.special.xlogy(t, t) - t * p.log()).sum(1).mean()
        return lam * divergence

    return term


@dataclass
class Pair:
    """The model that clients have in common, and everybody's own."""

    common: Model
    own: dict[int, Model] = field(default_factory=dict)


def second_net(world: World, label: str) -> Net:
    """The freshly built common net: the same architecture with a draw of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(world.seed, "init", world.model, label))
        return models.build(world.model, world.federation.dataset.inputs)


def kl(a: Tensor, b: Tensor) -> Tensor:
    p, q = a.softmax(1), b.softmax(1)
    total: Tensor = (p * (p.log() - q.log())).sum(1).mean()
    return total


def fml(world: World, alpha: float, beta: float, by_size: bool = False) -> Pair:
    own, meme = world.net(), second_net(world, "auxiliary")
    start, ends = read(own), Pair(read(meme))
    for round in range(1, world.rounds + 1):
        memes, weights = [], []
        for client in world.sampled(round):
            write(own, ends.own.get(client, start))
            write(meme, ends.common)
            steps = [
                torch.optim.SGD(net.parameters(), lr=world.rate(round), momentum=world.momentum)
                for net in (own.train(), meme.train())
            ]
            for x, y in batches(world, own, client, round):
                p_l, p_g = own(x).logits, meme(x).logits
                loss_l = alpha * F.cross_entropy(p_l, y) + (1 - alpha) * kl(p_g.detach(), p_l)
                loss_g = beta * F.cross_entropy(p_g, y) + (1 - beta) * kl(p_l.detach(), p_g)
                for step, loss in zip(steps, (loss_l, loss_g), strict=True):
                    step.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                for step in steps:
                    step.step()
            ends.own[client] = read(own)
            memes.append(read(meme))
            weights.append(float(world.size(client)) if by_size else 1.0)
        ends.common = mean(memes, weights)
    return ends


def truncated(update: Tensor, shapes: list[torch.Size], energy: float) -> Tensor:
    """Every matrix by the smallest rank that holds this share of its energy; dense where that is no longer."""
    pieces = []
    for shape, flat in zip(shapes, torch.split(update, [shape.numel() for shape in shapes]), strict=True):
        if len(shape) < 2:
            pieces.append(flat)
            continue
        matrix = flat.view(shape[0], -1)
        U, sigma, V = torch.linalg.svd(matrix.double(), full_matrices=False)
        k = 0
        while (sigma[:k] ** 2).sum() < energy * (sigma**2).sum():
            k += 1
        short = k * (sum(matrix.shape) + 1) < matrix.numel()
        pieces.append((U[:, :k] @ torch.diag(sigma[:k]) @ V[:k]).float().flatten() if short else flat)
    return torch.cat(pieces)


def fedkd(world: World, t_start: float | None = 0.95, t_end: float = 0.98, hidden: bool = True) -> Pair:
    """Without `t_start` nothing is compressed."""
    own = world.net()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(world.seed, "init", world.model, "student" if hidden else "auxiliary"))
        student = models.build(world.model, world.federation.dataset.inputs)
        W = nn.Linear(student.width, own.width, bias=False) if hidden else None
    shapes = [p.shape for p in student.parameters()]
    start, first_map = read(own), None if W is None else W.weight.detach().clone()
    maps: dict[int, Tensor] = {}
    ends = Pair(read(student))
    for round in range(1, world.rounds + 1):
        students = []
        energy = None if t_start is None else t_start + round / world.rounds * (t_end - t_start)
        for client in world.sampled(round):
            write(own, ends.own.get(client, start))
            write(student, ends.common)
            modules: list[nn.Module] = [own.train(), student.train()]
            if W is not None and first_map is not None:
                W.weight.data = maps.get(client, first_map).clone()
                modules.append(W)
            steps = [
                torch.optim.SGD(module.parameters(), lr=world.rate(round), momentum=world.momentum)
                for module in modules
            ]
            for x, y in batches(world, own, client, round):
                t, s = own(x), student(x)
                ce_t, ce_s = F.cross_entropy(t.logits, y), F.cross_entropy(s.logits, y)
                D = (ce_t + ce_s).detach()
                loss_t = ce_t + kl(s.logits.detach(), t.logits) / D
                loss_s = ce_s + kl(t.logits.detach(), s.logits) / D
                if W is not None:
                    loss_t = loss_t + ((t.features - W(s.features).detach()) ** 2).mean() / D
                    loss_s = loss_s + ((t.features.detach() - W(s.features)) ** 2).mean() / D
                for step in steps:
                    step.zero_grad()
                loss_t.backward()  # type: ignore[no-untyped-call]
                loss_s.backward()  # type: ignore[no-untyped-call]
                for step in steps:
                    step.step()
            ends.own[client] = read(own)
            if W is not None:
                maps[client] = W.weight.detach().clone()
            end = read(student)
            if energy is not None:
                end.weights = ends.common.weights + truncated(
                    end.weights - ends.common.weights, shapes, energy
                )
            students.append(end)
        average = mean(students, [1.0] * len(students))
        if energy is not None:
            move = truncated(average.weights - ends.common.weights, shapes, energy)
            average.weights = ends.common.weights + move
        ends.common = average
    for client, weight in maps.items():
        model = ends.own[client]
        ends.own[client] = Model(torch.cat([model.weights, weight.flatten()]), model.buffers)
    return ends


def pairs_of(sent: list[Rows]) -> tuple[Tensor, Tensor]:
    """All rows, client by client, and their classes."""
    rows = [row.float() for one in sent for _, row in sorted(one.items())]
    return torch.stack(rows), torch.tensor([c for one in sent for c in sorted(one)])


def shuffled(world: World, round: int, purpose: str, epochs: int, size: int) -> Iterator[Tensor]:
    """The server's batches, as positions."""
    for epoch in range(epochs):
        dice = generator(world.seed, round, "server", purpose, epoch)
        yield from torch.split(torch.randperm(size, generator=dice), world.batch)


def fedtgp(world: World, lam: float, tau: float, epochs: int) -> Ends:
    net, ends = world.net(), Ends()
    start, k = read(net), net.width
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(world.seed, "init", "prototypes"))
        V = nn.Parameter(torch.randn(10, k))
        network = nn.Sequential(nn.Linear(k, k), nn.ReLU(), nn.Linear(k, k))
    for round in range(1, world.rounds + 1):
        sent = []
        for client in world.sampled(round):
            write(net, ends.own.get(client, start))
            for _ in descend(world, net, client, round, pull(lam, ends.rows) if ends.rows else None):
                pass
            sent.append(mean_features(world, net, client))
            ends.own[client] = read(net)
        p, y = pairs_of(sent)
        Q = merged(sent)
        nearest = [min(float((Q[c] - Q[d]).norm()) for d in Q if d != c) for c in Q]
        delta = min(max(nearest), tau)
        optimiser = torch.optim.SGD([V, *network.parameters()], lr=world.rate(round))
        for index in shuffled(world, round, "prototypes", epochs, len(y)):
            further = torch.zeros(len(index), 10)
            for i, c in enumerate(y[index].tolist()):
                further[i, c] = delta
            away = further + torch.stack([(p[i] - network(V)).norm(dim=1) for i in index.tolist()])
            optimiser.zero_grad()
            F.cross_entropy(-away, y[index]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        ends.rows = {c: row.double() for c, row in enumerate(network(V).detach())}
    return ends


def fedgh(world: World, epochs: int, lr: float) -> Pair:
    """Everybody's extractor, and the head."""
    net = world.net()
    head = copy.deepcopy(net.head)
    size = sum(p.numel() for p in head.parameters())
    start, ends = read(net), Pair(Model(parameters_to_vector(head.parameters()).detach(), torch.empty(0)))
    for round in range(1, world.rounds + 1):
        sent = []
        for client in world.sampled(round):
            own = ends.own.get(client, Model(start.weights[:-size], start.buffers))
            write(net, Model(torch.cat([own.weights, ends.common.weights]), own.buffers))
            for _ in descend(world, net, client, round, None):
                pass
            sent.append(mean_features(world, net, client))
            end = read(net)
            ends.own[client] = Model(end.weights[:-size], end.buffers)
        z, y = pairs_of(sent)
        optimiser = torch.optim.SGD(head.parameters(), lr=lr)
        for index in shuffled(world, round, "head", epochs, len(y)):
            optimiser.zero_grad()
            F.cross_entropy(head(z[index]), y[index]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        ends.common = Model(parameters_to_vector(head.parameters()).detach(), torch.empty(0))
    return ends
