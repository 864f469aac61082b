"""One round at one client: a pure function of the method, its own data, its own keep and the mail.

    mail ─► init_client (no state yet) ─► install ─► before_training
                                                          │
              ┌───────────────────────────────────────────▼──────────┐
              │ for each phase, epoch, batch:                        │
              │     task + Σ loss ─► backward ─► gradient wrappers   │
              │     one optimiser step                               │
              └──────────────────────┬───────────────────────────────┘
                                     ▼
                  after_training ─► upload ─► seal ─► after_upload ─► reply, keep

An evaluation takes the short way: mail ─► init_client (no state yet) ─► install ─► adapt ─► predict; so does a question
about the new global model: mail ─► answer.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fedalloy.core.alloy import Alloy, Mechanism
from fedalloy.core.frozen import Frozen
from fedalloy.core.net import Outputs
from fedalloy.core.random import generator, seeded
from fedalloy.core.state import Phase, State
from fedalloy.core.training import Local
from fedalloy.core.views import EVAL_BATCH, ClientData, Info, Oracle, Part, StepView, outputs
from fedalloy.core.wire import Items, Mail, Reply, finite
from fedalloy.errors import renamed
from fedalloy.models.chain import descend
from fedalloy.round.replica import BATCHNORM, Replica

AT_ONCE = 2**20  # a client with no more numbers than this has them prepared all at once


class Client:
    """What mechanisms see of a client during a round."""

    def __init__(
        self,
        method: Alloy,
        replica: Replica,
        data: ClientData,
        info: Info,
        local: Local,
        keep: Items,
        mail: Mail,
        seed: int,
        secret: int = 0,
    ) -> None:
        self.method = method
        self.replica = replica
        self.net = replica.net
        self.weights = replica.weights
        self.data = data
        self.info = info
        self.local = local
        self.id = mail.client
        self.round = mail.round
        self.seed = seed
        self.secret = secret  # what this client's noise is drawn from; nobody else's business
        self.steps = 0
        self.seen = 0
        items = replica.unpack("down", mail.items, replica.initial[replica.shared], mail.round)
        self.states = {
            piece.label: State(
                persistent=_copied(_items_of(keep, piece.label)), received=_items_of(items, piece.label)
            )
            for piece in method
        }
        self._task, self._terms = method.claimant("task"), method.with_hook("loss")  # once, not at every step
        replica.reset()
        if keep:
            replica.put_own(keep)
        else:
            self._each("init_client")
        self._each("install")
        self.received = self.weights.flat.clone()  # the model before anything is trained
        self.received_buffers = self.weights.buffers.clone()

    @property
    def lr(self) -> float:
        return self.local.rate(self.round)

    def state_of(self, piece: Part) -> State:
        return self.states[piece.label]

    @property
    def site(self) -> Replica:
        renamed("Client.site", "replica")
        return self.replica

    def box(self, piece: Part) -> State:
        renamed("Client.box", "state_of")
        return self.state_of(piece)

    def rng(self, *purpose: int | str) -> torch.Generator:
        """A generator of this client's own in this round."""
        return generator(self.seed, self.round, self.id, *purpose)

    def frozen(self, flat: Tensor, buffers: Tensor) -> Frozen:
        """The net with other weights, to look at: eval mode, no gradient."""
        return self.replica.frozen(flat, buffers)

    @torch.no_grad()
    def outputs(self, x: Tensor, frozen: Frozen | None = None) -> Iterator[Outputs]:
        """The model as it stands, or a frozen one, over stored samples: eval mode, no augmentation, no gradient."""
        training = self.net.training
        self.net.eval()
        yield from outputs(frozen or self.net, self.data, x)
        self.net.train(training)

    def step(self, x: Tensor, y: Tensor, index: Tensor, epoch: int) -> "Step":
        """A batch of one's own, to take a gradient on."""
        return Step(self, x, y, index, epoch)

    def full_gradient(self, flat: Tensor) -> Tensor:
        """The gradient of the local objective at other weights, over all samples as stored; eval mode, no trace."""
        now, buffers = self.weights.flat.clone(), self.weights.buffers.clone()
        self.weights.load(flat, self.received_buffers)
        total = torch.zeros_like(self.weights.grad)
        for index in torch.split(torch.arange(self.data.samples), EVAL_BATCH):
            step = Step(self, self.data.prepare(self.data.x[index], None), self.data.y[index], index, 0)
            total += self._innermost(step) * (len(index) / self.data.samples)
        self.weights.load(now, buffers)
        return total

    def plain_gradient(self, step: StepView) -> Tensor:
        """The gradient of cross-entropy alone, at the weights as they stand."""
        return self._gradient(step, cross_entropy)

    def train(self) -> float:
        """All phases of local training; the mean loss per step."""
        self._each("before_training")
        oracle = self._onion()
        losses: list[Tensor] = []
        for number, phase in enumerate(self._phases()):
            for step in self._descend(number, phase, oracle, self.data):
                self.steps += 1
                self.seen += len(step.y)
                losses.append(step.value)
        self._rest()
        self._each("after_training")
        return float(torch.stack(losses).double().mean()) if losses else 0.0

    def fit(
        self, stream: int | str, phase: Phase, oracle: Oracle | None = None, data: ClientData | None = None
    ) -> None:
        """Training beside that of the method: the weights as they stand, by default on cross-entropy alone.

        Batches are drawn from the given stream; 0 is that of the method's own first phase.
        """
        for _ in self._descend(stream, phase, oracle or self.plain_gradient, data or self.data):
            pass
        self._rest()

    def finish(self) -> Items:
        """Every mechanism's upload, checked against what it declared, sealed where a part does so."""
        items: Items = {}
        for piece in self.method:
            sent = piece.upload(self, self.state_of(piece))
            assert sent.keys() == piece.up.keys(), (
                f"{piece} declared {sorted(piece.up)} but sent {sorted(sent)}"
            )
            items |= {f"{piece.label}.{name}": value for name, value in sent.items()}
        shared = self.received[self.replica.shared]
        sealer = self.method.claimant("seal")
        sealed = sealer.seal(self, self.state_of(sealer), items) if sealer else items
        packed = self.replica.pack("up", sealed, shared, self.round)
        seen = self.replica.unpack("up", packed, shared, self.round) if sealer else items
        for piece in self.method.with_hook("after_upload"):
            piece.after_upload(self, self.state_of(piece), seen)
        return packed

    def as_sent(self, value: Tensor) -> Tensor:
        """What the server will see of an additive value: the value itself unless a codec is at work."""
        return self.replica.as_sent(value, self.round)

    @torch.no_grad()
    def examine(self) -> dict[str, float | Tensor]:
        """What the mechanisms show of this client after training."""
        found: dict[str, float | Tensor] = {}
        for piece in self.method.with_hook("examine_client"):
            found |= piece.examine_client(self, self.state_of(piece))
        return found

    def keep(self) -> Items:
        """What survives until this client is asked again: its mechanisms' state, and the weights that nobody shares."""
        held = {
            f"{label}.{name}": value.detach()
            for label, box in self.states.items()
            for name, value in box.persistent.items()
        }
        return held | self.replica.own()

    def _each(self, hook: str) -> None:
        with torch.no_grad():
            for piece in self.method.with_hook(hook):
                getattr(piece, hook)(self, self.state_of(piece))

    def _phases(self) -> Sequence[Phase]:
        if claimant := self.method.claimant("phases"):
            phases = claimant.phases(self, self.state_of(claimant), self.local.epochs)
            if phases is not None:
                return phases
        return [Phase(self.local.epochs, steps=self.local.steps)]

    def _descend(self, stream: int | str, phase: Phase, oracle: Oracle, data: ClientData) -> "Iterator[Step]":
        """One phase with a fresh optimiser, step by step."""
        span = self.weights.open(phase.part)
        if span.start == span.stop:  # nothing to train
            return
        leaf = self.weights.flat[span].detach()
        local = self.local.as_plain_sgd if phase.plain else self.local
        optimiser = local.optimiser(leaf, self.lr if phase.lr is None else phase.lr)
        self.replica.mode(training=True)
        if phase.freeze_bn:
            self._freeze_statistics_of_all_but(phase.part)
        for step in self._steps(stream, phase, data):
            optimiser(oracle(step)[span])
            yield step

    def _rest(self) -> None:
        """Training is over: nothing is frozen any more, and the model is as it will be used."""
        self.weights.open("")
        self.replica.mode(training=False)

    def _freeze_statistics_of_all_but(self, part: str) -> None:
        span = self.weights.buffer_span(part)
        for name, (start, stop) in self.weights.buffer_layout.spans.items():
            module = self.net.get_submodule(name.rpartition(".")[0])
            if isinstance(module, BATCHNORM) and not (span.start <= start and stop <= span.stop):
                module.eval()

    def _steps(self, stream: int | str, phase: Phase, data: ClientData) -> "Iterator[Step]":
        """The batches of one phase: `epochs` passes over the data, or a fixed number of steps."""
        size, most = self.local.batch, phase.steps
        done, epoch = 0, 0
        while epoch < phase.epochs if most is None else done < most:
            before = done
            order = torch.randperm(data.samples, generator=self.rng(stream, epoch, "batches"))
            x, y = data.x[order], data.y[order]  # permuted once: a batch is a slice
            augment = self.rng(stream, epoch, "augment") if data.prepare.augments else None
            prepare: Callable[[Tensor, torch.Generator | None], Tensor] = data.prepare
            if augment is None and x.numel() <= AT_ONCE:
                x, prepare = data.prepare(x, None), _ready
            counter = (self.seed, self.round, self.id, stream, epoch, "dropout")
            with (
                nullcontext() if self.replica.chain else seeded(*counter, device=self.replica.device)
            ):  # a chain draws nothing
                for a in range(0, data.samples, size):
                    if done == most:
                        break
                    if min(size, data.samples - a) == 1 and self.replica.has_batchnorm:
                        continue  # train-mode BatchNorm cannot normalise a single sample
                    done += 1
                    cut = slice(a, a + size)
                    yield Step(self, prepare(x[cut], augment), y[cut], order[cut], epoch)
            epoch += 1
            if done == before:  # nothing to train on, however many passes
                break

    def _innermost(self, step: StepView) -> Tensor:
        """The gradient of task and losses at the weights as they stand."""
        return self._gradient(step, self.objective if self._task or self._terms else cross_entropy)

    def _gradient(self, step: StepView, objective: Callable[[StepView], Tensor]) -> Tensor:
        if objective is cross_entropy and self.replica.chain and self.weights.all_open:
            step.out, step.value = descend(self.replica.chain, step.x, step.y)  # the same bits, in less time
            return self.weights.grad
        return self._backward(step, objective)

    @torch.enable_grad()
    def _backward(self, step: StepView, objective: Callable[[StepView], Tensor]) -> Tensor:
        self.weights.grad.zero_()
        step.out = self.net(step.x)
        loss = objective(step)
        loss.backward()  # type: ignore[no-untyped-call]
        step.value = loss.detach()
        return self.weights.grad

    def objective(self, step: StepView) -> Tensor:
        """Task and losses of a batch after its forward pass, as a graph."""
        loss = self._task.task(step, self.state_of(self._task)) if self._task else None
        if loss is None:
            loss = cross_entropy(step)
        for piece in self._terms:
            term = piece.loss(step, self.state_of(piece))
            if term is not None:
                loss = loss + term
        return loss

    def _onion(self) -> Oracle:
        """The gradient as the method sees it: wrappers around task and losses, first mechanism innermost."""
        oracle: Oracle = self._innermost
        for piece in self.method.with_hook("gradient"):
            oracle = partial(_wrapped, piece, self.state_of(piece), oracle)
        return oracle


@torch.no_grad()
def _wrapped(piece: Mechanism, box: State, inner: Oracle, step: StepView) -> Tensor:
    return piece.gradient(step, box, inner)


class Step:
    """One batch: what losses and gradient wrappers look at."""

    out: Outputs  # the main model on this batch, in the latest forward pass
    value: Tensor  # the loss of that pass

    def __init__(self, client: Client, x: Tensor, y: Tensor, index: Tensor, epoch: int) -> None:
        self.client = client
        self.x, self.y, self.index, self.epoch = x, y, index, epoch

    @property
    def weights(self) -> Tensor:
        """The flat weights at this moment."""
        return self.client.weights.flat

    def seen_by(self, frozen: Frozen) -> Outputs:
        """A frozen model on this batch; samples that are not augmented are looked up from the second epoch on."""
        data = self.client.data
        return frozen(self.x) if data.prepare.augments else frozen.once(self.x, self.index, data.samples)


def _ready(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Of samples that are prepared already."""
    return x


def cross_entropy(step: StepView) -> Tensor:
    return F.cross_entropy(step.out.logits, step.y)


def client_round(
    method: Alloy,
    replica: Replica,
    data: ClientData,
    info: Info,
    local: Local,
    keep: Items,
    mail: Mail,
    seed: int,
    secret: int = 0,
) -> tuple[Reply, Items]:
    """Train once on what the mail brought; a client that blows up keeps the state it came with."""
    began = time.perf_counter()
    client = Client(method, replica, data, info, local, keep, mail, seed, secret)
    loss = client.train()
    with torch.no_grad():
        due = local.diagnose_every and mail.round % local.diagnose_every == 0
        notes = {name: v for name, v in client.examine().items() if isinstance(v, float)} if due else {}
        items = client.finish()
        kept = client.keep()
    if kept and not (math.isfinite(loss) and all(map(finite, (*items.values(), *kept.values())))):
        kept = keep  # the server refuses such a reply; a state that is not finite would spoil all later ones
    for box in client.states.values():
        box.scratch.clear()  # what holds the client would keep its vectors until a collector comes
    seconds = time.perf_counter() - began
    return Reply(
        mail.round, mail.client, items, data.samples, client.steps, client.seen, loss, seconds, notes
    ), kept


@torch.no_grad()
def client_told(method: Alloy, replica: Replica, data: ClientData, mail: Mail) -> Reply:
    """What a client tells the mechanism that asks, of the model that the mail brought."""
    began = time.perf_counter()
    label = next(iter(mail.items)).partition(".")[0]
    asker = next(piece for piece in method if piece.label == label)
    replica.showing("global", mail.items[f"{label}.weights"], mail.items[f"{label}.buffers"])
    told = asker.answer(replica, data)
    assert told.keys() == asker.query.keys(), (
        f"{asker} declared {sorted(asker.query)} but told {sorted(told)}"
    )
    items = {f"{label}.{name}": value for name, value in told.items()}
    return Reply(mail.round, mail.client, items, data.samples, seconds=time.perf_counter() - began)


def personal_client(
    method: Alloy,
    replica: Replica,
    data: ClientData,
    info: Info,
    local: Local,
    keep: Items,
    mail: Mail,
    seed: int,
) -> Client:
    """A client with its own model as it would be used."""
    client = Client(method, replica, data, info, local, keep, mail, seed)
    client._each("adapt")
    return client


def client_model(
    method: Alloy,
    replica: Replica,
    data: ClientData,
    info: Info,
    local: Local,
    keep: Items,
    mail: Mail,
    seed: int,
) -> Callable[[Tensor], Tensor]:
    """The client's own model as it would be used: a function from stored samples to scores."""
    client = personal_client(method, replica, data, info, local, keep, mail, seed)
    claimant = method.claimant("predict")

    @torch.inference_mode()
    def scores(x: Tensor) -> Tensor:
        said = []
        for out in client.outputs(x):
            step = Step(client, x, x, x, 0)
            step.out = out
            own = claimant.predict(step, client.state_of(claimant)) if claimant else None
            said.append(out.logits if own is None else own)
        return torch.cat(said) if said else client.weights.flat.new_empty(0, data.classes)

    return scores


def _items_of(items: Items, label: str) -> Items:
    """One mechanism's own items."""
    prefix = label + "."
    return {key.removeprefix(prefix): value for key, value in items.items() if key.startswith(prefix)}


def _copied(items: Items) -> Items:
    return {key: value.clone() for key, value in items.items()}
