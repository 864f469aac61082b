"""Methods with personal models as plain loops: state dicts, names and torch's own optimisers, no mechanism.

Data, the freshly built net and the order of the batches come from the library, as in `oracles.py`.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from oracles import World
from torch import Tensor, nn

from fedalloy.core.net import Net
from fedalloy.core.random import generator

State = dict[str, Tensor]


def state_of(net: Net) -> State:
    return {
        name: value.detach().clone() for name, value in net.state_dict().items() if value.is_floating_point()
    }


def split(state: State, personal: tuple[str, ...]) -> tuple[State, State]:
    """What all have in common, and what is personal, by the names of modules."""
    own = {name: value for name, value in state.items() if name.rpartition(".")[0] in personal}
    return {name: value for name, value in state.items() if name not in own}, own


def mean(states: list[State], sizes: list[float]) -> State:
    return {
        name: (
            sum((n * state[name].double() for n, state in zip(sizes, states, strict=True)), torch.tensor(0.0))
            / sum(sizes)
        ).float()
        for name in states[0]
    }


def passes(
    world: World, client: int, round: int, stream: int | str, epochs: int
) -> Iterator[tuple[Tensor, Tensor]]:
    data = world.federation.client(client)
    for epoch in range(epochs):
        draw = generator(world.seed, round, client, stream, epoch, "batches")
        for index in torch.split(torch.randperm(data.samples, generator=draw), world.batch):
            yield data.prepare(data.x[index], None), data.y[index]


def descend(
    world: World,
    net: Net,
    batches: Iterator[tuple[Tensor, Tensor]],
    lr: float,
    part: tuple[str, ...] | None = None,
    pull: tuple[float, State] | None = None,
) -> None:
    """SGD on the modules that are named, or on all, with a proximal term if asked for."""
    moving = [p for name, p in net.named_parameters() if part is None or name.rpartition(".")[0] in part]
    normed = any(isinstance(m, nn.BatchNorm1d) for m in net.modules())
    optimiser = torch.optim.SGD(moving, lr=lr, momentum=world.momentum)
    net.train()
    for x, y in batches:
        if normed and len(y) == 1:
            continue
        net.zero_grad()
        loss = F.cross_entropy(net(x).logits, y)
        if pull is not None:
            lam, anchor = pull
            for name, p in net.named_parameters():
                loss = loss + lam / 2 * ((p - anchor[name]) ** 2).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()


def fedper(world: World, personal: tuple[str, ...]) -> tuple[State, dict[int, State]]:
    """The common base and everybody's personal layers."""
    net = world.net()
    base, head = split(state_of(net), personal)
    heads = dict.fromkeys(range(world.clients), head)
    for round in range(1, world.rounds + 1):
        states, sizes = [], []
        for k in world.sampled(round):
            net.load_state_dict({**base, **heads[k]}, strict=False)
            descend(world, net, passes(world, k, round, 0, world.epochs), world.rate(round))
            end, heads[k] = split(state_of(net), personal)
            states.append(end)
            sizes.append(float(world.size(k)))
        base = mean(states, sizes)
    return base, heads


def fedrep(
    world: World, head_epochs: int, body_epochs: int, head_lr: float | None = None, uniform: bool = False
) -> tuple[State, dict[int, State]]:
    """The head first, then the body, each with an optimiser of its own."""
    net = world.net()
    body = tuple({name.rpartition(".")[0] for name, _ in net.body.named_parameters(prefix="body")})
    base, head = split(state_of(net), ("head",))
    heads = dict.fromkeys(range(world.clients), head)
    for round in range(1, world.rounds + 1):
        rate = world.rate(round)
        states, sizes = [], []
        for k in world.sampled(round):
            net.load_state_dict({**base, **heads[k]}, strict=False)
            head_rate = rate if head_lr is None else rate * head_lr / world.lr
            descend(world, net, passes(world, k, round, 0, head_epochs), head_rate, ("head",))
            descend(world, net, passes(world, k, round, 1, body_epochs), rate, body)
            end, heads[k] = split(state_of(net), ("head",))
            states.append(end)
            sizes.append(1.0 if uniform else float(world.size(k)))
        base = mean(states, sizes)
    return base, heads


def fedbabu(world: World, uniform: bool = False) -> State:
    """The body is trained and averaged, the head is in no optimiser; the whole model of the server."""
    net = world.net()
    body = tuple({name.rpartition(".")[0] for name, _ in net.body.named_parameters(prefix="body")})
    base, head = split(state_of(net), ("head",))
    for round in range(1, world.rounds + 1):
        states, sizes = [], []
        for k in world.sampled(round):
            net.load_state_dict({**base, **head}, strict=False)
            descend(world, net, passes(world, k, round, 0, world.epochs), world.rate(round), body)
            states.append(split(state_of(net), ("head",))[0])
            sizes.append(1.0 if uniform else float(world.size(k)))
        base = mean(states, sizes)
    return base


def right(world: World, model: State, client: int | None = None) -> int:
    """How many samples of a client's own test split, or of the global test set, a model gets right."""
    net = world.net()
    net.load_state_dict(model, strict=False)
    net.eval()
    if client is not None:
        data = world.federation.client(client)
        x, y = data.x_test, data.y_test
    else:
        index = world.federation.split.global_test
        x, y = world.federation.dataset.x[index], world.federation.dataset.y[index]
    return int((net(world.federation.prepare(x, None)).logits.argmax(1) == y).sum())


def tuned(world: World, base: State, epochs: int, lr: float) -> dict[int, State]:
    """Every client's copy of (theta, phi_0), all of it fine-tuned."""
    models = {}
    for k in range(world.clients):
        net = world.net()
        net.load_state_dict(base, strict=False)
        descend(world, net, passes(world, k, world.rounds, "finetune", epochs), lr)
        models[k] = state_of(net)
    return models


def ditto(
    world: World, lam: float, epochs: int, lr: float, uniform: bool = False
) -> tuple[State, dict[int, State]]:
    """The global model, and everybody's personal one."""
    net = world.net()
    start = w = state_of(net)
    v = dict.fromkeys(range(world.clients), start)
    for round in range(1, world.rounds + 1):
        states, sizes = [], []
        rate = world.rate(round)
        for k in world.sampled(round):
            net.load_state_dict(w, strict=False)
            descend(world, net, passes(world, k, round, 0, world.epochs), rate)
            states.append(state_of(net))
            sizes.append(1.0 if uniform else float(world.size(k)))
            net.load_state_dict(v[k], strict=False)
            own_rate = lr * world.lr_decay ** (round - 1)
            descend(world, net, passes(world, k, round, 0, epochs), own_rate, pull=(lam, w))
            v[k] = state_of(net)
        w = mean(states, sizes)
    return w, v
