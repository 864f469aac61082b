"""Bidirectional LSTM over word ids: Hochreiter and Schmidhuber, 1997; Graves and Schmidhuber, 2005."""

import torch
from torch import Tensor, nn

from fedalloy.core.net import Inputs, Net
from fedalloy.core.parameters import Width
from fedalloy.errors import FedAlloyError
from fedalloy.models.blocks import classifier


def bilstm(inputs: Inputs, *, embed: Width = 100, hidden: Width = 128) -> Net:
    """Bidirectional LSTM, then 256 and 128 units, as in FedDW's model for IMDB."""
    if inputs.vocab < 2:
        raise FedAlloyError(
            f"bilstm needs padding and at least one word; the vocabulary holds {inputs.vocab}"
        )
    body = nn.Sequential(Reader(inputs.vocab, embed, hidden))
    return classifier(body, 2 * hidden, inputs.classes, (256, 128))


class Reader(nn.Module):
    """Word ids to the last state of either direction: B T -> B 2H; zeros at the end are not read.

    The second direction reads each text turned round: a packed sequence, the usual way, trains far slower on a CPU.
    """

    def __init__(self, vocab: int, embed: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, embed, padding_idx=0)
        self.onward = nn.LSTM(embed, hidden, batch_first=True)
        self.inward = nn.LSTM(embed, hidden, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        last = torch.where(ids > 0, places, 0).amax(dim=1, keepdim=True)  # an empty text reads one padding
        # a graph that is exported reads the padding too: which states count is the same
        longest = ids.shape[1] if torch.compiler.is_exporting() else int(last.max()) + 1
        turned = ids.gather(1, (last - places).clamp(min=0))
        return torch.cat(
            [
                _last(lstm, self.embedding(text[:, :longest]), last)
                for lstm, text in ((self.onward, ids), (self.inward, turned))
            ],
            dim=1,
        )


def _last(lstm: nn.LSTM, words: Tensor, last: Tensor) -> Tensor:
    """The state after the last word of each text."""
    states: Tensor = lstm(words)[0]
    return states.gather(1, last[:, :, None].expand(-1, 1, states.shape[2])).squeeze(1)
