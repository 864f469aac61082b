"""A site's own model: kept on its own disk whenever it is tested, and nowhere else."""

import logging
from pathlib import Path

from fedalloy.core.files import PRIVATE, private_folder, write_whole
from fedalloy.core.wire import Mail
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.config import Config
from fedalloy.round.client import personal_client
from fedalloy.round.runtime import ClientRuntime, tiny_is_zero
from fedalloy.trained.take import as_used, carded
from fedalloy.trained.write import packed

FOLDER = "models"  # in a site's state: RUN-CLIENT.safetensors
log = logging.getLogger("fedalloy")


def keep_tested(state: Path, run: str, runtime: ClientRuntime, mail: Mail, config: Config) -> None:
    """Write the model that a test at this site has just judged, if it is this client's own."""
    method = runtime.method
    if not method.personal:
        return
    federation, replica = runtime.federation, runtime.replicas.of(mail.client)
    known = runtime.vault.load(mail.client, mail.round + 1)
    data = federation.client(mail.client)
    with tiny_is_zero():
        client = personal_client(
            method, replica, data, federation.info, config.local, known, mail, runtime.seed
        )
        net, head = as_used(client)
    how = federation.dataset.preprocessing
    try:
        model = carded(net, config, method, mail.round, how, replica.model, "personal", mail.client, head)
    except FedAlloyError as error:
        log.warning("run %s: %s; no model is kept", run, error)
        return
    file = state / FOLDER / f"{run}-{mail.client}.safetensors"
    private_folder(file.parent)
    write_whole(file, packed(model.program, model.card), PRIVATE)


def newest(folder: Path, client: int | None = None) -> Path | None:
    """The model that was kept last in a site's folder or its state; None where there is none."""
    places = (folder / FOLDER, folder / "state" / FOLDER)
    found = [
        file
        for place in places
        if place.is_dir()
        for file in place.glob(f"*-{'*' if client is None else client}.safetensors")
    ]
    return max(found, key=lambda file: (file.stat().st_mtime_ns, file.name), default=None)
