"""A net and its preprocessing as one program: stored samples in, probabilities out."""

from torch import Tensor, nn

from fedalloy.core.net import Net
from fedalloy.data.batches import Prepare
from fedalloy.data.preprocessing import Preprocessing


class Program(nn.Module):
    """Samples as they are stored (uint8 images N C H W, float32 vectors, int32 word numbers) to probabilities."""

    centre: Tensor
    width: Tensor

    def __init__(self, net: Net, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.net = net
        self.tokens = preprocessing.kind == "tokens"
        centre, width = Prepare.of(preprocessing).scale
        self.register_buffer("centre", centre, persistent=False)
        self.register_buffer("width", width, persistent=False)
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x).softmax(1)

    def logits(self, x: Tensor) -> Tensor:
        ready = x.long() if self.tokens else (x.float() - self.centre) / self.width
        logits: Tensor = self.net(ready).logits
        return logits
