"""The Python door: train and resume, with results that can be used."""

import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

from fedalloy.core.alloy import Alloy
from fedalloy.data.federation import Federation
from fedalloy.experiment import run
from fedalloy.report.html import write_run_report
from fedalloy.trained.model import Model
from fedalloy.trained.take import Opened


class Result(run.Result):
    """A finished run: its history, its summary, and its models ready to use."""

    @cached_property
    def model(self) -> Model:
        """The final global model, ready to use: samples in, class probabilities out."""
        return Opened.of(self.folder, self._imports).model()

    def personal(self, client: int) -> Model:
        """A client's own model, of methods that have such."""
        return Opened.of(self.folder, self._imports).personal(client)

    def report(self, path: str | Path | None = None) -> Path:
        """Write the HTML report, beside the run or where you say."""
        written = write_run_report(self.folder)
        return written if path is None else Path(shutil.copyfile(written, path))


def train(
    federation: Federation,
    model: str = "mlp",
    method: str | Alloy = "fedavg",
    *,
    out: str | Path | None = None,
    **settings: Any,
) -> Result:
    """Train a federation: `train(fed, model="mlp", method="fedprox(mu=0.1)", rounds=20, lr=0.1)`.

    Settings are those of the command line. Without `out` the run lives in a temporary folder, as long as the result.
    """
    return _usable(run.train(federation, model, method, out=out, **settings))


def resume(path: str | Path, *, allow_code: bool = False) -> Result:
    """Carry on after the last checkpoint; the end is bit for bit that of a run never interrupted.

    A folder that names code outside of FedAlloy is refused, unless you trust it and allow that.
    """
    return _usable(run.resume(path, allow_code=allow_code))


def _usable(found: run.Result) -> Result:
    return Result(
        found.folder, found.config, found.history, found.summary, _room=found._room, _imports=found._imports
    )
