"""The best reward that any policy can have at each KL from a reference, in the embedded world."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from tqdm import tqdm

from ..command_line.parser import run_tool
from ..embedded_world import World
from ..errors import UserError
from ..files import check_writable, replacing


def reward_ceiling(model: str, *, output: str, world_seed: int = 0) -> pd.DataFrame:
    """Enumerates what a reference may answer in the embedded world, and what the best policies make of it.

    Args:
        model: folder of the reference, such as runs/quickstart/sft/model.
        output: .csv file to write, with ``curve`` ("optimal" or "best of n"), ``parameter`` (b or n), ``kl``
            in nats a response, and ``reward``, means over the world's prompts.
        world_seed: of the world that the reference was trained in.

    Returns:
        The rows of the file.

    Raises:
        UserError: the model cannot be loaded, or the file has another ending.
    """
    if Path(output).suffix != ".csv":
        raise UserError(f"output is {output}, but its name must end in .csv.")
    check_writable("output", output, Path(output).parent)
    if not (Path(model) / "config.json").is_file():
        raise UserError(f"There is no model in {model}; train one with configs/quickstart/sft.yaml.")
    # Here, so that pacmr --help stays quick.
    import numpy as np
    import torch

    from ..analysis.reward_ceiling import best_of_n, ceiling, gold_rewards, kinds_of_responses
    from ..datamodules.tokenizer import load_tokenizer
    from ..policy.base_model import load_base

    network = load_base(model, torch.float32, None).eval()
    tokenizer = load_tokenizer(model)
    world = World(world_seed)
    log_probs, rewards = [], []
    for prompt in tqdm(world.prompts(), desc="Responses", unit="prompt"):
        kinds, values = kinds_of_responses(network, tokenizer, prompt)
        log_probs.append(values)
        rewards.append(gold_rewards(world, prompt, kinds))
    both = np.stack(log_probs), np.stack(rewards)
    optimal = ceiling(*both).rename(columns={"b": "parameter"}).assign(curve="optimal")
    best = best_of_n(*both).rename(columns={"n": "parameter"}).assign(curve="best of n")
    table = pd.concat([optimal, best])[["curve", "parameter", "kl", "reward"]]
    with replacing(output) as temporary:
        table.to_csv(temporary, index=False)
    reference = best.loc[best["parameter"] == 1, "reward"].item()
    print(
        f"{output}: the reference has {reference:.2f}, and no policy more than "
        f"{np.interp(1.0, optimal['kl'][::-1], optimal['reward'][::-1]):.2f} at a KL of 1 nat a response."
    )
    return table


def main(arguments: list[str]) -> None:
    """``pacmr ceiling MODEL --output FILE`` and the options of ``reward_ceiling``."""
    run_tool("ceiling", reward_ceiling, arguments, positional=True)
