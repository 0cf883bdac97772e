"""YAML whose keys are unique: of two equal ones PyYAML takes the last without a word."""

from typing import Any

import jsonargparse
import yaml

_load = jsonargparse.get_loader("yaml")


class _UniqueKeys(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value]
        for number, key in enumerate(keys):
            if key.value in [one.value for one in keys[:number]]:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is there twice", problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


def load(text: str) -> Any:
    """Return what jsonargparse reads in a text; raise a YAMLError if a key occurs twice in a mapping."""
    found = _load(text)
    if isinstance(found, dict | list):
        yaml.load(text, _UniqueKeys)
    return found
