"""What a site's SuperNode sends to show its key."""

import base64
import datetime
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from flwr.supercore.primitives.asymmetric import sign_message
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from fedalloy.deploy.roster import read_key


def signed(folder: Path) -> dict[str, str]:
    """The headers of a call by the holder of the key in this folder."""
    key = serialization.load_ssh_private_key((folder / "key").read_bytes(), None)
    moment = datetime.datetime.now(datetime.UTC).isoformat()
    signature = sign_message(key, moment.encode())  # type: ignore[arg-type]
    return {
        "flwr-public-key": base64.b64encode(read_key(folder / "key.pub").encode()).decode(),
        "flwr-signature": base64.b64encode(signature).decode(),
        "flwr-timestamp": moment,
        "content-type": PROTOBUF_MEDIA_TYPE,
    }
