"""A model asked about new samples: files in, a row for each sample out."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from fedalloy.core.files import write_whole
from fedalloy.errors import FedAlloyError, writing
from fedalloy.trained.files import load_model
from fedalloy.trained.model import Model, Prediction
from fedalloy.trained.readers import read


@dataclass(frozen=True)
class Predictions:
    """What a model says of the samples of a file or folder."""

    class_names: tuple[str, ...]
    titles: tuple[str, ...]  # of the samples: file names, or rows from 1
    rows: tuple[Prediction, ...]
    labels: tuple[int, ...] | None = None  # where the samples came with labels
    ignored: tuple[str, ...] = ()  # columns that the model does not read

    @property
    def accuracy(self) -> float | None:
        """The share of right answers, where the samples came with labels."""
        if not self.labels:
            return None
        right = sum(row.label == label for row, label in zip(self.rows, self.labels, strict=True))
        return right / len(self.labels)

    def to_csv(self) -> str:
        """A line for each sample: title, label if there is one, class, its probability, and those of all classes."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        known = ["label"] if self.labels else []
        writer.writerow(
            ["sample", *known, "predicted", "probability", *(f"p({c})" for c in self.class_names)]
        )
        for number, (title, row) in enumerate(zip(self.titles, self.rows, strict=True)):
            label = [self.class_names[self.labels[number]]] if self.labels else []
            writer.writerow(
                [title, *label, row.name, f"{row.probability:.6f}", *(f"{p:.6f}" for p in row.probabilities)]
            )
        return text.getvalue()


def predict(
    model: str | Path | Model, samples: str | Path, out: str | Path | None = None, *, allow_code: bool = False
) -> Predictions:
    """Ask a model about the samples in a CSV or npz file, an image, or a folder of images.

    >>> import fedalloy as fa, numpy as np
    >>> fed = fa.federate("digits", clients=2, skew="iid")
    >>> result = fa.train(fed, rounds=1, engine="inline")
    >>> np.savez(result.folder / "new.npz", x=fed.dataset.x[:3].numpy())
    >>> len(fa.predict(result.model, result.folder / "new.npz").rows)
    3
    """
    if out is not None and Path(out).exists():
        raise FedAlloyError(f"{out} exists already; give another --out")
    chosen = model if isinstance(model, Model) else load_model(model, allow_code=allow_code)
    found = read(Path(samples), chosen.preprocessing)
    rows = tuple(chosen.predict(found.x))
    made = Predictions(chosen.class_names, found.titles, rows, found.labels, found.ignored)
    if out is not None:
        with writing(Path(out)):
            write_whole(Path(out), made.to_csv().encode())
    return made
