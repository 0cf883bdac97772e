"""Command ``pacmr configs``: list the shipped configs."""

from ..command_line.output import print_result
from ..runs.shipped_configs import FOLDER, names, told

GROUPS = {
    "": "to start from",
    "methods": "methods: --method NAME, or --config methods/NAME",
    "strategies": "several GPUs",
    "quickstart": "pacmr quickstart",
    "tldr": "experiments of Qu et al.: TL;DR",
    "hh": "experiments of Qu et al.: Anthropic HH",
}
"""Folders in the order of the list, without those for ``pacmr sweep``."""


def configs() -> None:
    """Lists the shipped configs with their purpose, and the folder that they are in.

    --config takes their names in any folder: pacmr fit --config tldr/preference --config methods/pacmr.
    pacmr sweep takes the names of those in sweeps/. To start one of your own, copy a file of the folder.
    """
    width = max(map(len, names()))
    for folder, title in GROUPS.items():
        print(f"{title}:")
        for name in names():
            if name.rpartition("/")[0] == folder:
                print_result(f"{name:<{width}}  {told(name)}")
    print(f"(in {FOLDER})")
