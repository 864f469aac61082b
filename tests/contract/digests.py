"""Print the digest of every contract row on every engine: equal before and after a change, or the change changed bits.

python tests/contract/digests.py > before.json
"""

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "deploy")]

from loopback import Loopback  # noqa: E402
from test_contract import FED, GRID, Case  # noqa: E402

from fedalloy.deploy.server import serve  # noqa: E402
from fedalloy.experiment.run import Result  # noqa: E402
from fedalloy.round.vault import Vault  # noqa: E402


def over_flower(case: Case) -> tuple[str, str | None]:
    chosen = case.setup.config.model_dump(exclude_none=True, exclude={"engine", "workers", "timeout"})
    settings = {**chosen, "sites": "dealt", "run_folder": str(case.room / "flower"), "join_limit": 5.0}
    result = serve(Loopback(settings, case.room / "state", [{}] * FED.clients), settings)
    private = Vault(case.room / "state" / (result.folder / "run-id").read_text()).fingerprint()
    return result.summary["weights_sha256"], private


def digests(result: Result) -> tuple[str, str | None]:
    return result.summary["weights_sha256"], result.summary["private_sha256"]


def main() -> None:
    found: dict[str, Any] = {}
    for name, (row, model) in GRID.items():
        with TemporaryDirectory() as room:
            case = Case(row, model, Path(room))
            found[name] = {
                "inline": digests(case.result),
                "workers": digests(case.run("workers", engine="workers", workers=2)),
                "ray": digests(case.run("ray", engine="ray", workers=2)),
                "flower": over_flower(case),
            }
        print(name, file=sys.stderr, flush=True)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
