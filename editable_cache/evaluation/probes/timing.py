"""Is the note written before it is read? (The study's appendix C, timing; the logit lens of nostalgebraist, 2020.)

A linear probe decodes the conclusion from the residual stream of tokens behind the rule, in domains that it was not
fitted on; against it stands the layer from which on the last token's stream, read through the vocabulary, prefers the
answer that the model gives. The 2 x 2 prompts of an item (value of the field, turn of the rule) balance the
conclusion against the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from editable_cache.evaluation.probes.bench import Bench, Gathered, Probe, best_roles, mean, role_effects, streams_of
from editable_cache.evaluation.probes.labels import LABELS, label
from editable_cache.evaluation.probes.pairs import State
from editable_cache.evaluation.results import Row

NAME = "timing"

ROLES = 4
"""Tokens that are probed: those of the largest mean effect."""

DECODABLE = 0.9
"""Accuracy in a held-out domain from which on the conclusion counts as decodable there."""

RIDGE = 0.1
"""Of the mean squared norm of a token's stream."""


@dataclass(frozen=True)
class Decoded:
    """Accuracy ``[num_layers + 1]`` in each held-out domain, for one label and one token."""

    label: str
    role: str
    by_domain: dict[str, list[float]]


@dataclass(frozen=True)
class Report:
    """What was decoded, and the key of the item that each domain's accuracies are reported with."""

    decoded: list[Decoded]
    speaker: dict[str, str]


def commit(bench: Bench) -> list[Row]:
    """The depth from which on the last token, read through the vocabulary, keeps its answer: mean and latest state.

    A model that leans to one answer has its sign right from the start in half of the states. The latest of the states
    tells when the two conclusions are told apart.
    """
    situation = bench.situation
    depths = [committed(_margins(bench, state)) / situation.subject.num_layers for state in situation.states]
    found = {"decision_by_lens": mean(depths), "decision_by_lens_in_all_states": max(depths)}
    return [bench.row(NAME, arm, depth, measure="depth") for arm, depth in found.items()]


def prepare(gathered: Gathered) -> Report:
    """Fit and judge a probe for each label, token, layer and held-out domain."""
    speaker: dict[str, str] = {}
    for bench in gathered.benches:
        speaker.setdefault(bench.situation.item.domain, bench.situation.item.key)
    if len(speaker) < 2:
        return Report([], speaker)
    anchored = {role for bench in gathered.benches for role in bench.anchored}
    effects = {role: effect for role, effect in role_effects(gathered).items() if role in anchored}
    roles = best_roles(effects, ROLES)
    streams = streams_of(gathered, roles)
    found = []
    for role in roles:
        for kind in LABELS:
            examples, labels, domains = _examples(gathered.benches, streams, role, kind)
            if len(set(domains)) > 1 and len(set(labels)) == 2:
                found.append(Decoded(kind, role, _accuracies(torch.stack(examples), labels, domains)))
    return Report(found, speaker)


def report(bench: Bench, prepared: Report) -> list[Row]:
    """With the first item of each domain, that domain's accuracies and the depth where they reach ``DECODABLE``."""
    item, rows = bench.situation.item, []
    layers = bench.situation.subject.num_layers
    if prepared.speaker.get(item.domain) != item.key:
        return []
    for each in (each for each in prepared.decoded if item.domain in each.by_domain):
        accuracies = each.by_domain[item.domain]
        arm = f"{each.label} at {each.role}"
        rows += [bench.row(NAME, arm, value, measure="accuracy", x=layer) for layer, value in enumerate(accuracies)]
        reached = decodable_from(accuracies)
        rows.append(bench.row(NAME, arm, float(reached is not None), measure="decodable"))
        if reached is not None:
            rows.append(bench.row(NAME, arm, reached / layers, measure="depth"))
    return rows


def committed(margins: Sequence[float]) -> int:
    """The first index from which on every margin has the sign of the last one."""
    last = margins[-1] > 0
    return max((index + 1 for index, margin in enumerate(margins) if (margin > 0) != last), default=0)


def decodable_from(accuracies: Sequence[float]) -> int | None:
    """The first layer with an accuracy of ``DECODABLE`` that the mean of it and all later layers reaches, too.

    Of a few prompts and many layers one is right by chance somewhere; that does not last.
    """
    for layer, accuracy in enumerate(accuracies):
        if accuracy >= DECODABLE and mean(accuracies[layer:]) >= DECODABLE:
            return layer
    return None


def held_out(features: Tensor, labels: Tensor, groups: Sequence[str]) -> Tensor:
    """Whether a ridge classifier that was fitted on the other groups tells each example right, bool ``[n]``.

    Args:
        features: float64 ``[n, d]``. Standardised by the training examples.
        labels: bool ``[n]``.
        groups: one for each example.
    """
    signs = labels.double() * 2 - 1
    right = torch.zeros(len(labels), dtype=torch.bool)
    for group in dict.fromkeys(groups):
        test = torch.tensor([each == group for each in groups])
        centre, spread = features[~test].mean(0), features[~test].std(0).clamp_min(1e-9)
        fitted, judged = ((features[rows] - centre) / spread for rows in (~test, test))
        kernel = fitted @ fitted.T
        ridge = RIDGE * kernel.diagonal().mean().clamp_min(1e-9) * torch.eye(len(kernel), dtype=torch.float64)
        offset = signs[~test].mean()
        weights = torch.linalg.solve(kernel + ridge, signs[~test] - offset)
        right[test] = ((judged @ fitted.T @ weights + offset) > 0) == labels[test]
    return right


def _examples(
    benches: Sequence[Bench], streams: dict[str, dict[str, Tensor]], role: str, kind: str
) -> tuple[list[Tensor], list[bool], list[str]]:
    """Streams ``[num_layers + 1, hidden_size]`` of one token in all prompts, with labels and domains."""
    examples, labels, domains = [], [], []
    for bench in benches:
        held = streams[bench.situation.item.key].get(role)
        for number, state in enumerate(bench.situation.states):
            said = label(bench.situation, state, kind)
            if held is not None and said is not None:
                examples.append(held[number])
                labels.append(said)
                domains.append(bench.situation.item.domain)
    return examples, labels, domains


def _accuracies(streams: Tensor, labels: list[bool], domains: list[str]) -> dict[str, list[float]]:
    signs = torch.tensor(labels)
    right = torch.stack([held_out(streams[:, layer].double(), signs, domains) for layer in range(streams.shape[1])])
    chosen = {domain: torch.tensor([each == domain for each in domains]) for domain in dict.fromkeys(domains)}
    return {domain: right[:, rows].double().mean(1).tolist() for domain, rows in chosen.items()}


def _margins(bench: Bench, state: State) -> list[float]:
    """Margin of the new value's answer over the old one's by layer, as the lens sees it at the last token."""
    situation = bench.situation
    prompt = situation.prompt(state)
    logits = situation.subject.lens(prompt.stream[:, -1])
    return (logits[:, situation.answer_id("new")] - logits[:, situation.answer_id("old")]).tolist()


PROBE = Probe(NAME, "is the note written before it is read?", ("rule",), commit, prepare, report)
