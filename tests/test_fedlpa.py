"""FedLPA and the baselines of category discovery: hooks against plain loops, phases, refreshes, corner cases."""

import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import rel_entr
from torch import Tensor
from torch.nn import functional as F

from semifed.client_round import Held, Task, client_round
from semifed.data.client import Batch, Budget, ClientData, batches
from semifed.discovery import concepts, guided, inference
from semifed.discovery.gallery import Gallery
from semifed.discovery.guided import local_concepts, true_classes, true_concepts, true_members
from semifed.discovery.inference import likely_classes
from semifed.discovery.semi_kmeans import estimated_clusters
from semifed.errors import UserError
from semifed.fit import Course, Loss, Optimiser
from semifed.methods.fed_agcl import FedAGCL
from semifed.methods.fed_gcd import FedGCD
from semifed.methods.fed_simgcd import FedSimGCD, Sharpening, every_logit
from semifed.methods.fedlpa import Const, FedLPA, Found
from semifed.models.network import Output
from semifed.net import Net
from semifed.payloads import Local, Server, Up, Visit
from semifed.recipe import check_recipe
from toys import equal_weights, place_of, site_of, toy_dataset, toy_parts, toy_recipe

CLIENT = 1
WARMUP = 2
NOTHING = torch.empty(0, dtype=torch.int64)


class World:
    """One client with its network, and images of which classes lie apart."""

    def __init__(self, method: str = "fedlpa", **options: Any) -> None:
        changes = {"method": options, "scenario": {"validation_fraction": 0.1}, "model": {"head": "cosine"}}
        self.parts = toy_parts(toy_recipe(method, "clients", changes), toy_dataset(per_class=40))
        self.place = place_of(self.parts)
        self.net: Net = self.place.net
        self.method: Any = self.parts.method
        self.data = self.parts.scenario.client(CLIENT)

    @property
    def down(self) -> Any:
        return self.method.broadcast(self.method.setup(self.net.state(), site_of(self.parts)))

    def prepared(self, round_: int, kept: Found | None = None, data: ClientData | None = None) -> Local[Any, Any]:
        with torch.no_grad():
            local: Local[Any, Any] = self.method.prepare(
                self.net, self.down, data or self.data, kept, Visit(0, round_, CLIENT)
            )
        return local

    def batch(self, data: ClientData | None = None) -> Batch:
        return next(iter(batches(data or self.data, Budget(1, None, 6), (0, 1))))

    def loss(self, const: Any, batch: Batch) -> Loss:
        self.net.network.train()
        found: Loss = self.method.loss(self.net, batch, const)
        self.net.network.eval()
        return found


def by_hand(net: Net, batch: Batch, const: Const, method: FedLPA) -> dict[str, float]:
    """Eqs. (5)-(8) from one plain forward pass, in NumPy."""
    parts = [batch.labelled.weak, batch.labelled.weak_again, batch.unlabelled.weak, batch.unlabelled.weak_again]
    net.network.train()
    with torch.no_grad():
        said = net(torch.cat(parts))
    net.network.eval()
    labelled = 2 * len(batch.labelled)
    logits = F.log_softmax(said.logits[:labelled].double(), dim=1).numpy()
    labels = batch.labelled.labels.repeat(2).numpy()
    named = -np.mean([logits[i, label] for i, label in enumerate(labels)])
    h = said.features[labelled:].double().numpy()
    h = h / np.linalg.norm(h, axis=1, keepdims=True)
    cosine = h @ const.found.prototypes.double().numpy().T
    student, teacher = softmax(cosine / 0.1), softmax(cosine / 0.1 * const.sharpening)
    count = len(batch.unlabelled)
    alike = -np.mean([teacher[(i + count) % (2 * count)] @ np.log(student[i]) for i in range(2 * count)])
    concept_count = cosine.shape[1]
    member = const.found.member[batch.unlabelled.position].numpy()
    prior = np.array([(np.sum(member == k) + method.smoothing) for k in range(concept_count)])
    prior = prior / prior.sum()
    mean = student.mean(axis=0)
    middle = (mean + prior) / 2
    apart = {
        "kl": rel_entr(mean, prior),
        "kl_fwd": rel_entr(prior, mean),
        "jsd": (rel_entr(mean, middle) + rel_entr(prior, middle)) / 2,
    }
    return {"supervised": named, "distillation": alike, "prior": float(apart[method.divergence].sum())}


def number(value: Tensor) -> float:
    return float(value.detach())


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("divergence", ["kl", "kl_fwd", "jsd"])
def test_the_loss_is_eq_8(divergence: str) -> None:
    here = World(divergence=divergence)
    const = here.prepared(WARMUP + 1).const
    assert len(const.found.prototypes) >= 2, "the toy must have something to tell apart"
    batch = here.batch()
    found = here.loss(const, batch)
    expected = by_hand(here.net, batch, const, here.method)
    for name, value in expected.items():
        assert number(found.terms[name]) == pytest.approx(value, rel=1e-4), name
    terms = {name: number(value) for name, value in found.terms.items()}
    unsupervised = terms["distillation"] + 0.5 * terms["prior"] + terms["contrast"]
    total = 0.65 * unsupervised + 0.35 * (terms["supervised"] + terms["supervised_contrast"])
    assert number(found.value) == pytest.approx(total, rel=1e-5)


def test_warm_up_is_contrast_alone() -> None:
    here = World()
    found = here.loss(here.prepared(1).const, here.batch())
    assert set(found.terms) == {"contrast", "supervised_contrast"}
    expected = 0.65 * number(found.terms["contrast"]) + 0.35 * number(found.terms["supervised_contrast"])
    assert number(found.value) == pytest.approx(expected)


def course(here: World, round_: int) -> Course:
    return Course(Budget(1, None, 8), Visit(0, round_, CLIENT), Optimiser(0.05, momentum=0.9), None)


def test_warm_up_moves_features_by_contrast_and_the_classifier_by_labels() -> None:
    here = World()
    before = here.net.state()
    stages: list[tuple[set[str], set[str]]] = []
    follow = Course.follow

    def watched(self: Course, net: Net, *arguments: Any, **options: Any) -> Any:
        start = net.state()
        fitted = follow(self, net, *arguments, **options)
        end = net.state()
        moved = {name for name in net.named_parameters() if not torch.equal(start[name], end[name])}
        stages.append(({name.split(".")[0] for name in moved}, set(fitted.terms)))
        return fitted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Course, "follow", watched)
        here.method.train(here.net, here.prepared(1), course(here, 1))
    assert stages == [
        ({"backbone", "heads"}, {"total", "contrast", "supervised_contrast"}),
        ({"classifier"}, {"total", "classifier"}),
    ]
    assert not equal_weights(before, here.net.state())


def test_the_classifier_step_leaves_batch_norm_statistics_alone() -> None:
    here = World()
    local = here.prepared(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedLPA, "loss", lambda *_: Loss(torch.zeros(()), {}))
        before = here.net.state()
        here.method.train(here.net, local, course(here, 1))
    after = here.net.state()
    assert {name for name in after if not torch.equal(before[name], after[name])} == {"classifier.weight"}


def test_after_warm_up_labels_move_the_features_too() -> None:
    here = World(unsupervised_share=0.0)
    const, batch = here.prepared(WARMUP + 1).const, here.batch()
    here.loss(const, batch).terms["supervised"].backward()
    gradients = {name for name, tensor in here.net.named_parameters().items() if tensor.grad is not None}
    assert {"classifier.weight", "backbone.convs.0.weight"} <= gradients


def test_the_prior_term_reaches_features_and_no_prototype() -> None:
    here = World()
    const = here.prepared(WARMUP + 1).const
    assert not const.found.prototypes.requires_grad
    here.loss(const, here.batch()).terms["prior"].backward()
    gradient = here.net.named_parameters()["backbone.convs.0.weight"].grad
    assert gradient is not None
    assert float(gradient.abs().sum()) > 0
    assert here.net.named_parameters()["classifier.weight"].grad is None


def test_concepts_stay_until_they_are_due() -> None:
    here = World(refresh=3)
    first = here.prepared(WARMUP + 1)
    assert first.pseudo is not None
    assert int(first.kept.round) == WARMUP + 1
    here.net.load({name: tensor + 0.3 for name, tensor in here.net.named_parameters().items()})
    again = here.prepared(WARMUP + 3, first.kept)
    assert again.pseudo is None
    assert torch.equal(again.const.found.prototypes, first.const.found.prototypes)
    # It missed the rounds in which it was due: what it holds is too old all the same.
    late = here.prepared(WARMUP + 7, first.kept)
    assert int(late.kept.round) == WARMUP + 7
    assert not torch.equal(late.const.found.prototypes[:1], first.const.found.prototypes[:1])


@pytest.mark.parametrize("before", [3, 30])
def test_concepts_of_other_images_are_not_kept(before: int) -> None:
    here = World(refresh=9)
    every = torch.arange(len(here.data.unlabelled))
    assert before != len(every)
    labelled = torch.arange(len(here.data.labelled))
    then = here.prepared(WARMUP + 1, data=shrunk(here.data, labelled, every.repeat(2)[:before]))
    now = here.prepared(WARMUP + 2, then.kept)
    assert int(now.kept.round) == WARMUP + 2
    here.loss(now.const, here.batch())


def test_concepts_do_not_survive_a_swap_of_images() -> None:
    here = World(refresh=9)
    every, labelled = torch.arange(len(here.data.unlabelled)), torch.arange(len(here.data.labelled))
    then = here.prepared(WARMUP + 1, data=shrunk(here.data, labelled, every[:-1]))
    same = here.prepared(WARMUP + 2, then.kept, shrunk(here.data, labelled, every[:-1]))
    assert int(same.kept.round) == WARMUP + 1
    # One image left and another one came: as many as before, but each in another's place.
    now = here.prepared(WARMUP + 2, then.kept, shrunk(here.data, labelled, every[1:]))
    assert int(now.kept.round) == WARMUP + 2


def test_what_is_kept_in_warm_up_is_nothing() -> None:
    local = World().prepared(1)
    assert int(local.kept.round) == 0
    assert len(local.kept.member) == 0


@pytest.mark.parametrize("outliers", ["nearest", "none"])
def test_members_are_those_of_the_unlabelled_images(outliers: str) -> None:
    here = World(outliers=outliers)
    found = here.prepared(WARMUP + 1).const.found
    assert len(found.member) == len(here.data.unlabelled)
    assert int(found.member.max()) < len(found.prototypes)
    assert int(found.member.min()) >= (0 if outliers == "nearest" else -1)
    lengths = torch.linalg.vector_norm(found.prototypes, dim=1)
    assert lengths.tolist() == pytest.approx([1.0] * len(lengths), abs=1e-5)


def test_images_of_no_concept_count_nowhere() -> None:
    here = World()
    const = here.prepared(WARMUP + 1).const
    batch = here.batch()
    position = batch.unlabelled.position
    alone = const.found.member.clone()
    alone[position[1:]] = -1
    # The prior counts images by a column of its own, which an oracle fills in another way.
    counted = torch.where(alone < 0, -1, (alone + 1) % len(const.found.prototypes))
    lost = const._replace(found=const.found._replace(member=alone, prior_member=counted))
    found = here.loss(lost, batch)
    seen = here.net
    seen.network.train()
    with torch.no_grad():
        joint = torch.cat([batch.labelled.weak, batch.labelled.weak_again])
        features = seen(torch.cat([joint, batch.unlabelled.weak, batch.unlabelled.weak_again])).features
    seen.network.eval()
    start = 2 * len(batch.labelled)
    kept = F.normalize(features[[start, start + len(position)]], dim=1) @ const.found.prototypes.T / 0.1
    mean = kept.softmax(dim=1).mean(dim=0)
    prior = torch.full((len(mean),), 0.5)
    prior[int(counted[position[0]])] += 1
    prior = prior / prior.sum()
    assert number(found.terms["prior"]) == pytest.approx(float((mean * (mean / prior).log()).sum()), rel=1e-4)
    nobody = lost._replace(found=lost.found._replace(member=torch.full_like(alone, -1)))
    assert number(here.loss(nobody, batch).terms["prior"]) == 0


def test_a_single_concept_has_nothing_to_tell_apart() -> None:
    here = World()
    const = here.prepared(WARMUP + 1).const
    one = const.found._replace(
        member=torch.zeros_like(const.found.member),
        prior_member=torch.zeros_like(const.found.member),
        prototypes=const.found.prototypes[:1],
    )
    found = here.loss(const._replace(found=one), here.batch())
    assert number(found.terms["distillation"]) == number(found.terms["prior"]) == 0


def test_k_may_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    original = guided.guided_concepts

    def noted(*args: Any, **options: Any) -> Any:
        asked.append(args[4])
        return original(*args, **options)

    monkeypatch.setattr(guided, "guided_concepts", noted)
    for options in ({"neighbours": 7}, {}):
        World(**options).prepared(WARMUP + 1)
    assert asked[0] == 7 != asked[1]


def test_a_uniform_prior_is_simgcds_term() -> None:
    here = World(prior="uniform")
    const, batch = here.prepared(WARMUP + 1).const, here.batch()
    found = here.loss(const, batch)
    here.net.network.train()
    with torch.no_grad():
        labelled = torch.cat([batch.labelled.weak, batch.labelled.weak_again])
        features = here.net(torch.cat([labelled, batch.unlabelled.weak, batch.unlabelled.weak_again])).features
    here.net.network.eval()
    logits = F.normalize(features[2 * len(batch.labelled) :], dim=1) @ const.found.prototypes.T / 0.1
    mean = logits.softmax(dim=1).mean(dim=0)
    expected = math.log(len(mean)) + float((mean * mean.log()).sum())
    assert number(found.terms["prior"]) == pytest.approx(expected, rel=1e-4)


# Clients with little


def shrunk(data: ClientData, labelled: Tensor, unlabelled: Tensor) -> ClientData:
    return data._replace(
        labelled=data.labelled[labelled], labels=data.labels[labelled], unlabelled=data.unlabelled[unlabelled]
    )


def trained(here: World, data: ClientData, round_: int) -> Up:
    task = Task(round_, CLIENT, 0.05, None)
    reply = client_round(here.place, task, here.down, data)
    assert all(torch.isfinite(tensor).all() for tensor in reply.up.weights.values())
    up: Up = reply.up
    return up


@pytest.mark.parametrize("method", ["fedlpa", "fed-gcd", "fed-simgcd", "fed-agcl"])
@pytest.mark.parametrize("round_", [1, WARMUP + 1])
@pytest.mark.parametrize("case", ["no labels", "one class", "two images", "one labelled and one not", "only labels"])
def test_clients_with_little_train_all_the_same(case: str, round_: int, method: str) -> None:
    here = World(method)
    data, everything = here.data, torch.arange(len(here.data.unlabelled))
    one_class = (data.labels == data.labels[0]).nonzero()[:, 0]
    little = {
        "no labels": shrunk(data, NOTHING, everything),
        "one class": shrunk(data, one_class, everything),
        "two images": shrunk(data, NOTHING, everything[:2]),
        "one labelled and one not": shrunk(data, torch.tensor([0]), everything[:1]),
        "only labels": shrunk(data, torch.arange(len(data.labelled)), NOTHING),
    }[case]
    assert float(trained(here, little, round_).samples) == little.image_count


def test_a_client_without_infomap_learns_so_before_it_has_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "infomap", None)
    with pytest.raises(UserError, match=r"needs infomap: pip install 'semifed\[discovery\]'"):
        World().prepared(1)


def test_without_labels_nothing_is_identified() -> None:
    here = World()
    data = shrunk(here.data, NOTHING, torch.arange(len(here.data.unlabelled)))
    local = here.prepared(WARMUP + 1, data=data)
    assert local.pseudo is not None
    assert not local.pseudo.used.any()


def test_a_threshold_that_lets_all_through_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    # P = 0: the least sure labelled image is the threshold, and a random classifier names few of them rightly.
    rules: list[str] = []
    original = guided.discover_concepts

    def watched(*arguments: Any, **options: Any) -> Any:
        rules.append(options["rule"])
        return original(*arguments, **options)

    monkeypatch.setattr(guided, "discover_concepts", watched)
    monkeypatch.setattr(guided, "seen_threshold", lambda *_, **__: 0.0)
    here = World(refresh=5)
    doubted = here.prepared(WARMUP + 1)
    assert doubted.pseudo is not None
    assert not doubted.pseudo.used.any(), "the graph never saw them, so they were not used"
    assert measured(here, doubted)["doubted"] == [1.0, 1.0], "once, however many steps were taken"
    monkeypatch.setattr(guided, "seen_threshold", lambda *_, **__: 1.0)
    believed = here.prepared(WARMUP + 1)
    assert measured(here, believed)["doubted"] == [0.0, 1.0]
    assert rules == ["none", "clique"]
    kept = here.prepared(WARMUP + 2, believed.kept)
    assert "doubted" not in measured(here, kept), "only a refresh can be doubted"


def measured(here: World, local: Local[Any, Any]) -> dict[str, list[float]]:
    """Sum and number of what a client's round reports beside its losses."""
    fitted = here.method.train(here.net, local, course(here, WARMUP + 1))
    assert fitted.steps > 1
    return {name: pair.tolist() for name, pair in fitted.measured.items()}


def test_clients_count_equally_in_the_mean_number_of_concepts() -> None:
    here = World()
    local = here.prepared(WARMUP + 1)
    assert measured(here, local)["concepts"] == [len(local.const.found.prototypes), 1.0]


def test_identified_images_enter_the_graph_with_their_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Tensor] = []
    original = guided.discover_concepts

    def watched(features: Tensor, labels: Tensor, **options: Any) -> Any:
        told.append(labels)
        return original(features, labels, **options)

    monkeypatch.setattr(guided, "discover_concepts", watched)
    here = World()
    pseudo = here.prepared(WARMUP + 1).pseudo
    assert pseudo is not None
    assert 0 < int(pseudo.used.sum()) < len(pseudo.used), "the toy must have both kinds"
    (labels,) = told
    count = len(here.data.labels)
    assert torch.equal(labels[:count], here.data.labels)
    with torch.no_grad():
        sure, guess = here.data.plain_outputs(here.net).logits.softmax(dim=1).max(dim=1)
        own = here.data.labelled_outputs(here.net).logits.softmax(dim=1).amax(dim=1)
    threshold = guided.seen_threshold(own, 50.0)
    assert labels[count:].tolist() == [
        label if confidence > threshold else -1 for label, confidence in zip(guess.tolist(), sure.tolist(), strict=True)
    ]


def test_options_of_the_graph_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def watched(name: str) -> Any:
        original = getattr(guided, name)

        def function(*arguments: Any, **options: Any) -> Any:
            asked.update(options)
            return original(*arguments, **options)

        return function

    for name in ("seen_threshold", "neighbour_count", "discover_concepts"):
        monkeypatch.setattr(guided, name, watched(name))
    options = {"density": "logit", "class_size": "median", "outliers": "none", "partners": 3}
    World(**options, smallest_concept=6).prepared(WARMUP + 1)
    assert {name: asked[name] for name in options} == options
    assert asked["smallest"] == 6


def test_the_teacher_sharpens_from_the_first_round_after_warm_up() -> None:
    here = World(teacher_rounds=4)
    factors = [here.prepared(WARMUP + passed).const.sharpening for passed in (1, 3, 5, 9)]
    assert factors == pytest.approx([0.1 / 0.07, 0.1 / 0.055, 0.1 / 0.04, 0.1 / 0.04])


# Settings without a meaning


@pytest.mark.parametrize("method", ["fedlpa", "fed-simgcd"])
@pytest.mark.parametrize("head", ["linear", "mlp2(8)"])
def test_logits_without_bounds_are_refused(method: str, head: str) -> None:
    kind = "linear" if head == "linear" else "mlp"
    told = f"^model.head={kind} has no meaning for {method}: .* model.head=cosine$"
    with pytest.raises(UserError, match=told):
        toy_recipe(method, "clients", {"model": {"head": head}})
    assert toy_recipe(method, "clients", {"model": {"head": "cosine(0.2)"}})
    assert toy_recipe("fed-gcd", "clients", {"model": {"head": head}}), "its classifier moves nothing else"


@pytest.mark.parametrize("method", ["fedlpa", "fed-gcd", "fed-simgcd", "fed-agcl", "untrained"])
def test_labelled_images_among_the_unlabelled_are_refused(method: str) -> None:
    tables = toy_recipe(method, "clients").plain()
    del tables["scenario"]["labelled_fraction"]
    with pytest.raises(UserError, match=r"^scenario.labelled_per_class: .* give scenario.labelled_fraction$"):
        check_recipe({**tables, "scenario": {**tables["scenario"], "labelled_per_class": 4}})


# k


@pytest.mark.parametrize(
    ("scenario", "share"),
    [
        ({"labels": "clients", "labelled_fraction": 0.1}, 0.1),
        ({"labels": "clients", "labelled_fraction": 0.5}, 0.5),
        ({"labels": "some-clients", "labelled_clients": 2, "labelled_fraction": None}, 1.0),
    ],
)
def test_k_follows_the_share_of_labels_that_the_scenario_has(scenario: dict[str, Any], share: float) -> None:
    tables = toy_recipe("fedlpa", "clients").plain()
    del tables["method"]["labelled_share"]
    chosen = {key: value for key, value in {**tables["scenario"], **scenario}.items() if value is not None}
    recipe = check_recipe({**tables, "scenario": chosen})
    method = recipe.build_method()
    assert isinstance(method, FedLPA)
    assert method.labelled_share == share
    assert recipe.plain()["method"]["labelled_share"] == share, "written out, it runs again as it is"
    with pytest.raises(UserError, match=rf"method.labelled_share: 0.7, but .* set {share:g} \(method.neighbours"):
        check_recipe({**tables, "scenario": chosen, "method": {**tables["method"], "labelled_share": 0.7}})


# Groups at the end


def test_k_at_the_end_is_not_that_of_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    original = inference.discover_concepts

    def watched(*arguments: Any, **options: Any) -> Any:
        asked.append(options["neighbours"])
        return original(*arguments, **options)

    monkeypatch.setattr(inference, "discover_concepts", watched)
    features = torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
    gallery = Gallery(
        Output(torch.zeros(120, 3), features, {}), Output(torch.zeros(0, 3), features[:0], {}), NOTHING, 0
    )
    FedLPA(neighbours=50).clusters(gallery)
    FedLPA(final_neighbours=7).clusters(gallery)
    assert asked == [10, 7], "a quarter of 120 images by 3 known classes"


def test_the_papers_test_images_are_all_linked_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of grouping must be of all images; with the clients' bound FedLPA+ was of a sample of them."""
    most: list[int] = []
    original = concepts.sampled

    def watched(images: int, neighbours: int, most_links: int, generator: torch.Generator) -> Tensor:
        most.append(most_links)
        return original(images, neighbours, most_links, generator)

    monkeypatch.setattr(concepts, "sampled", watched)
    said = Output(torch.eye(4)[torch.arange(40) % 4], torch.eye(40), {})
    gallery = Gallery(said, said, torch.arange(40) % 4, seed=0)
    for kind in ("graph", "graph+labels"):
        FedLPA(inference=kind).clusters(gallery)
    validation = 2_500  # a tenth of the known training images of CIFAR-10
    assert min(most) >= (10_000 + validation) * 500, "a quarter of 10,000 images by 5 known classes"


def test_the_labels_of_fedlpa_plus_join_what_looks_apart() -> None:
    # Three blobs apart; the server's labelled images say that the first two are of one class.
    which = torch.arange(3).repeat_interleave(40)
    noise = torch.randn(120, 3, generator=torch.Generator().manual_seed(0))
    features, classes = torch.eye(3)[which] + 0.05 * noise, (which == 2).long()
    told = torch.arange(120) % 2 == 0

    def said(mask: Tensor) -> Output:
        return Output(10.0 * torch.eye(2)[classes[mask]], features[mask], {})

    gallery = Gallery(said(~told), said(told), classes[told], seed=0)
    plain, plus = (
        FedLPA(inference=inference, final_neighbours=19).clusters(gallery) for inference in ("graph", "graph+labels")
    )
    assert plain.tolist() == which[~told].tolist()
    assert plus.tolist() == classes[~told].tolist()


# Oracles


def test_only_oracles_are_told_the_classes() -> None:
    assert World().data.classes is None
    told = World(prior="oracle")
    assert told.data.classes is not None
    raw = told.parts.scenario.dataset.y_train[told.data.unlabelled]
    assert torch.equal(told.data.classes, raw)  # the known classes of the toy come first in the data too


def test_a_true_prior_counts_images_by_their_class() -> None:
    found, told = (World(prior=prior).prepared(WARMUP + 1).const.found for prior in ("concepts", "oracle"))
    assert torch.equal(found.prior_member, found.member)
    assert torch.equal(told.member, found.member), "an oracle of the prior leaves the concepts as they were found"
    here = World(prior="oracle")
    every = local_concepts(here.net, here.data, here.method.graph, 0.5, "nearest", Visit(0, WARMUP + 1, CLIENT))
    counted = true_members(every.concepts.member, true_classes(here.data))
    assert torch.equal(told.prior_member, counted[len(here.data.labelled) :])
    assert not torch.equal(told.prior_member, told.member), "the toy must have images in a wrong concept"


def test_true_concepts_are_the_classes() -> None:
    here = World(concepts="oracle")
    found = here.prepared(WARMUP + 1).const.found
    classes = here.data.classes
    assert classes is not None
    for one in classes.unique():
        assert len(found.member[classes == one].unique()) == 1
    assert len(found.prototypes) == len(torch.cat([classes, here.data.labels]).unique())
    concepts = true_concepts(here.net, here.data)
    own = here.data.plain_outputs(here.net).features[classes == classes[0]]
    with_labels = here.data.labelled_outputs(here.net).features[here.data.labels == classes[0]]
    direction = F.normalize(torch.cat([with_labels, own]), dim=1).sum(dim=0)
    expected = direction / torch.linalg.vector_norm(direction)
    torch.testing.assert_close(concepts.prototypes[concepts.member[-len(classes)]], expected)


# The server


def test_clients_count_equally_however_many_images_they_have() -> None:
    here = World()
    one = {name: torch.zeros_like(tensor) for name, tensor in here.net.trained().items()}
    other = {name: torch.ones_like(tensor) for name, tensor in one.items()}
    ups = [Up(one, torch.tensor(1000.0)), Up(other, torch.tensor(10.0)), Up(other, torch.tensor(0.0))]
    mean = here.method.aggregate(Server(here.net.state()), ups, site_of(here.parts, 1)).weights
    for name in one:
        assert float(mean[name].float().mean()) == pytest.approx(0.5), name


def test_concepts_never_leave_the_client() -> None:
    here = World()
    reply = client_round(here.place, Task(WARMUP + 1, CLIENT, 0.05, None), here.down, here.data)
    assert set(reply.up._fields) == {"weights", "samples"}
    assert isinstance(reply.held, Held)
    assert len(reply.held.kept.prototypes) >= 1


# SimGCD


def test_simgcd_has_a_row_for_every_class() -> None:
    here = World("fed-simgcd", novel=2, entropy_weight=4.0)
    method: FedSimGCD = here.method
    batch = here.batch()
    found = here.loss(Sharpening(2.0), batch)
    here.net.network.train()
    with torch.no_grad():
        parts = [batch.labelled.weak, batch.labelled.weak_again, batch.unlabelled.weak, batch.unlabelled.weak_again]
        said = here.net(torch.cat(parts))
    here.net.network.eval()
    logits = every_logit(said)
    assert logits.shape[1] == 3 + 2
    split = 2 * len(batch.labelled)
    named = F.cross_entropy(logits[:split], batch.labelled.labels.repeat(2))
    halves = [logits[: split // 2], logits[split // 2 : split]], logits[split:].chunk(2)
    pairs = [(one, two) for one, two in halves] + [(two, one) for one, two in halves]
    alike = torch.cat([-((2.0 * t).softmax(dim=1) * s.log_softmax(dim=1)).sum(dim=1) for s, t in pairs]).mean()
    mean = logits.softmax(dim=1).mean(dim=0)
    even = math.log(5) + float((mean * mean.log()).sum())
    assert number(found.terms["supervised"]) == pytest.approx(float(named), rel=1e-5)
    assert number(found.terms["distillation"]) == pytest.approx(float(alike), rel=1e-5)
    assert number(found.terms["prior"]) == pytest.approx(even, rel=1e-4)
    terms = {name: number(value) for name, value in found.terms.items()}
    unsupervised = terms["distillation"] + 4 * terms["prior"] + terms["contrast"]
    total = 0.65 * unsupervised + 0.35 * (terms["supervised"] + terms["supervised_contrast"])
    assert number(found.value) == pytest.approx(total, rel=1e-5)
    answer = method.predict(here.net, batch.unlabelled.plain)
    every = every_logit(here.net(batch.unlabelled.plain)).softmax(dim=1)
    torch.testing.assert_close(answer.unknown, every[:, 3:].sum(dim=1))


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_simgcds_teacher_has_its_own_temperature_whatever_the_classifiers(temperature: float) -> None:
    changes = {"model": {"head": f"cosine({temperature})"}, "method": {"novel": 2}}
    parts = toy_parts(toy_recipe("fed-simgcd", "clients", changes), toy_dataset())
    net, data, method = place_of(parts).net, parts.scenario.client(CLIENT), parts.method
    down = method.broadcast(method.setup(net.state(), site_of(parts)))
    factor = method.prepare(net, down, data, None, Visit(0, 1, CLIENT)).const.factor
    said = data.plain_outputs(net)
    rows = torch.cat([net.state()["classifier.weight"], net.state()["heads.novel.weight"]])
    cosines = F.normalize(said.features, dim=1) @ F.normalize(rows, dim=1).T
    torch.testing.assert_close(every_logit(said), cosines / temperature)
    torch.testing.assert_close(factor * every_logit(said), cosines / 0.07)


# GCD


def test_gcd_takes_the_number_of_classes_its_search_finds() -> None:
    generator = torch.Generator().manual_seed(0)
    classes = torch.arange(6).repeat(30)
    features = 20.0 * torch.eye(6)[classes] + torch.randn(180, 6, generator=generator)
    told = (classes < 4) & (torch.arange(180) % 12 < 6)

    def said(mask: Tensor) -> Output:
        return Output(torch.zeros(int(mask.sum()), 4), features[mask], {})

    gallery = Gallery(said(~told), said(told), classes[told], seed=0)
    searched = likely_classes(gallery)
    drawn = torch.Generator().manual_seed(0)
    unit = [F.normalize(features[mask], dim=1) for mask in (~told, told)]
    assert searched == max(4, estimated_clusters(*unit, classes[told], 20, generator=drawn, tries=5))
    assert len(FedGCD(novel="searched").clusters(gallery).unique()) == searched
    assert len(FedAGCL(novel="searched").clusters(gallery).unique()) == searched
    assert len(FedGCD(novel=2).clusters(gallery).unique()) == 6
    unlabelled_only = gallery._replace(labels=NOTHING, labelled=said(classes < 0))
    assert likely_classes(unlabelled_only) == 8
