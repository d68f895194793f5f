"""Field reports, class 9: tokenizers that change, and ones that only seem to be the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache_support import make_cache, shared_model
from tokenizers import normalizers, pre_tokenizers
from transformers import CTRLTokenizer, PreTrainedTokenizer

from editable_cache import CompatibilityError, Skill
from editable_cache.adapters import identify
from editable_cache.testing.tiny_models import tiny_tokenizer

WORDS = list("abcdefABCDEF <")


class Characters(PreTrainedTokenizer):
    """One id for each of a few characters, perhaps of the lower-cased text."""

    def __init__(self, lower: bool = False, **options: Any) -> None:
        self.lower, self.table = lower, {char: idx for idx, char in enumerate(WORDS)}
        super().__init__(unk_token="<", **options)

    @property
    def vocab_size(self) -> int:
        return len(self.table)

    def get_vocab(self) -> dict[str, int]:
        return {**self.table, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(text.lower() if self.lower else text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.table.get(token, self.table["<"])

    def _convert_id_to_token(self, index: int) -> str:
        return WORDS[index]


def digest(tokenizer: Any) -> str:
    return identify(shared_model(), tokenizer).tokenizer


def special(tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": ["refund"]})


CHANGES: dict[str, Callable[[Any], Any]] = {
    "token": lambda t: t.add_tokens(["refund it"]),
    "special": special,
    "normalizer": lambda t: setattr(t.backend_tokenizer, "normalizer", normalizers.Lowercase()),
    "pre_tokenizer": lambda t: setattr(t.backend_tokenizer, "pre_tokenizer", pre_tokenizers.Whitespace()),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_tokenizer_that_changes_is_another(name: str) -> None:
    """A digest that was remembered for good let ids of a grown tokenizer pass as those of the old one."""
    tokenizer, fresh = tiny_tokenizer(), tiny_tokenizer()
    before = digest(tokenizer)
    CHANGES[name](tokenizer)
    CHANGES[name](fresh)
    assert digest(tokenizer) == digest(fresh) != before


@pytest.mark.parametrize("name", ["padding", "truncation", "attributes", "call"])
def test_how_a_batch_is_padded_changes_nothing(name: str) -> None:
    tokenizer = tiny_tokenizer()
    before = digest(tokenizer)
    if name == "padding":
        tokenizer(["a", "b c d"], padding=True)
    elif name == "truncation":
        tokenizer(["refund the order"], truncation=True, max_length=3)
    elif name == "attributes":
        tokenizer.padding_side, tokenizer.model_max_length = "left", 3
    else:
        tokenizer("refund the order")
    assert digest(tokenizer) == before


def test_a_skill_of_a_grown_tokenizer_does_not_enter_a_cache_of_the_old_one() -> None:
    cache, tokenizer = make_cache(), tiny_tokenizer()
    digest(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["refund"]})
    skill = Skill.precompile(shared_model(), tokenizer, "order", name="skill")
    with pytest.raises(CompatibilityError, match="tokenizer"):
        cache.splice(skill)
    cache.splice(Skill.precompile(shared_model(), tiny_tokenizer(), "order", name="skill"))


def ctrl(folder: Path, name: str, merges: list[str]) -> Any:
    letters = "refundit"
    words = ["<unk>", *letters, *(f"{letter}@@" for letter in letters), "re@@", "ef@@", "fu@@", "it"]
    (folder / "vocab.json").write_text(json.dumps({word: idx for idx, word in enumerate(dict.fromkeys(words))}))
    (folder / f"{name}.txt").write_text("\n".join(["#version", *merges]) + "\n")
    return CTRLTokenizer(vocab_file=str(folder / "vocab.json"), merges_file=str(folder / f"{name}.txt"))


def test_python_tokenizers_of_one_vocabulary_and_other_merges(tmp_path: Path) -> None:
    one, same, other = (ctrl(tmp_path, name, m) for name, m in (("a", ["r e"]), ("b", ["r e"]), ("c", ["e f"])))
    assert one.get_vocab() == other.get_vocab()
    assert one("refund")["input_ids"] != other("refund")["input_ids"]
    assert digest(one) == digest(same)
    assert digest(one) != digest(other)


def test_python_tokenizers_that_treat_case_differently() -> None:
    one, same, other = Characters(), Characters(), Characters(lower=True)
    assert digest(one) == digest(same) != digest(other)
    one.lower = True
    assert digest(one) == digest(other)
    one.add_tokens(["bad"])
    assert digest(one) != digest(other)
