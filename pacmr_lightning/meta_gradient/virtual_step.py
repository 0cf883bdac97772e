"""The virtual step (Qu et al., section 5.4): the policy at omega + scale D, inside of a block."""

from ..policy import PolicyModel

shifted = PolicyModel.shifted
