"""Secure aggregation: Flower's SecAgg+ for methods of which the server needs nothing but sums.

Sites mask what they send so that only the sum over all of them can be read. After a masked round the server knows the
mean of every slot; each reply that it folds carries that mean, so that means and sums come out as they must.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.common import FitIns, FitRes, Parameters, Scalar, parameters_to_ndarrays
from flwr.server import LegacyContext
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.strategy import FedAvg
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import SecAggPlusWorkflow, WorkflowState
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedalloy.alloy import Alloy
from fedalloy.errors import FedAlloyError
from fedalloy.flower.post import Post, silent
from fedalloy.wire import Mail, Reply

THRESHOLD = 0.67  # share of the sites that must stay until the end of a round
CLIP = 8.0  # values beyond this, times the site's share of the largest weight, are cut off


def check_maskable(method: Alloy) -> None:
    """Refuse a method that needs more than one kind of sum, and say what it is that it needs."""
    for piece in method:
        if piece.told:
            raise FedAlloyError(
                f"{method.title} asks clients about the new model ({piece}); that cannot be masked"
            )
    if claimant := method.claimant("weigh"):
        raise FedAlloyError(
            f"{method.title} weighs every reply by itself ({claimant}); that cannot be masked"
        )
    if looking := next(iter(method.with_hook("absorb")), None):
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
        largest = float(self.workshop.federation.sizes.max()) if self.workshop.method.weighed else 1.0
        strategy = _Sums(self.lobby.grid, {node: self.record(mail) for node, mail in nodes.items()})
        workflow = _Workflow(strategy, largest, self.limit)
        workflow(self.lobby.grid, _context(strategy, mails[0].round))
        for node, mail in nodes.items():
            if node in strategy.answered:
                yield self._reply(strategy, node, mail)
            else:
                yield silent(mail, "did not stay until the end of a masked round")

    def _reply(self, sums: "_Sums", node: int, mail: Mail) -> Reply:
        """The mean of all, in the name of one of them."""
        specs = self.workshop.sites.of(mail.client).specs("up")
        items = {
            key: torch.from_numpy(value).to(specs[key].slot.dtype).reshape(specs[key].shape)
            for key, value in zip(sorted(specs), sums.mean, strict=True)
        }
        return Reply(mail.round, mail.client, items, samples=sums.answered[node])


def masked_sum(
    grid: Grid, asked: dict[int, RecordDict], clip: float, limit: float
) -> tuple[list[NDArray[np.float64]], set[int]]:
    """The plain mean of what these nodes answer, array by array, and which of them stayed until the end."""
    strategy = _Sums(grid, asked)
    _Workflow(strategy, 1.0, limit, clip)(grid, _context(strategy, 0))
    return strategy.mean, set(strategy.answered)


class _Workflow(SecAggPlusWorkflow):
    """SecAgg+ whose sites get FedAlloy's mail."""

    def __init__(self, sums: "_Sums", largest: float, limit: float, clip: float = CLIP) -> None:
        super().__init__(1.0, THRESHOLD, max_weight=largest, clipping_range=clip, timeout=limit)
        self.sums = sums

    def setup_stage(self, grid: Grid, context: LegacyContext, state: WorkflowState) -> bool:
        done = super().setup_stage(grid, context, state)
        state.nid_to_fitins = dict(self.sums.asked)
        return done


class _Sums(FedAvg):
    """Names the sites of a round, and takes down the mean that comes out."""

    def __init__(self, grid: Grid, asked: dict[int, RecordDict]) -> None:
        super().__init__()
        self.grid, self.asked = grid, asked
        self.answered: dict[int, int] = {}  # samples by node
        self.mean: list[NDArray[np.float64]] = []

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


def _context(strategy: _Sums, round: int) -> LegacyContext:
    plain = Context(run_id=0, node_id=0, node_config={}, state=RecordDict(), run_config={})
    context = LegacyContext(plain, strategy=strategy)
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: round})
    context.state.array_records[MAIN_PARAMS_RECORD] = ArrayRecord()
    return context
