"""A site asks at the server's door why it is not let in, and gets words that its operator can use."""

import base64
import datetime
import email.utils
import ssl
from pathlib import Path

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

from fedalloy.deploy.roster import key_digest
from fedalloy.errors import FedAlloyError

DOOR = "/knock"  # answered by the gate itself: nothing of Flower's is asked
LIMIT = 10.0  # seconds


def check_bundle(bundle: Path) -> tuple[ec.EllipticCurvePrivateKey, ssl.SSLContext]:
    """The key and the authority of a site; an error that names the file that is neither."""
    try:
        key = serialization.load_ssh_private_key((bundle / "key").read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FedAlloyError(
            f"{bundle / 'key'} holds no private key; ask the server's operator for it, or make a pair with: "
            "ssh-keygen -t ecdsa -b 384 -N '' -f key; and send him key.pub"
        )
    try:
        return key, ssl.create_default_context(cafile=bundle / "ca.pem")
    except OSError:
        raise FedAlloyError(
            f"{bundle / 'ca.pem'} holds no certificate; ask the server's operator for it"
        ) from None


def refusal(bundle: Path, address: str, client: int) -> str | None:
    """Why the server does not let this site in; None if it does, or cannot be reached at all."""
    key, context = check_bundle(bundle)
    public = public_key_to_bytes(key.public_key())
    moment = datetime.datetime.now(datetime.UTC)
    headers = {
        FLEET_HTTP_PUBLIC_KEY_HEADER: base64.b64encode(public).decode(),
        FLEET_HTTP_SIGNATURE_HEADER: base64.b64encode(
            sign_message(key, moment.isoformat().encode())
        ).decode(),
        TIMESTAMP_HEADER: moment.isoformat(),
    }
    try:
        answer = httpx.post(f"https://{address}{DOOR}", headers=headers, verify=context, timeout=LIMIT)
    except httpx.HTTPError as error:
        if "certificate" not in str(error).lower():
            return None
        return (
            f"{address} does not prove who it is by the authority in {bundle / 'ca.pem'} ({error}); "
            "ask the server's operator for the ca.pem of today"
        )
    if answer.status_code != httpx.codes.UNAUTHORIZED:
        return None
    late = _late(answer.headers.get("date"), moment)
    if abs(late) > TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
        way = "behind" if late > 0 else "ahead of"
        return f"the clock of this machine is {abs(late):.0f} s {way} that of {address}; set it"
    return (
        f"this key is not registered: {address} does not know key {key_digest(public.decode())[:16]} of {bundle}; "
        f"send its key.pub to the server's operator, who types: fedalloy deploy key DIR site-{client} --pub key.pub"
    )


def _late(date: str | None, moment: datetime.datetime) -> float:
    """Seconds that this clock is behind the server's, as far as the answer tells."""
    try:
        return (email.utils.parsedate_to_datetime(date or "") - moment).total_seconds()
    except (ValueError, TypeError):
        return 0.0
