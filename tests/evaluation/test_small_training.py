"""The texts that small models are trained on, and the items that judge them."""

from __future__ import annotations

import importlib
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RULE = re.compile(r"^(?:rule|must|the \w+ decides).*$", re.MULTILINE)


@pytest.fixture(scope="module")
def mini() -> Iterator[ModuleType]:
    if not BENCHMARKS.is_dir():
        pytest.skip("the benchmarks are not in this copy")
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("training.mini")
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize(("name", "least"), [("small-llama", 0.7), ("small-qwen3", 0.4), ("small-gemma3", 0.4)])
def test_heads_begin_by_looking_back_and_by_matching(mini: ModuleType, name: str, least: float) -> None:
    """The first layer's heads see the token 1, 2, 3 places back; the next layer's first one what followed a word."""
    small = importlib.import_module("training.small")
    settings, tokenizer = small.MODELS[name], mini.tokenizer()
    model = small.build(settings.model_type, settings.config, tokenizer, settings.seed)
    model.set_attn_implementation("eager")
    ids = tokenizer("gold means send(). basic means hold(). gold means", return_tensors="pt").input_ids
    with torch.no_grad():
        first, second, *_ = model(ids, output_attentions=True).attentions
    last = ids.shape[1] - 1
    for back in (1, 2, 3):
        assert float(first[0, back, last, last - back]) > least
        assert float(first[0, 0, last, last - back]) < least  # head 0 looks at no place in particular
    words = tokenizer.convert_ids_to_tokens(ids[0].tolist())
    assert int(second[0, 0, last].argmax()) == words.index("send")


def assignments(mini: ModuleType, text: str) -> set[tuple[str, str, str]]:
    """Field and the calls of its two values, of every rule in a text."""
    found = set()
    for rule in RULE.findall(text):
        words = re.findall(r"\w+", rule)
        field = next(field for field, values in mini.FIELDS.items() if set(values) <= set(words))
        calls = [words[words.index(value) + 1 :] for value in mini.FIELDS[field]]
        first, second = (next(word for word in after if word in mini.CALLS) for after in calls)
        found.add((field, first, second))
    return found


def test_training_has_no_judged_assignment_and_not_the_judged_wording(mini: ModuleType) -> None:
    rng = random.Random(0)
    trained: Counter[bool] = Counter()
    for _ in range(300):
        for text in (mini.prompts(rng, neutral=1, updates=0.5), mini.decisions(rng, updates=0.5)):
            whole = "".join(piece for piece, _ in text)
            assert "This replaces every earlier value" not in whole
            trained.update(mini.kept_apart(*found) for found in assignments(mini, whole))
    assert trained[False] > 500
    assert trained[True] == 0
    judged = [assignments(mini, item.context(item.old)) for item in mini.judged("direct", 4, neutral=0)]
    assert all(len(found) == 1 and mini.kept_apart(*found.pop()) for found in judged)


@pytest.mark.parametrize("any_order", [False, True])
def test_every_answer_follows_from_its_text(mini: ModuleType, any_order: bool) -> None:
    """By a reader of its own: the last value that a line states, and the call that the rule gives it."""
    rng = random.Random(1)
    turned = 0
    for _ in range(200):
        pieces = mini.prompts(rng, neutral=0, updates=0.5, rounds=2, any_order=any_order)
        seen = pieces[0][0]
        ((field, first, second),) = assignments(mini, seen)
        calls = dict(zip(mini.FIELDS[field], (first, second), strict=True))
        for piece, learnt in pieces[1:]:
            if learnt:
                told = RULE.sub("", seen)
                stated = re.findall(
                    rf"\b({'|'.join(calls)})\b", re.sub(r"Reasoning:.*|(?:tool_call|answer): ?\w+", "", told)
                )
                turned += stated[0] != stated[-1]
                answer = re.search(rf"({'|'.join([*mini.CALLS, *calls])})\W*{mini.END}", piece)
                assert answer is not None
                assert answer[1] in (stated[-1], calls[stated[-1]])
            seen += piece
    assert turned > 40


def test_in_any_order_the_field_stands_on_either_side_of_its_rule(mini: ModuleType) -> None:
    for any_order, least, most in ((False, 0, 0), (True, 80, 120)):
        rng, behind = random.Random(2), 0
        for _ in range(200):
            text = mini.prompts(rng, neutral=0, updates=0.0, rounds=1, any_order=any_order)[0][0]
            ((field, _, _),) = assignments(mini, text)
            behind += text.index(f"{field}: ") > next(RULE.finditer(text)).start()
        assert least <= behind <= most


def test_labels_are_balanced_and_no_word_is_unknown(mini: ModuleType) -> None:
    tokenizer = mini.tokenizer()
    for mode in mini.MODES:
        items = mini.judged(mode, 4, neutral=4)
        assert len(items) == 40
        assert len({item.key for item in items}) == 40
        for field, values in mini.FIELDS.items():
            mine = [item for item in items if item.domain == field]
            assert Counter(item.old for item in mine) == dict.fromkeys(values, 2)
            for item in mine:
                line = mini.ERRATUM.format(name=item.field, value=item.new)
                text = item.context(item.old) + line + item.question + item.completion(item.new)
                assert tokenizer.unk_token_id not in tokenizer(text).input_ids
    assert tokenizer.unk_token_id in tokenizer("colour: mauve").input_ids
