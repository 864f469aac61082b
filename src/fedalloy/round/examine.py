"""Look inside a model during a run: numbers for each round."""

import statistics
from collections.abc import Sequence

import torch

from fedalloy.core.diagnostics import Seen, generic
from fedalloy.core.views import EVAL_BATCH, Findings
from fedalloy.core.wire import Reply
from fedalloy.data.federation import Federation
from fedalloy.round.server import Server


def examine(server: Server, federation: Federation) -> Findings:
    """Everything the server's model and the mechanisms there show; where nothing is shared, nothing."""
    seen = look(server, federation)
    if seen is None:
        return {}
    found = generic(seen)
    for piece in server.method.with_hook("examine"):
        found |= piece.examine(server, server.state_of(piece), seen)
    return found


@torch.no_grad()
def look(server: Server, federation: Federation) -> Seen | None:
    """The global model over the global test set, or an auxiliary one where that is what clients share."""
    name, model = next(((n, m) for n, m in server.shown().items() if n in ("global", "aux")), ("", None))
    if model is None:
        return None
    net, index = server.replica.showing(name, *model), federation.split.global_test
    x = federation.dataset.x
    outs = [net(federation.prepare(x[batch], None)) for batch in torch.split(index, EVAL_BATCH)]
    features, embedding, logits = (torch.cat(column) for column in zip(*outs, strict=True))
    same = outs[0].embedding is outs[0].features
    return Seen(net, features, features if same else embedding, logits, federation.dataset.y[index])


def numbers(found: Findings) -> dict[str, float]:
    """The findings that are plain numbers."""
    return {name: value for name, value in found.items() if isinstance(value, float)}


def mean_notes(replies: Sequence[Reply]) -> dict[str, float]:
    """What clients noted, averaged over those that did."""
    names = dict.fromkeys(name for reply in replies for name in reply.notes)
    return {name: statistics.fmean(r.notes[name] for r in replies if name in r.notes) for name in names}
