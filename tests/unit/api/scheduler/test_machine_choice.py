"""Which workers get the seats of jobs that require or prefer something of a machine."""

from collections import Counter
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from api.scheduler.eligibility import Excluded
from api.scheduler.seat_planner import Available, Demand, HeldSeat, Issue, Pair, decide_seats, fair_shares
from api.scheduler.shortage import shortages
from computeshare.jobspec.machine_needs import MachineFacts, Needs


def demand(job: str, seats: int = 8, minimum: int = 1, **more: object) -> Demand:
    return Demand(job, "q", seats, minimum, False, **more)  # type: ignore[arg-type]


def workers(count: int) -> list[Available]:
    return [Available(f"w{number}", ("q",)) for number in range(1, count + 1)]


def issued(demands: list[Demand], there: list[Available], out: frozenset[Pair] = frozenset()) -> set[Pair]:
    return {(one.job_id, one.worker) for one in decide_seats(demands, there, [], out=out) if isinstance(one, Issue)}


def test_a_job_gets_the_free_workers_that_it_prefers_and_others_where_there_are_no_more() -> None:
    liking = demand("a", seats=2, prefers={"w3": 1, "w4": 2})
    assert issued([liking], workers(4)) == {("a", "w4"), ("a", "w3")}
    assert issued([liking], workers(3)) == {("a", "w3"), ("a", "w1")}
    assert issued([liking], workers(2)) == {("a", "w1"), ("a", "w2")}


def test_a_job_without_preferences_leaves_the_workers_that_others_prefer() -> None:
    jobs = [demand("any", seats=1), demand("attic", seats=1, prefers={"w1": 1})]
    assert issued(jobs, workers(2)) == {("any", "w2"), ("attic", "w1")}


def test_a_seat_is_not_moved_to_a_worker_that_is_preferred() -> None:
    seat = HeldSeat("s", "a", "w1", 1, "started")
    there = [Available("w1", ("q",), "s"), Available("w2", ("q",))]
    assert decide_seats([demand("a", seats=1, prefers={"w2": 1})], there, [seat]) == []


def test_a_job_that_any_worker_serves_makes_room_at_once_for_one_that_only_this_one_does() -> None:
    jobs = [demand("any", seats=1), demand("attic", seats=1)]
    assert issued(jobs, workers(2), frozenset({("attic", "w2")})) == {("any", "w2"), ("attic", "w1")}


MACHINES = st.builds(
    MachineFacts,
    st.sampled_from((4_000_000_000, 8_000_000_000)),
    st.sampled_from(("cpu", "cuda:0")),
    st.dictionaries(st.just("room"), st.sampled_from(("attic", "hall"))),
)
NEEDS = st.builds(
    Needs,
    memory=st.sampled_from((None, "4GB", "8GB")),
    device=st.sampled_from((None, "cuda")),
    labels=st.dictionaries(st.just("room"), st.sampled_from(("attic", "hall"))),
)


@dataclass(frozen=True)
class Plant:
    """Jobs with what they ask for, free workers, and their machines."""

    demands: list[Demand]
    requires: dict[str, Needs]
    prefers: dict[str, Needs]
    there: list[Available]
    machines: dict[str, MachineFacts]

    @property
    def out(self) -> frozenset[Pair]:
        pairs = ((job, worker) for job in self.requires for worker in self.machines)
        return frozenset((job, w) for job, w in pairs if self.requires[job].lacking(self.machines[w]))


@st.composite
def plants(draw: st.DrawFn) -> Plant:
    there = workers(draw(st.integers(0, 6)))
    machines = {worker.id: draw(MACHINES) for worker in there}
    demands, requires, prefers = [], {}, {}
    for number in range(draw(st.integers(1, 4))):
        job, seats = f"job{number}", draw(st.integers(1, 5))
        requires[job], prefers[job] = draw(NEEDS), draw(NEEDS)
        met = {worker: count for worker, one in machines.items() if (count := prefers[job].met(one))}
        about = {"priority": draw(st.sampled_from((0, 0, 3))), "prefers": met, "requires": requires[job].told}
        demands.append(demand(job, seats, draw(st.integers(1, seats)), **about))
    return Plant(demands, requires, prefers, there, machines)


@settings(max_examples=300, deadline=None)
@given(plants())
def test_seats_go_only_to_machines_that_have_what_is_required_and_each_job_gets_its_share_at_once(plant: Plant) -> None:
    found = issued(plant.demands, plant.there, plant.out)
    assert all(not plant.requires[job].lacking(plant.machines[worker]) for job, worker in found)
    due = {job: its.due for job, its in fair_shares(plant.demands, plant.there, [], (), plant.out).items()}
    assert Counter(job for job, _ in found) == +Counter(due)


@settings(max_examples=300, deadline=None)
@given(plants())
def test_preferences_cost_no_job_a_seat(plant: Plant) -> None:
    indifferent = [replace(one, prefers={}) for one in plant.demands]
    with_them, without = (
        Counter(job for job, _ in issued(demands, plant.there, plant.out)) for demands in (plant.demands, indifferent)
    )
    assert with_them == without


@settings(max_examples=300, deadline=None)
@given(plants())
def test_no_worker_that_a_job_prefers_to_one_of_its_own_is_left_over(plant: Plant) -> None:
    found = issued(plant.demands, plant.there, plant.out)
    idle = plant.machines.keys() - {worker for _, worker in found}
    for job, worker in found:
        better = plant.prefers[job].met(plant.machines[worker])
        fitting = [w for w in idle if (job, w) not in plant.out]
        assert all(plant.prefers[job].met(plant.machines[w]) <= better for w in fitting)


@settings(max_examples=200, deadline=None)
@given(plants())
def test_a_job_that_nobody_can_serve_says_what_it_requires_and_what_is_missing(plant: Plant) -> None:
    lacking = {
        (job, worker): "it lacks " + " and ".join(plant.requires[job].lacking(plant.machines[worker]))
        for job, worker in plant.out
    }
    nobody = [job for job in plant.requires if plant.there and all((job, w) in plant.out for w in plant.machines)]
    unmet = {job: plant.requires[job].unmet(list(plant.machines.values())) for job in nobody}
    out = Excluded(lacking, {}, frozenset(lacking), lacking, unmet)
    share = fair_shares(plant.demands, plant.there, [], (), plant.out)
    told = shortages(plant.demands, plant.there, [], out, {job: its.due for job, its in share.items()})
    for job in nobody:
        reason = told[job]
        assert reason and plant.requires[job].told in reason.text and reason.text.endswith(unmet[job])
    for one in plant.demands:
        fitting = sum((one.job_id, worker.id) not in plant.out for worker in plant.there)
        assert (told[one.job_id] is None) == (fitting >= one.minimum)
