"""Methods as plain loops, written from the papers' algorithm boxes: vectors, lists and torch, no mechanism.

Only three things come from the library: the data, the freshly built net and the order of the batches.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from fedalloy import models
from fedalloy.core.net import Net
from fedalloy.core.random import generator, seed_of
from fedalloy.data.federation import Federation

Extra = Callable[[Tensor, Tensor, Tensor], Tensor]  # of the weights, the batch and its embedding


@dataclass(frozen=True)
class World:
    """A federation and how it trains."""

    federation: Federation
    model: str
    seed: int = 3
    rounds: int = 3
    participation: float = 0.5
    epochs: int = 2
    batch: int = 32
    lr: float = 0.05
    lr_decay: float = 0.9
    momentum: float = 0.0

    @property
    def clients(self) -> int:
        return self.federation.clients

    def size(self, client: int) -> int:
        return self.federation.client(client).samples

    def net(self, projector: int | None = None) -> Net:
        """The net that every run of this world starts from, with MOON's projection head if asked for."""
        inputs = self.federation.dataset.inputs
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(self.seed, "init", self.model))
            net = models.build(self.model, inputs)
            if projector is not None:
                torch.manual_seed(seed_of(self.seed, "init", self.model, "projector"))
                f = net.width
                net.neck = nn.Sequential(nn.Linear(f, f), nn.ReLU(), nn.Linear(f, projector))
                net.head = nn.Linear(projector, inputs.classes)
        return net

    def sampled(self, round: int) -> list[int]:
        order = torch.randperm(self.clients, generator=generator(self.seed, round, "sample")).tolist()
        return sorted(order[: int(self.participation * self.clients)])

    def rate(self, round: int) -> float:
        return self.lr * self.lr_decay ** (round - 1)

    def batches(self, client: int, round: int) -> Iterator[tuple[Tensor, Tensor]]:
        data = self.federation.client(client)
        for epoch in range(self.epochs):
            draw = generator(self.seed, round, client, 0, epoch, "batches")
            for index in torch.split(torch.randperm(data.samples, generator=draw), self.batch):
                yield data.prepare(data.x[index], None), data.y[index]


@dataclass
class Model:
    """A net's state as two vectors: weights, and running statistics."""

    weights: Tensor
    buffers: Tensor


def read(net: Net) -> Model:
    statistics = [b.flatten() for b in net.buffers() if b.is_floating_point()]
    return Model(
        parameters_to_vector(net.parameters()).detach().clone(), torch.cat([torch.empty(0), *statistics])
    )


def write(net: Net, model: Model) -> None:
    vector_to_parameters(model.weights.clone(), net.parameters())
    statistics = [b for b in net.buffers() if b.is_floating_point()]
    for b, values in zip(
        statistics, torch.split(model.buffers, [b.numel() for b in statistics]), strict=True
    ):
        b.copy_(values.view_as(b))


def mean(models: list[Model], weights: list[float]) -> Model:
    p = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    flat = torch.stack([model.weights.double() for model in models])
    buffers = torch.stack([model.buffers.double() for model in models])
    return Model((p @ flat).float(), (p @ buffers).float())


def pull(mu: float, anchor: Tensor) -> Extra | None:
    """The proximal term, written as a loss."""
    return (lambda w, x, z: mu / 2 * ((w - anchor) ** 2).sum()) if mu else None


def tilt(slope: Tensor) -> Extra:
    """A linear term."""
    return lambda w, x, z: (slope * w).sum()


def descend(
    world: World, net: Net, client: int, round: int, extra: Extra | None = None, clip: float | None = None
) -> list[Tensor]:
    """Local training of cross-entropy plus an extra loss; the gradient of every step, as the optimiser got it."""
    net.train()
    optimiser = torch.optim.SGD(net.parameters(), lr=world.rate(round), momentum=world.momentum)
    gradients = []
    for x, y in world.batches(client, round):
        if len(y) == 1 and any(isinstance(m, nn.BatchNorm1d) for m in net.modules()):
            continue
        optimiser.zero_grad()
        out = net(x)
        loss = F.cross_entropy(out.logits, y)
        if extra is not None:
            loss = loss + extra(torch.cat([p.flatten() for p in net.parameters()]), x, out.embedding)
        loss.backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            clip_grad_norm_(net.parameters(), clip)
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
        optimiser.step()
    return gradients


def local(world: World) -> list[Model]:
    """Every client trains alone, in every round."""
    ends = []
    for client in range(world.clients):
        net = world.net()
        for round in range(1, world.rounds + 1):
            descend(world, net, client, round)
        ends.append(read(net))
    return ends


def fedavg(world: World, uniform: bool = False, mu: float = 0.0) -> Model:
    """FedAvg; with mu FedProx, its proximal term written as a loss."""
    net = world.net()
    server = read(net)
    for round in range(1, world.rounds + 1):
        models, sizes = [], []
        for client in world.sampled(round):
            write(net, server)
            descend(world, net, client, round, pull(mu, server.weights))
            models.append(read(net))
            sizes.append(1.0 if uniform else float(world.size(client)))
        server = mean(models, sizes)
    return server


def displacement(world: World, round: int, steps: int, mu: float) -> float:
    """How far torch's own SGD moves a scalar under the constant gradient 1 (and a pull), in learning rates."""
    scalar = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.SGD([scalar], lr=world.rate(round), momentum=world.momentum)
    for _ in range(steps):
        scalar.grad = 1 + mu * scalar.detach()
        optimiser.step()
    return -scalar.item() / world.rate(round)


def fednova(world: World, mu: float = 0.0, server_momentum: float = 0.0) -> Model:
    net = world.net()
    server = read(net)
    velocity = torch.zeros_like(server.weights)
    for round in range(1, world.rounds + 1):
        models, sizes, norms, steps = [], [], [], []
        for client in world.sampled(round):
            write(net, server)
            done = len(descend(world, net, client, round, pull(mu, server.weights)))
            models.append(read(net))
            sizes.append(float(world.size(client)))
            norms.append(displacement(world, round, done, mu))
            steps.append(done)
        p = [size / sum(sizes) for size in sizes]
        tau_eff = sum(p_k * (s if mu else a) for p_k, a, s in zip(p, norms, steps, strict=True))
        update = torch.zeros_like(server.weights)
        for p_k, a, model in zip(p, norms, models, strict=True):
            update += tau_eff * p_k / a * (model.weights - server.weights)
        velocity = server_momentum * velocity + update
        server = Model(server.weights + velocity, mean(models, sizes).buffers)
    return server


def scaffold(world: World, rule: str = "mean_grad", by_size: bool = False, server_lr: float = 1.0) -> Model:
    net = world.net()
    server = read(net)
    c = torch.zeros_like(server.weights)
    c_of = [torch.zeros_like(c) for _ in range(world.clients)]
    total = sum(world.size(k) for k in range(world.clients))
    for round in range(1, world.rounds + 1):
        models, q, changes = [], [], []
        for client in world.sampled(round):
            write(net, server)
            correction = c - c_of[client]
            gradients = descend(world, net, client, round, tilt(correction))
            end = read(net)
            if rule == "option1":
                renewed = full_gradient(world, server, client)
            elif rule == "option2":
                moved = server.weights - end.weights
                renewed = c_of[client] - c + moved / (len(gradients) * world.rate(round))
            else:
                renewed = torch.stack(gradients).mean(0) - correction
            models.append(end)
            q.append(world.size(client) / total if by_size else 1 / world.clients)
            changes.append(renewed - c_of[client])
            c_of[client] = renewed
        average = mean(models, q)
        step = server_lr * (average.weights - server.weights)
        server = Model(server.weights + step, average.buffers)
        c = c + sum((q_k * dc for q_k, dc in zip(q, changes, strict=True)), torch.zeros_like(c))
    return server


def full_gradient(world: World, model: Model, client: int) -> Tensor:
    """The gradient over all of a client's samples, with the running statistics as they were received."""
    net = world.net()
    write(net, model)
    net.eval()
    data = world.federation.client(client)
    F.cross_entropy(net(data.prepare(data.x, None)).logits, data.y).backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def dynamic(alpha: float, g_k: Tensor, anchor: Tensor) -> Extra:
    return lambda w, x, z: alpha / 2 * ((w - anchor) ** 2).sum() - (g_k * w).sum()


def feddyn(
    world: World, alpha: float, clip: float | None = 10.0, size_scaled: bool = False
) -> tuple[Model, Tensor]:
    """The server's model, and the mean of the last participants' weights."""
    net = world.net()
    server = read(net)
    h = torch.zeros_like(server.weights)
    g_of = [torch.zeros_like(h) for _ in range(world.clients)]
    total = sum(world.size(k) for k in range(world.clients))
    average = server
    for round in range(1, world.rounds + 1):
        models = []
        for client in world.sampled(round):
            own = alpha * total / (world.clients * world.size(client)) if size_scaled else alpha
            write(net, server)
            g_k, anchor = g_of[client], server.weights
            descend(world, net, client, round, dynamic(own, g_k, anchor), clip)
            end = read(net)
            g_of[client] = g_k - own * (end.weights - anchor)
            h = h - alpha / world.clients * (end.weights - anchor)
            models.append(end)
        average = mean(models, [1.0] * len(models))
        server = Model(average.weights - h / alpha, average.buffers)
    return server, average.weights


def contrast(mu: float, temperature: float, references: list[Net]) -> Extra:
    """-log of the global model's share, the global model being the first reference."""

    def loss(w: Tensor, x: Tensor, z: Tensor) -> Tensor:
        with torch.no_grad():
            fixed = [net.neck(net.body(x)) for net in references]
        similar = torch.stack([torch.exp(F.cosine_similarity(z, other) / temperature) for other in fixed])
        return -mu * torch.log(similar[0] / similar.sum(0)).mean()

    return loss


def moon(world: World, mu: float, temperature: float, projector: int | None, memory: int = 1) -> Model:
    net = world.net(projector)
    server = read(net)
    previous: dict[int, list[Model]] = {client: [] for client in range(world.clients)}
    for round in range(1, world.rounds + 1):
        models, sizes = [], []
        for client in world.sampled(round):
            references = []
            for model in [server, *previous[client]]:
                reference = copy.deepcopy(net).eval()
                write(reference, model)
                references.append(reference)
            write(net, server)
            extra = contrast(mu, temperature, references) if previous[client] else None
            descend(world, net, client, round, extra)
            end = read(net)
            previous[client] = [end, *previous[client]][:memory]
            models.append(end)
            sizes.append(float(world.size(client)))
        server = mean(models, sizes)
    return server


def fedsol(
    world: World, rho: float, adaptive: bool, head: bool = True, body: bool = True, temperature: float = 3.0
) -> Model:
    net, known = world.net(), world.net().eval()
    server = read(net)
    for round in range(1, world.rounds + 1):
        models, sizes = [], []
        for client in world.sampled(round):
            write(net, server)
            write(known, server)
            for x, y, optimiser in steps(world, net, client, round):
                epsilon = perturbation(net, known, x, rho, adaptive, temperature)
                for name in epsilon:
                    epsilon[name] *= head if name.startswith("head.") else body
                before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
                for name, p in net.named_parameters():
                    p.data += epsilon[name]
                F.cross_entropy(net(x).logits, y).backward()  # type: ignore[no-untyped-call]
                net.load_state_dict(before)
                optimiser.step()
            models.append(read(net))
            sizes.append(float(world.size(client)))
        server = mean(models, sizes)
    return server


def perturbation(
    net: Net, known: Net, x: Tensor, rho: float, adaptive: bool, temperature: float
) -> dict[str, Tensor]:
    log_p = F.log_softmax(known(x).logits.detach() / temperature, 1)
    log_q = F.log_softmax(net(x).logits / temperature, 1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(1).mean()
    names, parameters = zip(*net.named_parameters(), strict=True)
    gradients = torch.autograd.grad(divergence, parameters)
    length = torch.sqrt(torch.stack([g.square().sum() for g in gradients]).sum())
    anchors = [w.detach() for w in known.parameters()]
    found = {}
    for name, g, w, anchor in zip(names, gradients, parameters, anchors, strict=True):
        moved = (w.detach() - anchor).abs()
        column = moved.square().sum(0, keepdim=True).sqrt()
        scale = torch.where(column > 0, moved / column, 0) if adaptive else 1
        found[name] = rho * scale * g / (length + 1e-12) if length >= 1e-7 else torch.zeros_like(g)
    return found


def steps(
    world: World, net: Net, client: int, round: int
) -> Iterator[tuple[Tensor, Tensor, torch.optim.Optimizer]]:
    """The batches that count, each with the optimiser of the round and its gradients at zero."""
    net.train()
    optimiser = torch.optim.SGD(net.parameters(), lr=world.rate(round), momentum=world.momentum)
    for x, y in world.batches(client, round):
        if len(y) == 1 and any(isinstance(m, nn.BatchNorm1d) for m in net.modules()):
            continue
        optimiser.zero_grad()
        yield x, y, optimiser


def fedfa(
    world: World, lam: float, m: float, schedule: str, official: bool, by_class: bool
) -> tuple[Model, Tensor]:
    """The model and the anchors."""
    net = world.net()
    server = read(net)
    classes = world.federation.dataset.classes
    draw = generator(world.seed, 0, "server", "anchors")
    anchors = torch.eye(net.width)[torch.randperm(net.width, generator=draw)[:classes]]
    for round in range(1, world.rounds + 1):
        models, sizes, moved = [], [], []
        for client in world.sampled(round):
            write(net, server)
            moved.append(anchored(world, net, client, round, anchors, lam, m, schedule, official))
            models.append(read(net))
            sizes.append(float(world.size(client)))
        server = mean(models, sizes)
        weights = torch.tensor(sizes)[:, None].expand(-1, classes)
        if by_class:
            weights = torch.stack([world.federation.client(k).counts.float() for k in world.sampled(round)])
        for c in range(classes):
            if weights[:, c].sum():
                rows = torch.stack([one[c] for one in moved])
                anchors[c] = (weights[:, c, None] * rows).sum(0) / weights[:, c].sum()
    return server, anchors


def anchored(
    world: World,
    net: Net,
    client: int,
    round: int,
    anchors: Tensor,
    lam: float,
    m: float,
    schedule: str,
    official: bool,
) -> Tensor:
    """One client's training; its anchors at the end of it."""
    classes, moving = len(anchors), anchors.clone()
    tuner: torch.optim.Optimizer = torch.optim.SGD(net.head.parameters(), lr=0.5)
    if schedule == "batch":  # the method itself; Adam makes much of gradients that are mere round-off
        tuner = torch.optim.Adam(net.head.parameters(), lr=1e-3)

    def calibrate() -> None:
        tuner.zero_grad()
        F.cross_entropy(net.head(anchors), torch.arange(classes)).backward()  # type: ignore[no-untyped-call]
        tuner.step()

    batches = list(steps(world, net, client, round))
    per_epoch = len(batches) // world.epochs
    means: dict[int, list[Tensor]] = {}
    for number, (x, y, optimiser) in enumerate(batches, start=1):
        if schedule == "before":
            calibrate()
        out = net(x)
        terms = [(out.features[y == c] - anchors[c]).square().sum(1).mean() for c in set(y.tolist())]
        for c in sorted(set(y.tolist())):
            means.setdefault(c, []).append(out.features[y == c].mean(0).detach())
        optimiser.zero_grad()
        loss = F.cross_entropy(out.logits, y) + lam / classes * torch.stack(terms).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        ended = number % per_epoch == 0
        if schedule == "batch" or (schedule == "epoch" and ended):
            calibrate()
        if ended:
            for c, found in means.items():
                average = torch.stack(found).sum(0) / (per_epoch if official else len(found))
                moving[c] = m * moving[c] + (1 - m) * average
            means = {}
    if schedule == "after":
        calibrate()
    return moving


def fedfa_aug(world: World, prob: float, momentum: float) -> Model:
    """For a net of two convolutions; its buffers are, stage by stage, statistics and variances between clients."""
    net = world.net()
    server = read(net)
    assert isinstance(net.body, nn.Sequential)
    maps = [layer.out_channels for layer in net.body if isinstance(layer, nn.Conv2d)]
    known = [torch.stack([torch.zeros(k), torch.ones(k)]) for k in maps]
    between = [torch.ones(2, k) for k in maps]
    for round in range(1, world.rounds + 1):
        models, sizes, seen = [], [], []
        for client in world.sampled(round):
            write(net, server)
            own = [one.clone() for one in known]
            batches = world.batches(client, round)
            per_epoch = -(-world.size(client) // world.batch)
            optimiser = torch.optim.SGD(net.parameters(), lr=world.rate(round), momentum=world.momentum)
            with torch.random.fork_rng(devices=[]):
                for number, (x, y) in enumerate(batches):
                    if number % per_epoch == 0:
                        epoch = number // per_epoch
                        torch.manual_seed(seed_of(world.seed, round, client, 0, epoch, "dropout"))
                    optimiser.zero_grad()
                    z, stage = x, 0
                    for layer in net.body:
                        if isinstance(layer, (nn.Conv2d, nn.Flatten)) and z is not x:  # a stage is over
                            z = jittered(z, own[stage], between[stage], prob, momentum)
                            stage += 1
                        z = layer(z)
                    F.cross_entropy(net.head(z), y).backward()  # type: ignore[no-untyped-call]
                    optimiser.step()
            models.append(read(net))
            sizes.append(float(world.size(client)))
            seen.append(own)
        server = mean(models, sizes)
        p = torch.tensor(sizes) / sum(sizes)
        for stage, one in enumerate(torch.stack(column) for column in zip(*seen, strict=True)):
            known[stage] = (p[:, None, None] * one).sum(0)
            between[stage] = one.var(0)
    travelling = [row.flatten() for pair in zip(known, between, strict=True) for row in pair]
    return Model(server.weights, torch.cat(travelling))


def jittered(x: Tensor, known: Tensor, between: Tensor, prob: float, momentum: float) -> Tensor:
    """The augmentation; `known` is updated."""
    if len(x) < 2 or float(torch.rand(())) >= prob:
        return x
    noise = torch.randn(2, *x.shape[:2])
    mu, sigma = x.mean((2, 3)), ((x - x.mean((2, 3), keepdim=True)).square().mean((2, 3)) + 1e-6).sqrt()
    jittered = []
    for row, values in enumerate((mu, sigma)):
        known[row] = momentum * known[row] + (1 - momentum) * values.detach().mean(0)
        v = between[row] + 1e-6
        w = v / (v + 1)
        gamma = w / w.mean()
        jittered.append(values + noise[row] * torch.sqrt((1 + gamma) * (values.var(0) + 1e-6)))
    mean, std, new_mean, new_std = (one[:, :, None, None] for one in (mu, sigma, *jittered))
    return (x - mean) / std * new_std + new_mean


def ccvr(world: World, samples: int, diagonal: bool, jitter: float, lr: float, momentum: float) -> Model:
    """FedAvg, then two epochs of the classifier on virtual features, in batches of 16."""
    server = fedavg(world)
    net = world.net()
    write(net, server)
    net.eval()
    classes = world.federation.dataset.classes
    clients = [world.federation.client(k) for k in range(world.clients)]
    means: list[list[Tensor]] = [[] for _ in range(classes)]
    spreads: list[list[Tensor]] = [[] for _ in range(classes)]
    sizes: list[list[int]] = [[] for _ in range(classes)]
    for data in clients:
        z = net(data.prepare(data.x, None)).features.detach().double()
        for c in set(data.y.tolist()):
            own = z[data.y == c]
            spread = torch.cov(own.T) if len(own) > 1 else torch.zeros(net.width, net.width)
            sizes[c].append(len(own))
            means[c].append(own.mean(0).float().double())  # as it travels
            spreads[c].append(spread.float().double())
    centres, covariances = [], []
    for c in range(classes):
        n = torch.tensor(sizes[c], dtype=torch.float64)
        mu = torch.stack(means[c])
        centre = (n[:, None] * mu).sum(0) / n.sum()
        inside = sum((n_k - 1) * s for n_k, s in zip(n, spreads[c], strict=True))
        outside = sum(n_k * torch.outer(m - centre, m - centre) for n_k, m in zip(n, mu, strict=True))
        centres.append(centre)
        covariances.append((inside + outside) / (n.sum() - 1))
    delta = jitter * float(torch.stack([s.diagonal() for s in covariances]).mean())
    draw = generator(world.seed, world.rounds, "server", "virtual features")
    virtual = []
    for centre, spread in zip(centres, covariances, strict=True):
        shape = spread.diagonal().diag() if diagonal else spread
        u, s, _ = torch.linalg.svd(shape + delta * torch.eye(net.width))
        noise = torch.randn(samples, net.width, generator=draw, dtype=torch.float64)
        virtual.append(centre + noise @ (u @ s.sqrt().diag() @ u.T))
    z, y = torch.cat(virtual).float(), torch.arange(classes).repeat_interleave(samples)
    order = generator(world.seed, world.rounds, "server", "virtual batches")
    optimiser = torch.optim.SGD(net.head.parameters(), lr=lr, momentum=momentum)
    for _ in range(2):
        for index in torch.split(torch.randperm(len(y), generator=order), 16):
            optimiser.zero_grad()
            F.cross_entropy(net.head(z[index]), y[index]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return read(net)
