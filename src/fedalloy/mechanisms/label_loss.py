"""The plain loss on labels, for what a mechanism learns outside of the training steps."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedalloy.core.views import ClientView


@torch.enable_grad()
def label_loss(client: ClientView, index: Tensor) -> Tensor:
    """The mean cross-entropy on some of a client's training samples, with the weights as they stand.

    Eval mode and no augmentation, so no running statistic moves and no chance is involved. Other mechanisms' losses
    stay out: they count on a round that has begun, which it has not before `start` is over or in an evaluation.
    """
    client.replica.mode(training=False)
    logits = client.net(client.data.prepare(client.data.x[index], None)).logits
    return F.cross_entropy(logits, client.data.y[index])
