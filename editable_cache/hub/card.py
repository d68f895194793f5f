"""The card of a repository of skills: what it is, how it was compiled, how to use it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from editable_cache.adapters.host import CACHE_OF_GENERATE
from editable_cache.hub.resolve import Candidate

TAGS = ("editable-cache", "kv-cache")
LIBRARY = "editable_cache"
START, STOP = "<!-- editable-cache:builds -->", "<!-- /editable-cache:builds -->"

OURS = re.compile(f"{START}(?:(?!{START}).)*?{STOP}", re.S)
"""From the last mark of a start in front of one of a stop: a mark that stands alone takes nothing with it."""

UNKNOWN_MODEL = "# the/model: the repository or folder of the model that it was compiled for, see the table of builds\n"
ADAPTER = "# Load the adapter of the build into the model here (PEFT): the skill was compiled with it, see the table.\n"

TEMPLATE = """# {name}

A *skill*: the keys and values of a text, computed once by a language model. `editable_cache` puts it into any
context of that model by a copy, without a prefill.

## How to use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

from editable_cache import EditableCache, Skill

{model_note}model = AutoModelForCausalLM.from_pretrained("{model}")
{adapter_note}tokenizer = AutoTokenizer.from_pretrained("{model}")
skill = Skill.from_pretrained("{repo_id}", model=model, tokenizer=tokenizer)

cache = EditableCache(model, tokenizer=tokenizer)
cache.append("You are a helpful assistant.\\n")
cache.splice(skill)
out = model.generate(**cache.inputs("Question: what does it say?\\nAnswer:"), {argument}=cache, max_new_tokens=20)
print(tokenizer.decode(out[0]))
```

{builds}

## Before you use it

A skill from a stranger is a prompt from a stranger: the model reads it as if you had written it.
`editable-cache inspect {repo_id}` shows its text as the model sees it, `editable-cache verify` computes a part of it
again and compares.
"""


def card(
    repo_id: str,
    name: str,
    builds: Sequence[Candidate],
    *,
    fidelity: Mapping[str, Any] | None,
    license: str | None,
    old: ModelCard | None,
    keep_fidelity: bool,
) -> ModelCard:
    """The card of a repository that holds ``builds``; of an old card everything stays but tags and the part of ours.

    Args:
        fidelity: measured figures by name, shown as a table.
        license: identifier of the Hub (``"apache-2.0"``).
        keep_fidelity: without ``fidelity``, keep the table of the old card: its figures are still of these builds.
    """
    repos = [each.build.origin.repo for each in builds if each.build is not None]
    models = list(dict.fromkeys(filter(None, repos)))
    data: Any = ModelCardData() if old is None else old.data
    data.library_name = LIBRARY
    data.tags = list(dict.fromkeys([*(data.tags or []), *TAGS]))
    if models:
        data.base_model = models[0] if len(models) == 1 else models
    if license is not None:
        data.license = license
    section = f"{START}\n{_builds_section(builds, fidelity)}\n{STOP}"
    if old is None:
        shown = next((each.build for each in builds if each.build and each.build.origin.repo in (models or [""])), None)
        body = TEMPLATE.format(
            name=_plain(name),
            repo_id=repo_id,
            model=(models or ["the/model"])[0],
            model_note="" if models else UNKNOWN_MODEL,
            adapter_note=ADAPTER if shown is not None and shown.origin.adapters else "",
            builds=section,
            argument=CACHE_OF_GENERATE,
        )
    elif ours := OURS.search(old.text):
        kept = _old_fidelity(ours[0]) if fidelity is None and keep_fidelity else ""
        body = old.text[: ours.start()] + section.removesuffix(STOP) + kept + STOP + old.text[ours.end() :]
    else:
        body = f"{old.text.rstrip()}\n\n{section}\n"
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body.lstrip()}")


def _builds_section(builds: Sequence[Candidate], fidelity: Mapping[str, Any] | None) -> str:
    rows = ["## Builds", "", "| build | model | dtype | storage | tokens | size | compiled | attention |"]
    rows.append("|---|---|---|---|---|---|---|---|")
    for each in builds:
        build = each.build
        if build is not None:
            model = build.origin.repo or build.model.model_type
            for adapter, scale in build.origin.adapters:
                model += f" + adapter {adapter} (scale {scale:g})"
            how = (build.provenance, build.origin.attention)
            size = _size(build.payload.num_bytes)
            cells = (each.label, model, build.model.dtype, build.storage, len(build), size, *how)
            rows.append("| " + " | ".join(_plain(str(cell)) for cell in cells) + " |")
    return "\n".join(rows + _fidelity_rows(fidelity))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} KiB"


def _fidelity_rows(fidelity: Mapping[str, Any] | None) -> list[str]:
    if not fidelity:
        return []
    rows = [f"| {_plain(str(name))} | {_plain(str(value))} |" for name, value in fidelity.items()]
    return ["", FIDELITY, "", "| measured | value |", "|---|---|", *rows]


FIDELITY = "## Fidelity"


def _old_fidelity(section: str) -> str:
    """The table of an old section, up to its last mark."""
    inside = section.removesuffix(STOP)
    return f"\n{FIDELITY}{inside.split(FIDELITY, 1)[1]}" if FIDELITY in inside else ""


def _plain(text: str) -> str:
    """``text`` in one line that no table or markup takes for its own."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(text.split()))
