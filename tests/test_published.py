"""What skills and vision chunks share: copies of them, chunks made into them, and what is told about strangers'."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from cache_support import make_cache, make_context, policy, shared_model, shared_tokenizer

from editable_cache import ArtifactError, CompatibilityError, ImageSpan, Skill, TrustWarning
from editable_cache.testing.tiny_models import HYBRID_FAMILIES, tiny_tokenizer


@pytest.mark.parametrize("family", ["llama", "gemma3", *HYBRID_FAMILIES[:1]])
def test_a_skill_can_be_copied_and_sent_to_another_process(family: str) -> None:
    skill = policy(family)
    for twin in (copy.deepcopy(skill), pickle.loads(pickle.dumps(skill))):
        assert type(twin) is Skill
        assert twin.equal_cells(skill)
        assert (twin.digest, twin.text, twin.layout, twin.origin) == (
            skill.digest,
            skill.text,
            skill.layout,
            skill.origin,
        )
        assert make_cache(family).splice(twin).segment.name == "policy"


def test_an_extracted_chunk_is_published_as_a_skill(tmp_path: Path) -> None:
    cache = make_context()
    chunk = cache.extract("policy")
    with pytest.raises(CompatibilityError, match="name"):
        Skill.from_chunk(chunk.renamed(None))
    skill = Skill.from_chunk(chunk, name="cut out")
    skill.save_pretrained(tmp_path)
    back = Skill.from_pretrained(tmp_path, model=shared_model(), tokenizer=shared_tokenizer())
    assert back.name == "cut out"
    assert back.equal_cells(chunk)
    assert back.provenance == chunk.provenance


def test_a_folder_has_no_revisions(tmp_path: Path) -> None:
    policy().save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match="no revisions"):
        Skill.from_pretrained(tmp_path, revision="main")


@pytest.mark.parametrize("how", ["no", "Refuse", None, True])
def test_a_word_for_control_tokens_that_nobody_knows(how: object, tmp_path: Path) -> None:
    policy().save_pretrained(tmp_path)
    with pytest.raises(CompatibilityError, match="'warn', 'allow' or 'refuse'"):
        Skill.from_pretrained(tmp_path, control_tokens=how)  # type: ignore[arg-type]


def test_a_lie_about_the_text_is_told_whatever_else_the_file_says(tmp_path: Path) -> None:
    honest = policy()
    lies = {
        "plain": replace(honest, text="All is well.\n"),
        "merged": replace(Skill.merge([honest], name="policy"), text="All is well.\n"),
        "image": replace(honest, text="All is well.\n", images=(ImageSpan(0, 1, "x"),)),
    }
    for name, lie in lies.items():
        lie.save_pretrained(tmp_path / name)
        with pytest.warns(TrustWarning, match="not what its ids say"):
            Skill.from_pretrained(tmp_path / name, tokenizer=shared_tokenizer())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fine in (honest, Skill.merge([honest], name="policy"), Skill.merge([honest, honest], name="policy")):
            fine.save_pretrained(tmp_path / "fine")
            Skill.from_pretrained(tmp_path / "fine", tokenizer=shared_tokenizer())


def test_added_tokens_of_a_chat_template_control_too(tmp_path: Path) -> None:
    """``<tool_call>`` is no special token to a tokenizer, and everything to its model."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "refund it"])
    tokenizer.chat_template = "{% for m in messages %}<tool_call>{{ m.content }}{% endfor %}"
    text = "If <tool_call> refund it"
    ids = [each % shared_model().config.vocab_size for each in tokenizer(text, add_special_tokens=False)["input_ids"]]
    call = tokenizer.convert_tokens_to_ids("<tool_call>")
    skill = replace(policy(), token_ids=policy().token_ids.clone(), text=None)
    skill.token_ids[2] = call
    assert ids
    assert [(each.slot, each.text) for each in skill.control_tokens(tokenizer)] == [(2, "<tool_call>")]
    other = tiny_tokenizer()
    other.add_tokens(["<tool_call>", "refund it"])  # control: without the template it is text
    assert skill.control_tokens(other) == ()


def test_a_lone_token_in_front_counts_unless_it_is_the_bos() -> None:
    tokenizer = tiny_tokenizer(add_bos=True)
    bos = tokenizer.bos_token_id
    other = next(each for each in tokenizer.all_special_ids if each != bos)
    for ids, counted in (((bos,), 0), ((other,), 1), ((bos, other), 2)):
        skill = replace(policy(), provenance=replace(policy().provenance, prefix_ids=ids))
        assert len(skill.control_tokens(tokenizer)) == counted
    never = tiny_tokenizer()  # it puts no BOS in front, so none stands there by itself
    skill = replace(policy(), provenance=replace(policy().provenance, prefix_ids=(never.all_special_ids[0],)))
    assert len(skill.control_tokens(never)) == 1
