"""The scene of the demo: which model, which texts, and how a turn of the chat is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

POLICY = Path(__file__).with_name("refund_policy.txt")
QUICK_LINES = 16
"""With ``--quick`` the policy ends after this many lines."""

SYSTEM = "You are a support agent of Harrow & Finch. Follow the refund policy. The order record decides."
RECORD = (
    "ORDER RECORD\n"
    "order_number: 7731\n"
    "order_status: {order_status}\n"
    "order_total: 64.90 dollars\n"
    "payment_method: card\n"
    "channel: web"
)
FIRST_QUESTION = "Please refund my order 7731. What is its order_status, and what happens now?"
OLD, NEW = "pending", "delivered"
SECOND_QUESTION = "Read the order record again, please."
START_OF_ANSWER = "order_number: 7731\norder_status:"
"""Put into the agent's mouth, so that the next token is the status."""


@dataclass(frozen=True)
class Scene:
    """A model with its tokenizer, and the texts that it is shown."""

    model: Any
    tokenizer: Any
    policy: str

    @property
    def chatml(self) -> bool:
        """Whether turns are written in ChatML; plain labelled lines otherwise."""
        return "<|im_start|>" in self.tokenizer.get_vocab()

    @property
    def end_of_turn(self) -> str:
        """What closes a turn."""
        return "<|im_end|>\n" if self.chatml else "\n\n"

    def turn(self, role: str, text: str) -> str:
        """One whole turn."""
        return self.opening(role) + text + self.end_of_turn

    def opening(self, role: str) -> str:
        """The start of a turn, for the model to go on from."""
        return f"<|im_start|>{role}\n" if self.chatml else f"{role.upper()}:\n"

    def question(self, text: str, start_of_answer: str = "") -> str:
        """A turn of the customer, and the start of the agent's."""
        return self.turn("user", text) + self.opening("assistant") + start_of_answer

    def shown(self, ids: torch.Tensor) -> str:
        """Generated ids as one line of text."""
        return one_line(str(self.tokenizer.decode(ids, skip_special_tokens=True)))


def one_line(text: str) -> str:
    """A text with its line breaks shown as strokes."""
    return text.strip().replace("\n", " / ")


def load(name: str, *, quick: bool) -> Scene:
    """Load the model called ``name``: ``smollm2``, ``gemma3_270m``, ``tiny`` (random weights) or a Hub id."""
    policy = POLICY.read_text(encoding="utf-8").strip()
    if quick:
        policy = "\n".join(policy.splitlines()[:QUICK_LINES])
    model, tokenizer = _load(name)
    return Scene(model.eval(), tokenizer, policy)


def _load(name: str) -> tuple[Any, Any]:
    if name == "tiny":
        from editable_cache.testing.tiny_models import tiny_model, tiny_tokenizer

        return tiny_model("llama"), tiny_tokenizer()
    if name in ("smollm2", "gemma3_270m"):
        from editable_cache.testing import real_models

        return real_models.load_smollm2() if name == "smollm2" else real_models.load_gemma3_270m()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), AutoTokenizer.from_pretrained(name)
