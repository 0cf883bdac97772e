"""Command ``pacmr configs``: list the shipped configs."""

from ..command_line.output import print_result
from ..runs.shipped_configs import FOLDER, names, told


def configs() -> None:
    """Lists the shipped configs with their purpose, and the folder that they are in.

    --config takes their names in any folder: pacmr fit --config tldr/preference --config methods/pacmr.
    pacmr sweep takes the names of those in sweeps/. To start one of your own, copy a file of the folder.
    """
    config_names = [name for name in names() if not name.startswith("sweeps/")]
    width = max(map(len, config_names))
    for name in config_names:
        print_result(f"{name:<{width}}  {told(name)}")
    print(f"(in {FOLDER})")
