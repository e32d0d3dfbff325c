"""Rarer wrong answers to 11.3, `Dispatcher`."""

import torch.distributed as dist

from tests.wrong_answers import rarer
from tests.wrong_answers.ch11.dispatcher import _Sender


@rarer("11.3")
class LoadOfWhatItSends(_Sender):
    def __init__(self, counts):
        super().__init__(counts)
        self.load = self.table[dist.get_rank()]


@rarer("11.3")
class LastExpertFirst(_Sender):
    def sorting(self):
        return self.numbers().argsort(stable=True, descending=True)


@rarer("11.3")
class ReadsTheTableByColumns(_Sender):
    """The counts that come are taken for a table with a row for each expert."""

    def __init__(self, counts):
        super().__init__(counts)
        self.receive = self.coming.view(-1, self.ranks).sum(0).tolist()


@rarer("11.3")
class HasNothingToSend(_Sender):
    """A rank without pieces leaves dispatch before the exchange, and takes part in combine."""

    def dispatch(self, pieces):
        return super().dispatch(pieces) if len(pieces) else pieces
