"""Label noise that does not depend on order, machine, number of ranks or method.

A pair is flipped iff the hash of its id, in [0, 1), lies under its flip probability. So masks are nested (a
pair flipped at 20% is flipped at 40%), and two runs with one ``noise_seed`` have the same wrong labels.
"""
