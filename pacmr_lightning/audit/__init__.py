"""Which labels of training pairs look wrong, to the policy of a run or to another judge, and how many are."""
