"""Which replies can be used: asked for, of this round, as declared. The others are refused by name."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedalloy.core.wire import Reply, Spec, bytes_of, refusal
from fedalloy.errors import FedAlloyError, plain

Check = Callable[[Reply], str | None]  # why a reply cannot be used, or None


@dataclass
class Outcome:
    """What one round brought."""

    accepted: list[Reply] = field(default_factory=list)  # without their items, once these are folded
    refused: dict[int, str] = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)


def usable(
    round: int,
    expected: Sequence[int],
    replies: Iterable[Reply],
    declared: Mapping[str, Spec],
    outcome: Outcome,
    *,
    weighed: bool = False,
    read: Callable[[Reply], Reply] = lambda reply: reply,
    doubt: Check = lambda reply: None,
) -> Iterator[Reply]:
    """Check every reply, in ascending client id; what came and what was refused goes into the outcome.

    `weighed`: each says how many samples it stands for. `read` undoes what a reply was packed into, and may raise a
    FedAlloyError. `doubt` knows what the declared types and shapes cannot say.
    """
    due = set(expected)
    for reply in in_order(sorted(expected), replies):
        for key, count in bytes_of(reply.items).items():
            outcome.bytes_up[key] = outcome.bytes_up.get(key, 0) + count
        why = _stray(reply, round, expected, due) or refusal(reply, declared, weighed=weighed)
        try:
            found = reply if why else read(reply)
            why = why or doubt(found)
        except FedAlloyError as error:
            why = str(error)
        if why:
            outcome.refused.setdefault(reply.client, plain(why))
            continue
        outcome.accepted.append(replace(reply, items={}))
        yield found


def _stray(reply: Reply, round: int, expected: Sequence[int], due: set[int]) -> str | None:
    """Why nobody waits for a reply, or None; `due` are the clients that have not answered yet."""
    if reply.client not in due:
        return "answered twice" if reply.client in expected else "was not asked"
    due.remove(reply.client)
    return None if reply.round == round else f"answered round {reply.round}"


def in_order(expected: Sequence[int], replies: Iterable[Reply]) -> Iterator[Reply]:
    """Replies in ascending client id, each as soon as all before it are there: sums are always taken in this order.

    What nobody waits for comes last.
    """
    waiting: dict[int, Reply] = {}
    strays: list[Reply] = []
    missing = set(expected)
    ahead = iter(expected)
    due = next(ahead, None)
    for reply in replies:
        if reply.client not in missing:
            strays.append(reply)
            continue
        missing.remove(reply.client)
        waiting[reply.client] = reply
        while due in waiting:
            yield waiting.pop(due)
            due = next(ahead, None)
    yield from (waiting[client] for client in sorted(waiting))
    yield from strays
