"""The graph a client finds its concepts in: links to near neighbours, refined by the labels it knows (FedLPA)."""

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from semifed.discovery.neighbours import Neighbours

Rule = Literal["clique", "reweight", "cut", "none"]
FALLBACK_QUANTILE = 0.2  # of the similarities, where the asked least one leaves no link at all


class Links(NamedTuple):
    """Directed weighted links, [links] each; no pair occurs twice."""

    source: Tensor
    target: Tensor
    weight: Tensor


def neighbour_links(near: Neighbours, least: float) -> Links:
    """A link from every image to those of its neighbours that are at least so similar, as strong as they are similar.

    A least similarity that no pair reaches is lowered to the 20 % quantile of those there are.
    """
    similarity = near.similarity
    kept = similarity >= least
    if similarity.numel() and not kept.any():
        # Not torch's quantile, which refuses more than 2^24 numbers.
        kept = similarity >= float(np.quantile(similarity.numpy(), FALLBACK_QUANTILE, method="lower"))
    source, rank = kept.nonzero(as_tuple=True)
    return Links(source, near.node[source, rank], similarity[source, rank])


def refined(
    links: Links, near: Neighbours, labels: Tensor, *, rule: Rule, partners: int, generator: torch.Generator
) -> Links:
    """The links with what the labels [n] (−1 for none) say put into them.

    "reweight": a link between equal labels becomes as strong as the strongest of its source (DCCL). "cut": links
    between different labels go, too. "clique": each labelled image is also linked to as many as `partners` random
    others of its label, as strongly as to its nearest neighbour.
    """
    if rule == "none" or len(links.source) == 0:
        return links
    strongest = near.similarity.amax(dim=1)
    of_source, of_target = labels[links.source], labels[links.target]
    known = of_source >= 0
    equal = known & (of_source == of_target)
    weight = torch.where(equal, strongest[links.source], links.weight)
    if rule == "reweight":
        return links._replace(weight=weight)
    kept = equal | ~known | (of_target < 0)
    source, target, weight = links.source[kept], links.target[kept], weight[kept]
    if rule == "cut":
        return Links(source, target, weight)
    joined, partner = random_partners(labels, partners, generator)
    fresh = ~torch.isin(joined * len(labels) + partner, source * len(labels) + target)
    joined, partner = joined[fresh], partner[fresh]
    return Links(torch.cat([source, joined]), torch.cat([target, partner]), torch.cat([weight, strongest[joined]]))


def random_partners(labels: Tensor, partners: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pairs of different images of one label (−1 is none): every image first in `partners`, or in all there are.

    The images of a label stand in a random circle, and the same random steps around it lead from each to its partners:
    they are distinct without a draw for each pair, and every image is chosen as often as it chooses.
    """
    pairs = [torch.empty(2, 0, dtype=torch.int64)]
    for label in labels[labels >= 0].unique().tolist():
        members = (labels == label).nonzero()[:, 0]
        circle = members[torch.randperm(len(members), generator=generator)]
        steps = 1 + torch.randperm(len(members) - 1, generator=generator)[:partners]
        place = (torch.arange(len(members))[:, None] + steps) % len(members)
        pairs.append(torch.stack([circle.repeat_interleave(len(steps)), circle[place].flatten()]))
    source, target = torch.cat(pairs, dim=1)
    return source, target
