"""One of two gloo processes with shares of different sizes; both write what they computed.

Usage: python ddp_consistency.py RANK INIT_FILE PAIRS OUTPUT
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from pacmr_lightning.analysis.consistency import PromptConsistencyMetrics

TAUS = (0.5, 0.6, 0.9)


def main():
    rank, init, pairs, output = int(sys.argv[1]), *sys.argv[2:]
    dist.init_process_group("gloo", init_method=f"file://{init}", rank=rank, world_size=2)
    u, augmented_u, clean = torch.tensor(json.loads(Path(pairs).read_text()), dtype=torch.float64).T
    # 10 pairs in one update here, all others there, then one process without any pair.
    found = []
    for share in ((slice(0, 10), slice(10, None)), (slice(0, 0), slice(0, None))):
        metrics = PromptConsistencyMetrics(TAUS)
        rows = share[rank]
        if len(u[rows]):
            metrics.update(u[rows], augmented_u[rows], clean[rows].long())
        found.append({name: value.tolist() for name, value in metrics.compute().items()})
    Path(f"{output}-{rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
