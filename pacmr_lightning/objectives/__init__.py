"""Preference objectives: here of two pairs with u = 2 and u = -2, at a noise rate of 0.2 where one is given.

>>> from pacmr_lightning.rewards import LogProbs, Rewards, torch
>>> u = torch.tensor([2.0, -2.0])
>>> rewards = Rewards(LogProbs(u, 0 * u), LogProbs(0 * u, 0 * u), beta=1.0)
>>> for objective in (
...     *(kind(1.0) for kind in (DPO, HolderDPO, IPO, R3M, ROPO, DrDPO)),
...     *(kind(1.0, 0.2) for kind in (CDPO, RDPO, RPOEM, AnnotatorRPOEM)),
... ):
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
"""

from .base import Objective as Objective
from .flip_rate import CDPO as CDPO
from .flip_rate import RDPO as RDPO
from .flip_rate import RPOEM as RPOEM
from .flip_rate import AnnotatorRPOEM as AnnotatorRPOEM
from .flip_rate import LabelNoiseObjective as LabelNoiseObjective
from .grouped import DrDPO as DrDPO
from .per_pair import DPO as DPO
from .per_pair import IPO as IPO
from .per_pair import R3M as R3M
from .per_pair import ROPO as ROPO
from .per_pair import HolderDPO as HolderDPO
