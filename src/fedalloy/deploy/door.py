"""The one way out of a site: every answer, refusal and error is written down before it leaves."""

import logging
import re
from collections.abc import Callable
from datetime import UTC, datetime

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage

from fedalloy.deploy.audit import Audit, Entry
from fedalloy.deploy.errors import told
from fedalloy.deploy.records import ERRANDS, FACTS

RUN = re.compile(r"[0-9a-f]{32}")
ROUND = re.compile(r"[0-9]{1,9}")
QUERIES = ("hello", "statistics")  # what is asked beside mail, by the name of its record

Answer = Callable[[], tuple[Message, float | None]]  # a message, and the epsilon spent so far

log = logging.getLogger("fedalloy")


def leave(question: Message, audit: Audit, answer: Answer, to: str = "") -> Message:
    """The answer to a message, or an error that says no more than its code; an `AuditError` if nothing may leave."""
    entry = asked(question)
    try:
        reply, epsilon = answer()
    except Exception as error:
        log.exception("a message could not be answered")
        reply, epsilon = (
            Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, told(error)), reply_to=question),
            None,
        )
        entry["kind"] = "error"
    slots = sizes(reply)
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    audit.append(
        {"time": now, "to": to, **entry, "slots": slots, "bytes": sum(slots.values()), "epsilon": epsilon}
    )
    return reply


def asked(question: Message) -> Entry:
    """What the audit log says of a question; the words of a server are believed only where they are plain."""
    content = question.content if question.has_content() else RecordDict()
    facts = content.get(FACTS)
    run = facts.get("run") if isinstance(facts, ConfigRecord) else None
    group = question.metadata.group_id
    return {
        "run": run if isinstance(run, str) and RUN.fullmatch(run) else None,
        "flower_run": question.metadata.run_id,
        "round": int(group) if ROUND.fullmatch(group) else None,
        "kind": _kind(content),
    }


def _kind(content: RecordDict) -> str:
    """What was asked for: hello, train, evaluate, tell, a step of secure aggregation, ..."""
    steps, facts = content.get(RECORD_KEY_CONFIGS), content.get(FACTS)
    if isinstance(steps, ConfigRecord):
        stage = steps.get(Key.STAGE)
        return f"masked {stage}" if stage in Stage.all() else "masked"
    for name in QUERIES:
        if name in content:
            return name
    errand = facts.get("errand") if isinstance(facts, ConfigRecord) else None
    return str(errand) if isinstance(errand, str) and errand in ERRANDS else "query"


def sizes(reply: Message) -> dict[str, int]:
    """Bytes of everything in a message: arrays by their names, other records as they are written."""
    if reply.has_error():
        return {"error": len((reply.error.reason or "").encode())}
    slots: dict[str, int] = {}
    for name, record in reply.content.items():
        if isinstance(record, ArrayRecord):
            slots |= {key: len(array.data) for key, array in record.items()}
        else:
            slots[name] = len(record.deflate())
    return slots
