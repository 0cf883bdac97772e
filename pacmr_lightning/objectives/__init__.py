"""Preference objectives: here of two pairs with u = 2 and u = -2, at a noise rate of 0.2 where one is given.

>>> import torch
>>> from pacmr_lightning.batch import LogProbs
>>> from pacmr_lightning.rewards import Rewards
>>> zeros = torch.zeros(2)
>>> rewards = Rewards(LogProbs(torch.tensor([2.0, -2.0]), zeros), LogProbs(zeros, zeros), beta=1.0)
>>> both = [kind(1.0) for kind in (DPO, HolderDPO, IPO, R3M, ROPO, DrDPO)]
>>> both += [kind(1.0, 0.2) for kind in (CDPO, RDPO, RPOEM, AnnotatorRPOEM)]
>>> for objective in both:
...     print(type(objective).__name__, objective(rewards))
DPO tensor([0.1269, 2.1269])
HolderDPO tensor([-0.9608, -0.0392])
IPO tensor([2.2500, 6.2500])
R3M tensor([0.1269, 2.0623])
ROPO tensor([0.4469, 3.5985])
DrDPO tensor([0.1269, 2.1269])
CDPO tensor([0.5269, 1.7269])
RDPO tensor([-0.5397,  2.7936])
RPOEM tensor([0.1924, 0.8294])
AnnotatorRPOEM tensor([0.1924, 0.8294])
>>> DrDPO(1.0).group_weights(DPO(1.0)(rewards))  # softmax(-l), by which it weighs the batch
tensor([0.8808, 0.1192])
"""

from .base import Objective
from .flip_rate import CDPO, RDPO, RPOEM, AnnotatorRPOEM, LabelNoiseObjective
from .grouped import DrDPO
from .per_pair import DPO, IPO, R3M, ROPO, HolderDPO

__all__ = [
    "CDPO",
    "DPO",
    "IPO",
    "R3M",
    "RDPO",
    "ROPO",
    "RPOEM",
    "AnnotatorRPOEM",
    "DrDPO",
    "HolderDPO",
    "LabelNoiseObjective",
    "Objective",
]
