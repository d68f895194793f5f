"""What the local hub reads in the YAML front matter of a README: the card's data, its tags, its mistakes."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml
from hub_commits import Commit

RELATIONS = {"adapter", "merge", "quantized", "finetune"}
_FRONT_MATTER = re.compile(r"^\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", re.DOTALL)
_REPO_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+", re.ASCII)


def front_matter(text: str) -> Any:
    """The YAML between the two lines of dashes, with dates and the like as text; None without it."""
    found = _FRONT_MATTER.match(text)
    return json.loads(json.dumps(yaml.safe_load(found[1]), default=str)) if found else None


def check(text: str) -> tuple[list[str], list[str]]:
    """Errors and warnings that the hub has for a README."""
    try:
        data = front_matter(text)
    except (yaml.YAMLError, TypeError, ValueError) as error:
        return [f"YAML: {error}"], []
    if data is None or data == {}:
        return [], ["empty or missing yaml metadata in repo card"]
    if not isinstance(data, dict):
        return ["the metadata of the card must be a mapping"], []
    errors = []
    for key in ("tags", "base_model", "license", "datasets", "language"):
        if key in data and not all(isinstance(value, str) for value in as_list(data[key])):
            errors.append(f'"{key}" must be a string or a list of strings')
    for model in as_list(data.get("base_model")):
        if isinstance(model, str) and not _REPO_ID.fullmatch(model):
            errors.append(f'"base_model" with value "{model}" is not valid. Use a model id from the hub.')
    relation = data.get("base_model_relation")
    if relation is not None and relation not in RELATIONS:
        errors.append(f'"base_model_relation" must be one of {sorted(RELATIONS)}')
    return errors, []


def card_data(commit: Commit) -> dict[str, Any]:
    """The metadata of the README in a commit; empty where there is none, or none that can be read."""
    readme = commit.files.get("README.md")
    if readme is None:
        return {}
    try:
        data = front_matter(readme.data.decode("utf-8", "replace"))
    except (yaml.YAMLError, TypeError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def tags(commit: Commit) -> list[str]:
    """The tags of a repository at a commit: from the card, its library, base models, licence and file endings.

    The real hub also guesses the relation to a base model. Here it is a tag only where the card gives it.
    """
    card = card_data(commit)
    found: list[Any] = [card.get("library_name")]
    if any(path.endswith(".safetensors") for path in commit.files):
        found.append("safetensors")
    found += [*as_list(card.get("tags")), card.get("pipeline_tag"), *as_list(card.get("language"))]
    found += [f"dataset:{name}" for name in as_list(card.get("datasets"))]
    found += [f"base_model:{name}" for name in as_list(card.get("base_model"))]
    relation = card.get("base_model_relation")
    if relation is not None:
        found += [f"base_model:{relation}:{name}" for name in as_list(card.get("base_model"))]
    found += [f"license:{name}" for name in as_list(card.get("license"))]
    found.append("region:us")
    return list(dict.fromkeys(tag for tag in found if isinstance(tag, str)))


def as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
