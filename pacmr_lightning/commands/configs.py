"""Command ``pacmr configs``: list and copy the shipped configs."""

from ..command_line.output import print_result
from ..errors import UserError
from ..files import local_path, replacing
from ..runs.shipped_configs import FOLDER, did_you_mean, names, shipped_name, told

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
    """Lists the shipped configs with their purpose.

    --config takes their names in any folder: pacmr fit --config tldr/preference --config methods/pacmr. To
    start one of your own: pacmr configs copy NAME FILE. pacmr sweep takes the names of those in sweeps/.
    """
    width = max(map(len, names()))
    for folder, title in GROUPS.items():
        print(f"{title}:")
        for name in names():
            if name.rpartition("/")[0] == folder:
                print_result(f"{name:<{width}}  {told(name)}")
    print(f"(in {FOLDER})")


def copy(name: str, file: str) -> None:
    """Copies a shipped config, as a start for your own.

    Args:
        name: name in the list of pacmr configs, such as tldr/preference.
        file: file to write, ending in .yaml.

    Raises:
        UserError: there is no such config, or the file exists or has another ending.
    """
    if (shipped := shipped_name(name)) is None:
        raise UserError(f"There is no shipped config {name}{did_you_mean(name)}; pacmr configs lists them.")
    path = local_path(file)
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"file is {file}, but a config ends in .yaml.")
    if path.exists():
        raise UserError(f"file is {file}, which exists; name another file, or remove it.")
    with replacing(path) as temporary:
        temporary.write_bytes((FOLDER / f"{shipped}.yaml").read_bytes())
    print(f"{file} is a copy of {shipped}; use it with --config {file}.")
