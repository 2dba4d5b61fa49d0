"""How workers are shared among jobs: by priority, fairly among equals, and in the end quietly."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from api.scheduler.fair_share import SeatDemand, shares
from api.scheduler.reasons import Reason
from api.scheduler.seat_planner import (
    LONGEST_LEAVE_MS,
    REBALANCE_MS,
    TAKE_OVER_MS,
    Action,
    Available,
    Close,
    Demand,
    HeldSeat,
    Issue,
    Leave,
    Past,
    decide_seats,
    fair_shares,
)
from api.scheduler.shortage import shortage

QUEUES = ("red", "blue", "green")
TURN_MS = 1000


def demand(job: str, seats: int = 8, minimum: int = 1, priority: int = 0, queue: str = "red") -> Demand:
    return Demand(job, queue, seats, minimum, True, priority)


def reds(count: int) -> list[Available]:
    return [Available(f"w{number}", ("red",)) for number in range(1, count + 1)]


def serving(worker: str, job: str, number: int = 1, state: str = "started") -> HeldSeat:
    return HeldSeat(f"{worker}-{job}-{number}", job, worker, number, state)


def waited(one: Demand, short_ms: int, moved_ms: int | None = None) -> Demand:
    return replace(one, short_ms=short_ms, moved_ms=moved_ms)


@dataclass
class World:
    """Workers that do what they are told, a turn of the dispatcher a second."""

    demands: list[Demand]
    workers: list[Available]
    held: list[HeldSeat] = field(default_factory=list)
    past: list[Past] = field(default_factory=list)
    short_since: dict[str, int] = field(default_factory=dict)
    moved_at: dict[str, int] = field(default_factory=dict)
    unit_turns: int = 2
    asked_at: dict[str, int] = field(default_factory=dict)
    turns: int = 0
    made: int = 0

    def counts(self) -> dict[str, int]:
        return dict(Counter(seat.job_id for seat in self.held if not seat.leaving))

    def turn(self) -> list[Action]:
        now = self.turns * TURN_MS
        arguments = (self.workers, self.held, self.past)
        share = fair_shares(self.demands, *arguments)
        short = [job for job, its in share.items() if its.holds < its.due]
        self.short_since = {job: self.short_since.get(job, now) for job in short}
        demands = [waited(d, now - self.short_since.get(d.job_id, now), self.ago(d.job_id, now)) for d in self.demands]
        actions = decide_seats(demands, *arguments)
        for action in actions:
            self.apply(action, now)
        done = [s for s in self.held if s.leaving and self.turns - self.asked_at[s.id] >= self.unit_turns]
        self.held = [replace(s, state="finished") if s in done else s for s in self.held]
        self.turns += 1
        self.check()
        return actions

    def ago(self, job: str, now: int) -> int | None:
        return now - self.moved_at[job] if job in self.moved_at else None

    def apply(self, action: Action, now: int) -> None:
        if isinstance(action, Issue):
            self.made += 1
            seat = HeldSeat(f"s{self.made}", action.job_id, action.worker, action.number, "started")
            self.held.append(seat)
            self.demands = [replace(d, started=True) if d.job_id == action.job_id else d for d in self.demands]
            return
        seat = next(one for one in self.held if one.id == action.seat_id)
        self.held.remove(seat)
        if isinstance(action, Leave):
            self.held.append(replace(seat, leaving_ms=0, left_to=action.to))
            self.asked_at[seat.id] = self.turns
            for job in (seat.job_id, action.to):
                if job:
                    self.moved_at[job] = now
        else:
            self.past.append(Past(seat.id, seat.job_id, seat.worker, action.state, 0))

    def check(self) -> None:
        """What holds at any moment."""
        queues = {worker.id: worker.queues for worker in self.workers}
        assert max(Counter(seat.worker for seat in self.held).values(), default=0) <= 1
        for one in self.demands:
            mine = [seat for seat in self.held if seat.job_id == one.job_id]
            assert all(one.queue in queues[seat.worker] for seat in mine)
            assert len([seat for seat in mine if not seat.leaving]) <= one.seats

    def rest(self, most: int = 400) -> int:
        """Let turns pass until nothing was done for longer than any patience; returns how many that took."""
        quiet = 0
        while quiet <= 2 * REBALANCE_MS // TURN_MS:
            quiet = 0 if self.turn() else quiet + 1
            assert self.turns < most, "it never comes to rest"
        return self.turns - quiet


@st.composite
def worlds(draw: st.DrawFn) -> World:
    names = st.sets(st.sampled_from(QUEUES), min_size=1)
    workers = [Available(f"w{n}", tuple(sorted(draw(names)))) for n in range(draw(st.integers(0, 6)))]
    demands = []
    for number in range(draw(st.integers(1, 4))):
        seats = draw(st.integers(1, 6))
        minimum, priority = draw(st.integers(1, seats)), draw(st.sampled_from((0, 0, 7)))
        queue, started = draw(st.sampled_from(QUEUES)), draw(st.booleans())
        demands.append(Demand(f"job{number}", queue, seats, minimum, started, priority))
    held: list[HeldSeat] = []
    for worker in workers:
        fitting = [d for d in demands if d.queue in worker.queues]
        fitting = [d for d in fitting if sum(seat.job_id == d.job_id for seat in held) < d.seats]
        if fitting and draw(st.booleans()):
            held.append(serving(worker.id, draw(st.sampled_from(fitting)).job_id, len(held) + 1))
    return World(demands, workers, held, unit_turns=draw(st.integers(1, 4)))


@settings(max_examples=150, deadline=None)
@given(worlds())
def test_whatever_there_is_comes_to_rest_with_everyone_at_its_share(world: World) -> None:
    before = world.counts()
    world.rest()
    share = fair_shares(world.demands, world.workers, world.held, world.past)
    assert {job: its.due for job, its in share.items()} == {job: its.holds for job, its in share.items()}
    for one in world.demands:
        has = world.counts().get(one.job_id, 0)
        assert has == 0 or has >= one.minimum or one.started or one.job_id in before


def wants_of(world: World) -> list[SeatDemand]:
    return [
        SeatDemand(
            d.job_id, d.priority, d.seats, 1, d.started, tuple(w.id for w in world.workers if d.queue in w.queues)
        )
        for d in world.demands
    ]


def best(wants: Sequence[SeatDemand], workers: Sequence[Available]) -> list[int]:
    """The fairest counts, ascending, by trying everything."""
    found: list[int] = []
    for owners in product([None, *(want.job_id for want in wants)], repeat=len(workers)):
        counts = Counter(owner for owner in owners if owner)
        fits = all(
            owner is None or worker.id in want.serving
            for owner, worker in zip(owners, workers, strict=True)
            for want in wants
            if want.job_id == owner
        )
        if fits and all(counts[want.job_id] <= want.seats for want in wants):
            found = max(found, sorted(counts[want.job_id] for want in wants))
    return found


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_jobs_of_one_priority_share_as_fairly_as_can_be(world: World) -> None:
    workers = world.workers[:4]
    there = {worker.id for worker in workers}
    wants = [replace(w, priority=0, serving=tuple(x for x in w.serving if x in there)) for w in wants_of(world)][:3]
    assert sorted(shares(wants).values()) == best(wants, workers)


@settings(max_examples=200, deadline=None)
@given(worlds(), st.data())
def test_what_was_refused_to_a_job_is_remembered_for_those_of_the_same_workers_alone(
    world: World, data: st.DataObject
) -> None:
    wants = [
        replace(w, minimum=data.draw(st.integers(1, 4)), started=data.draw(st.booleans())) for w in wants_of(world)
    ]
    in_other_orders = [
        replace(want, serving=tuple(data.draw(st.permutations(want.serving)))) for want in wants
    ]  # jobs of one queue have no memory in common then
    assert shares(wants) == shares(in_other_orders)


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_a_job_of_lower_priority_costs_one_of_higher_nothing(world: World) -> None:
    wants = [replace(want, started=False) for want in wants_of(world)]
    highest = max(want.priority for want in wants)
    top = [want for want in wants if want.priority == highest]
    together = shares(wants)
    assert shares(top) == {want.job_id: together[want.job_id] for want in top}


def test_workers_of_a_queue_are_shared_evenly_and_the_odd_one_stays_where_it_is() -> None:
    jobs = [demand("a"), demand("b")]
    assert {j: s.due for j, s in fair_shares(jobs, reds(5), []).items()} == {"a": 3, "b": 2}
    other = [serving("w1", "a"), serving("w2", "a"), *(serving(f"w{n}", "b", n) for n in (3, 4, 5))]
    assert {j: s.due for j, s in fair_shares(jobs, reds(5), other).items()} == {"a": 2, "b": 3}
    assert decide_seats([waited(job, 10**6) for job in jobs], reds(5), other) == []


def test_a_newcomer_gets_a_worker_of_a_job_that_has_two_more_but_not_before_ten_seconds() -> None:
    both = [serving("w1", "a"), serving("w2", "a", 2)]
    new = demand("b")
    assert decide_seats([demand("a"), waited(new, REBALANCE_MS - 1)], reds(2), both) == []
    assert decide_seats([demand("a"), waited(new, REBALANCE_MS)], reds(2), both) == [Leave("w1-a-1", "b", "share")]
    lately = demand("a"), waited(new, REBALANCE_MS, REBALANCE_MS - 1)
    assert decide_seats(lately, reds(2), both) == []
    one = [serving("w1", "a"), serving("w2", "b")]
    assert decide_seats([demand("a"), demand("b"), waited(demand("c"), 10**6)], reds(2), one) == []


def test_a_worker_that_is_leaving_for_a_job_is_not_asked_again_and_no_other_is() -> None:
    leaving = replace(serving("w1", "a"), leaving_ms=0, left_to="b")
    seats = [leaving, serving("w2", "a", 2)]
    jobs = [demand("a"), waited(demand("b"), 10**6)]
    assert decide_seats(jobs, reds(2), seats) == []
    over = [replace(leaving, state="finished"), seats[1]]
    assert decide_seats(jobs, reds(2), over) == [Close("w1-a-1", "left", stop=False), Issue("b", "w1", 1)]


def test_a_higher_priority_takes_over_politely_one_worker_every_few_seconds() -> None:
    world = World([demand("low"), demand("high", seats=2, priority=1)], reds(2))
    world.held = [serving("w1", "low"), serving("w2", "low", 2)]
    left = [turn for turn in range(20) for action in world.turn() if isinstance(action, Leave)]
    assert len(left) == 2 and left[0] >= TAKE_OVER_MS // TURN_MS
    assert left[1] - left[0] >= TAKE_OVER_MS // TURN_MS
    assert world.counts() == {"high": 2}


def test_a_seat_that_has_not_begun_is_taken_back_without_asking() -> None:
    waiting = serving("w1", "low", state="queued")
    actions = decide_seats([demand("low"), waited(demand("high", priority=5), 10**6)], reds(1), [waiting])
    assert actions == [Close(waiting.id, "stopped", stop=True)]


def test_a_job_that_cannot_reach_its_minimum_blocks_nobody() -> None:
    jobs = [replace(demand("big", minimum=3), started=False), demand("small")]
    assert {j: s.due for j, s in fair_shares(jobs, reds(2), []).items()} == {"big": 0, "small": 2}


def test_a_running_job_keeps_its_minimum_against_a_newcomer() -> None:
    jobs = [demand("runs", minimum=2), replace(demand("new", minimum=2), started=False)]
    held = [serving("w1", "runs"), serving("w2", "runs", 2), serving("w3", "runs", 3)]
    assert {j: s.due for j, s in fair_shares(jobs, reds(3), held).items()} == {"runs": 3, "new": 0}
    assert {j: s.due for j, s in fair_shares(jobs[::-1], reds(3), held).items()} == {"runs": 3, "new": 0}


def test_a_job_that_lost_its_minimum_keeps_its_place_only_while_nobody_needs_it() -> None:
    held = [serving("w1", "hurt"), serving("w2", "hurt", 2)]
    hurt = demand("hurt", minimum=3)
    assert decide_seats([hurt], reds(2), held) == []
    actions = decide_seats([hurt, waited(demand("other"), REBALANCE_MS)], reds(2), held)
    assert actions == [Leave("w1-hurt-1", "other", "share")]


def test_others_change_places_where_that_gives_a_job_its_share() -> None:
    workers = [Available("both", ("red", "blue")), Available("only", ("red",)), Available("third", ("red",))]
    held = [serving("both", "r1"), serving("only", "r2"), serving("third", "r2", 2)]
    jobs = [demand("r1"), demand("r2"), waited(demand("b", queue="blue"), REBALANCE_MS)]
    assert decide_seats(jobs, workers, held) == [Leave("both-r1-1", "b", "share"), Leave("only-r2-1", "r1", "share")]


def test_a_drained_worker_leaves_its_seat_and_gets_none() -> None:
    drained = [Available("w1", ("red",), off="drained"), Available("w2", ("red",), off="drained")]
    actions = decide_seats([demand("a")], drained, [serving("w1", "a")])
    assert actions == [Leave("w1-a-1", None, "drained")]
    asked = replace(serving("w1", "a"), leaving_ms=0)
    assert decide_seats([demand("a")], drained, [asked]) == []
    assert decide_seats([demand("a")], drained[:1], [replace(asked, state="finished")]) == [
        Close(asked.id, "left", stop=False)
    ]


def test_the_reason_says_who_is_served_first_and_who_is_drained() -> None:
    low, high = demand("low", queue="mnist"), demand("high", priority=1, queue="mnist")
    workers = [Available(f"w{n}", ("mnist",)) for n in (1, 2, 3)]
    held = [serving(w.id, "high", n) for n, w in enumerate(workers, 1)]
    text = "Waiting: 3 workers on queue mnist serve jobs of higher priority"
    assert shortage(low, workers, held, others=[low, high]) == Reason("busy", text)
    assert shortage(low, workers[:1], held[:1], others=[low, high]) == Reason(
        "busy", "Waiting: 1 worker on queue mnist serves a job of higher priority"
    )
    assert shortage(low, workers, held, others=[low, high], share=1) == Reason(
        "busy", "Waiting for 1 worker on queue mnist, which other jobs will release"
    )
    off = [replace(workers[0], off="drained")]
    assert shortage(low, off, []) == Reason("workers", "Needs 1 worker on queue mnist, 1 is online; 1 is drained", 1)
    none_works = [replace(worker, off="drained") for worker in workers]
    told = Reason("workers", "Needs 3 workers on queue mnist, 3 are online; 3 are drained", 3)
    assert shortage(demand("three", minimum=3, queue="mnist"), none_works, []) == told


def test_a_worker_that_hangs_when_it_is_to_leave_is_stopped_so_that_the_other_job_gets_it() -> None:
    jobs = [demand("a"), waited(demand("b"), 10**6)]
    asked = [replace(serving("w1", "a"), leaving_ms=LONGEST_LEAVE_MS, left_to="b"), serving("w2", "a", 2)]
    assert decide_seats(jobs, reds(2), asked) == []
    overdue = [replace(asked[0], leaving_ms=LONGEST_LEAVE_MS + 1), asked[1]]
    assert decide_seats(jobs, reds(2), overdue) == [Close("w1-a-1", "stopped", stop=True), Issue("b", "w1", 1)]
    drained = [Available("w1", ("red",), off="drained")]
    assert decide_seats(jobs[:1], drained, overdue[:1]) == [Close("w1-a-1", "stopped", stop=True)]
