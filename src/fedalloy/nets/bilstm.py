"""Bidirectional LSTM over word ids: Hochreiter and Schmidhuber, 1997; Graves and Schmidhuber, 2005."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from fedalloy.errors import FedAlloyError
from fedalloy.nets.base import Inputs, Net
from fedalloy.nets.blocks import relu
from fedalloy.ranges import Width


def bilstm(inputs: Inputs, *, embed: Width = 100, hidden: Width = 128) -> Net:
    """Bidirectional LSTM, then 256 and 128 units, as in FedDW's model for IMDB."""
    if inputs.vocab < 2:
        raise FedAlloyError(
            f"bilstm needs padding and at least one word; the vocabulary holds {inputs.vocab}"
        )
    body = nn.Sequential(
        Reader(inputs.vocab, embed, hidden), nn.Linear(2 * hidden, 256), relu(), nn.Linear(256, 128), relu()
    )
    return Net(body, nn.Linear(128, inputs.classes))


class Reader(nn.Module):
    """Word ids to the last state of either direction: B T -> B 2H; zeros at the end are not read."""

    def __init__(self, vocab: int, embed: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, embed, padding_idx=0)
        self.lstm = nn.LSTM(embed, hidden, batch_first=True, bidirectional=True)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(1, ids.shape[1] + 1, device=ids.device)
        lengths = torch.where(ids > 0, places, 1).amax(dim=1).cpu()  # an empty text reads one padding
        words = pack_padded_sequence(self.embedding(ids), lengths, batch_first=True, enforce_sorted=False)
        _, (state, _) = self.lstm(words)
        return torch.cat([state[0], state[1]], dim=1)
