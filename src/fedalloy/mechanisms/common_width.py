"""CommonWidth: features of one width from different architectures."""

from dataclasses import dataclass

from torch import nn

from fedalloy.core.alloy import Mechanism
from fedalloy.core.parameters import Width
from fedalloy.core.views import ReplicaView
from fedalloy.errors import FedAlloyError


@dataclass(frozen=True)
class CommonWidth(Mechanism):
    """Features are averaged (adaptive mean pooling) to one width, by default the smallest of the federation.

    A net that has this width already is left alone; the others get a head that fits.
    """

    width: Width | None = None

    claims = frozenset({"the width of features"})

    def build(self, replica: ReplicaView) -> None:
        width = self.width or min(replica.width_of(model) for model in replica.models)
        net = replica.net
        if width == net.width:
            return
        changed = [name for name, _ in net.named_children() if name not in ("body", "neck", "head", "aux")]
        if changed or not isinstance(net.neck, nn.Identity):
            raise FedAlloyError(
                f"{self} changes the features, which the net's {', '.join(changed) or 'neck'} reads; "
                "write it before the part that added this"
            )
        net.body = nn.Sequential(net.body, nn.AdaptiveAvgPool1d(width))
        net.head = nn.Linear(width, replica.inputs.classes, bias=getattr(net.head, "bias", None) is not None)
        net.width = width
