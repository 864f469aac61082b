"""Secure aggregation: Flower's SecAgg+ for methods of which the server needs nothing but sums.

Sites mask what they send so that only the sum over all of them can be read. After a masked round the server knows the
mean of every slot; each reply that it folds carries that mean, so that means and sums come out as they must.
"""

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import httpx
import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common import FitIns, FitRes, Parameters, Scalar, parameters_to_ndarrays
from flwr.server import LegacyContext
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.strategy import FedAvg
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import SecAggPlusWorkflow, WorkflowState
from flwr.serverapp import Grid
from flwr.supercore.run import Run, RunNotRunningException
from numpy.typing import NDArray

from fedalloy.core.alloy import Alloy
from fedalloy.core.wire import Mail, Reply, Spec
from fedalloy.deploy.post import LET_OUT, PAUSE, Lobby, Post, pulled, silent
from fedalloy.deploy.steps import Shape, check_answer, public_keys
from fedalloy.errors import FedAlloyError, plain

THRESHOLD = 0.67  # share of the sites that must stay until the end of a round
STEPS = 2**22  # of quantisation
MOST_SITES = 2**32 // STEPS - 1  # a sum over more would not fit the modulus
CLIP = 8.0  # values beyond this, times the site's share of the largest weight, are cut off


def check_maskable(method: Alloy) -> None:
    """Refuse a method that needs more than one kind of sum, and say what it is that it needs."""
    for piece in method:
        if piece.query:
            raise FedAlloyError(
                f"{method.title} asks clients about the new model ({piece}); that cannot be masked"
            )
    if claimant := method.claimant("weigh"):
        raise FedAlloyError(
            f"{method.title} weighs every reply by itself ({claimant}); that cannot be masked"
        )
    if looking := next(iter(method.with_hook("on_reply")), None):
        raise FedAlloyError(
            f"{method.title} looks at every reply by itself ({looking}); that cannot be masked"
        )
    slots = {f"{piece.label}.{name}": slot for piece in method for name, slot in piece.up.items()}
    for name, slot in slots.items():
        if slot.reduce not in ("mean", "uniform", "sum"):
            raise FedAlloyError(f"{method.title} sends {name}, which is not summed up; that cannot be masked")
        if not slot.dtype.is_floating_point:
            raise FedAlloyError(f"{method.title} sends {name} as whole numbers; that cannot be masked")
    plain = next((name for name, slot in slots.items() if slot.reduce != "mean"), None)
    if method.weighed and plain:
        raise FedAlloyError(
            f"{method.title} weighs some slots by samples but not {plain}; a masked round has one kind of weight"
        )


class MaskedPost(Post):
    """Training mail goes through SecAgg+; all else as ever."""

    def _exchange(self, mails: Sequence[Mail]) -> Iterator[Reply]:
        if not mails or mails[0].errand != "train":
            yield from super()._exchange(mails)
            return
        self.lobby.look()
        here = [mail for mail in mails if mail.client in self.lobby.guests]
        yield from (silent(mail, "is not connected") for mail in mails if mail not in here)
        nodes = {self.lobby.guests[mail.client].node: mail for mail in here}
        largest = float(self.runtime.federation.sizes.max()) if self.runtime.method.weighed else 1.0
        asked = {node: self.record(mail) for node, mail in nodes.items()}
        shapes = {node: [spec.shape for _, spec in self._slots(mail)] for node, mail in nodes.items()}
        sums = masked_mean(self.lobby, asked, shapes, self.limit, largest, round=mails[0].round)
        for node, mail in nodes.items():
            if node in sums.answered:
                yield self._reply(sums, node, mail)
            else:
                yield silent(mail, sums.lost.get(node, "did not stay until the end of a masked round"))

    def _reply(self, sums: "Sums", node: int, mail: Mail) -> Reply:
        """The mean of all, in the name of one of them."""
        items = {
            key: torch.from_numpy(value).to(spec.slot.dtype).reshape(spec.shape)
            for (key, spec), value in zip(self._slots(mail), sums.mean, strict=True)
        }
        return Reply(mail.round, mail.client, items, samples=sums.answered[node])

    def _slots(self, mail: Mail) -> list[tuple[str, Spec]]:
        """What a site sends, in the order of its names."""
        return sorted(self.runtime.replicas.of(mail.client).specs("up").items())


def masked_mean(
    lobby: Lobby,
    asked: dict[int, RecordDict],
    shapes: dict[int, list[Shape]],
    limit: float,
    largest: float = 1.0,
    clip: float = CLIP,
    round: int = 0,
) -> "Sums":
    """The mean of what these nodes answer, array by array, and which of them stayed until the end."""
    if len(asked) > MOST_SITES:
        raise FedAlloyError(
            f"secure aggregation adds up at most {MOST_SITES} sites, {len(asked)} take part; lower --participation"
        )
    checked = _Checked(lobby, shapes)
    sums = Sums(checked, asked)
    try:
        _Workflow(lobby, sums, largest, limit, clip)(checked, _context(sums, round))
    except (httpx.HTTPError, RunNotRunningException):  # the way is broken, or the run was stopped
        raise
    except Exception as error:  # shares look like noise: that they are wrong shows when they are put together
        sums.fail(f"no sum came out of a masked round, for somebody sent wrong shares ({plain(error)})")
    if not sums.plausible(largest, clip):
        sums.fail(
            "a masked sum came out that honest sites cannot have: somebody sent wrong shares or numbers"
        )
    sums.lost = checked.refused | sums.lost
    return sums


class _Checked(Grid):
    """A grid that hands on only answers of the right form, of nodes that are still in."""

    def __init__(self, lobby: Lobby, shapes: dict[int, list[Shape]]) -> None:
        self.lobby, self.shapes = lobby, shapes
        self.refused: dict[int, str] = {}  # by node

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """One step with all who take part; waits no longer than it may."""
        waiting: dict[str, Message] = {}
        for message in messages:
            waiting |= dict.fromkeys(self.lobby.grid.push_messages([message]), message)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        good: list[Message] = []
        while waiting:
            for name, answer in pulled(self.lobby.grid, list(waiting)):
                question = waiting.pop(name)
                try:
                    good.append(self._checked(question, answer))
                except FedAlloyError as error:
                    self.refused[question.metadata.dst_node_id] = str(error)
            if not waiting or time.monotonic() > deadline:
                break
            time.sleep(PAUSE)
        return self._distinct(good)

    def _checked(self, question: Message, answer: Message | str) -> Message:
        node = question.metadata.dst_node_id
        if isinstance(answer, str):
            raise FedAlloyError(answer)
        if not self.lobby.admitted(node):
            raise FedAlloyError(LET_OUT)
        if answer.has_error():
            raise FedAlloyError(f"failed: {plain(answer.error.reason)}")
        try:
            check_answer(question, answer, self.shapes[node])
        except FedAlloyError as error:
            raise FedAlloyError(f"breaks secure aggregation: {plain(error)}") from None
        return answer

    def _distinct(self, answers: list[Message]) -> list[Message]:
        """Without those who sent the same public key: all honest sites would refuse to go on with them."""
        often = Counter(key for answer in answers for key in public_keys(answer))
        twice = {key for key, count in often.items() if count > 1}
        bad = {answer.metadata.src_node_id for answer in answers if public_keys(answer) & twice}
        self.refused |= dict.fromkeys(bad, "breaks secure aggregation: sent a public key that others sent")
        return [answer for answer in answers if answer.metadata.src_node_id not in bad]

    # The rest of a grid is Flower's own.

    def set_run(self, run: Run) -> None:
        self.lobby.grid.set_run(run)

    @property
    def run(self) -> Run:
        return self.lobby.grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return self.lobby.grid.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        return self.lobby.grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self.lobby.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.lobby.grid.pull_messages(message_ids)


class _Workflow(SecAggPlusWorkflow):
    """SecAgg+ whose sites get FedAlloy's mail."""

    def __init__(self, lobby: Lobby, sums: "Sums", largest: float, limit: float, clip: float) -> None:
        super().__init__(
            1.0, THRESHOLD, max_weight=largest, clipping_range=clip, quantization_range=STEPS, timeout=limit
        )
        self.lobby, self.sums = lobby, sums

    def setup_stage(self, grid: Grid, context: LegacyContext, state: WorkflowState) -> bool:
        done = super().setup_stage(grid, context, state)
        state.nid_to_fitins = dict(self.sums.asked)
        return done

    def share_keys_stage(self, grid: Grid, context: LegacyContext, state: WorkflowState) -> bool:
        """Nobody masks with a site that left before this: nor may anybody be asked for its shares."""
        done = super().share_keys_stage(grid, context, state)
        here = set(state.active_node_ids)
        state.sampled_node_ids = here
        state.nid_to_neighbours = {node: state.nid_to_neighbours[node] & here for node in here}
        return done

    def unmask_stage(self, grid: Grid, context: LegacyContext, state: WorkflowState) -> bool:
        """Who is let out from here on is in the sum: nobody gets it, least of all one with and one without him."""
        summed = set(state.active_node_ids)
        done = self._all_in(summed) and super().unmask_stage(grid, context, state)
        return self._all_in(summed) and done

    def _all_in(self, nodes: set[int]) -> bool:
        gone = sorted(guest.client for guest in self.lobby.guests_at(nodes) if not self.lobby.admits(guest))
        if gone:
            who = ", ".join(map(str, gone))
            self.sums.fail(
                f"is in a masked sum with client {who}, which {LET_OUT}, and cannot be taken out of it"
            )
        return not gone


class Sums(FedAvg):
    """Names the sites of a round, and takes down the mean that comes out."""

    def __init__(self, grid: Grid, asked: dict[int, RecordDict]) -> None:
        super().__init__()
        self.grid, self.asked = grid, asked
        self.answered: dict[int, int] = {}  # samples by node
        self.mean: list[NDArray[np.float64]] = []
        self.lost: dict[int, str] = {}  # why, by node

    def plausible(self, largest: float, clip: float) -> bool:
        """Whether the mean is a whole number of steps above the least that so many sites can send, and not too many.

        Sites send the weight of their update masked too; had one lied about it, the steps would be of another size.
        """
        sites, step = len(self.answered), 2 * clip / STEPS
        weight = sum(round(samples / largest * STEPS) for samples in self.answered.values()) / STEPS
        for value in self.mean:
            steps = (value * weight + sites * clip) / step
            if not np.all(
                (np.abs(steps - np.round(steps)) < 0.01) & (steps > -1) & (steps < sites * STEPS + 1)
            ):
                return False
        return not self.mean or weight > 0

    def fail(self, why: str) -> None:
        """Nothing came out, for nobody."""
        self.answered, self.mean, self.lost = {}, [], dict.fromkeys(self.asked, why)

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        empty = Parameters([], "")
        return [(GridClientProxy(node, self.grid, 0), FitIns(empty, {})) for node in self.asked]

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        for proxy, found in results:
            self.answered[int(proxy.cid)] = found.num_examples
            self.mean = parameters_to_ndarrays(found.parameters)
        return None, {}


def _context(strategy: Sums, round: int) -> LegacyContext:
    plain = Context(run_id=0, node_id=0, node_config={}, state=RecordDict(), run_config={})
    context = LegacyContext(plain, strategy=strategy)
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: round})
    context.state.array_records[MAIN_PARAMS_RECORD] = ArrayRecord()
    return context
